#!/usr/bin/env bash
# Runs every check and tells every failure, not just the first: a replaced node cannot be asked again.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

CHECKS=(
  check-driver
  check-gpus
  check-memory-errors
  check-xid-errors
  check-pcie
  check-nvlink
  check-efa
  check-clocks
  check-disk-space
  check-time
)

failed=()
for check in "${CHECKS[@]}"; do
  "$BOOTSTRAP_DIR/checks/$check.sh" || failed+=("$check")
done
((${#failed[@]} == 0)) || die "${#failed[@]} of ${#CHECKS[@]} health checks failed: ${failed[*]}"
log "${#CHECKS[@]} health checks passed"
