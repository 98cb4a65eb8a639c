#!/usr/bin/env bash
# No Xid error since boot: nothing has run on this node that could have caused one but the hardware.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# https://docs.nvidia.com/deploy/xid-errors/
messages=$(dmesg) || die "the kernel's messages cannot be read"
errors=$(grep 'NVRM: Xid' <<<"$messages" || true)
[[ -z $errors ]] || die "the driver reports $(wc --lines <<<"$errors") Xid errors, the first: $(head -n 1 <<<"$errors")"
