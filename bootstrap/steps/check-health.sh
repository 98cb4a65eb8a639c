#!/usr/bin/env bash
# Order: 110
# Runs every script of checks/ and reports every failure: a replaced node cannot be asked again.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

names=$(in_order checks)
mapfile -t checks <<<"$names"
failed=()
for check in "${checks[@]}"; do
  "$BOOTSTRAP_DIR/checks/$check.sh" || failed+=("$check")
done
((${#failed[@]} == 0)) || die "${#failed[@]} of ${#checks[@]} health checks failed: ${failed[*]}"
log "${#checks[@]} health checks passed"
