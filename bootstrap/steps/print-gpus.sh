#!/usr/bin/env bash
# Prints the state of the GPUs every 15 s, for gpufleet-gpus.service: a line "gpu, ..." a GPU, with the fields of
# bootstrap/contract/gpus.py; since boot, "xid, NUMBER, COUNT" a kind of Xid message.
set -uo pipefail

: "${PRINT_EVERY_S:=15}" # 0: print once
fields=index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm
fields+=,clocks_event_reasons.active,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total

while :; do
  # A killed nvidia-smi can hang in the driver, and timeout waits for it: no second one starts beside it.
  timeout 10 nvidia-smi --query-gpu="$fields" --format=csv,noheader,nounits | sed 's/^/gpu, /'
  dmesg | sed --silent 's/.*NVRM: Xid ([^)]*): \([0-9]*\).*/\1/p' | sort | uniq -c | awk '{ print "xid, " $2 ", " $1 }'
  ((PRINT_EVERY_S)) || exit 0
  sleep "$PRINT_EVERY_S"
done
