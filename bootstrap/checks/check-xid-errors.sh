#!/usr/bin/env bash
# Order: 40
# No Xid error since boot: nothing but the hardware can have caused one.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# https://docs.nvidia.com/deploy/xid-errors/
messages=$(dmesg) || die "the kernel's messages cannot be read"
errors=$(grep 'NVRM: Xid' <<<"$messages" || true)
[[ -z $errors ]] || die "the driver reports $(wc --lines <<<"$errors") Xid errors, the first: $(head -n 1 <<<"$errors")"
