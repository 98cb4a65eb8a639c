#!/usr/bin/env bash
# report-failure.sh STEP EXIT_STATUS: reports why the set-up failed to the console, the log group and the controller,
# where the report outlives the node.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

# The console output stays readable for about an hour after the instance is gone (GetConsoleOutput).
if [[ -w $ROOT/dev/console ]]; then tail -n 5 "$LOG_FILE" >"$ROOT/dev/console" || true; fi
"$BOOTSTRAP_DIR/steps/send-log.sh" "node-init/$(imds instance-id)" "node set-up failed in $1" "$LOG_FILE" ||
  log "the failure could not be reported to CloudWatch Logs"
# EX_CONFIG: what the stack was given is at fault, and every node would fail alike.
state=unfit
if (($2 == 78)); then state=gave-up; fi
agent tell "$state" "$2" "$1" || log "the controller could not be told that this node is $state"
