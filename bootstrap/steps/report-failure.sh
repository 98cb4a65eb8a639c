#!/usr/bin/env bash
# report-failure.sh STEP: sends the end of the log to CloudWatch Logs and the console: ABANDON ends the node and its disks.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

# The console output stays readable for about an hour after the instance is gone (GetConsoleOutput).
if [[ -w $ROOT/dev/console ]]; then tail -n 5 "$LOG_FILE" >"$ROOT/dev/console" || true; fi
[[ -n ${GPUFLEET_LOG_GROUP:-} ]] || exit 0

instance=$(imds instance-id)
events=$(mktemp)
trap 'rm -f "$events"' EXIT
# One event with the last lines; an event holds 256 KB.
tail -n 200 "$LOG_FILE" | python3 -c '
import json, sys, time
text = sys.stdin.read()[-200_000:] or "no log"
json.dump([{"timestamp": int(time.time() * 1000), "message": f"node set-up failed in {sys.argv[1]}\n{text}"}], sys.stdout)
' "$1" >"$events"
stream=node-init/$instance
aws logs create-log-stream --region "$GPUFLEET_REGION" --log-group-name "$GPUFLEET_LOG_GROUP" --log-stream-name "$stream"
aws logs put-log-events --region "$GPUFLEET_REGION" --log-group-name "$GPUFLEET_LOG_GROUP" --log-stream-name "$stream" \
  --log-events "file://$events"
log "the failure's log is in $GPUFLEET_LOG_GROUP, stream $stream"
