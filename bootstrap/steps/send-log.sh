#!/usr/bin/env bash
# send-log.sh STREAM TITLE FILE: sends the end of a log to the stack's log group; the node's own copy ends with its
# disks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

[[ -n ${GPUFLEET_LOG_GROUP:-} ]] || exit 0
# In memory: the root volume may be full.
mkdir -p "$(dirname "$GPUFLEET_RUN_DIR")"
events=$(mktemp "$GPUFLEET_RUN_DIR.XXXXXX")
trap 'rm -f "$events"' EXIT
# One event with the last lines; an event holds 256 KB.
tail -n 200 "$3" | python3 -c '
import json, sys, time
text = sys.stdin.read()[-200_000:] or "no log"
json.dump([{"timestamp": int(time.time() * 1000), "message": f"{sys.argv[1]}\n{text}"}], sys.stdout)
' "$2" >"$events"
# After a reboot the stream may exist.
aws logs create-log-stream --region "$GPUFLEET_REGION" --log-group-name "$GPUFLEET_LOG_GROUP" --log-stream-name "$1" ||
  log "log stream $1 was not created; it may be there"
aws logs put-log-events --region "$GPUFLEET_REGION" --log-group-name "$GPUFLEET_LOG_GROUP" --log-stream-name "$1" \
  --log-events "file://$events"
log "the end of the log is in $GPUFLEET_LOG_GROUP, stream $1"
