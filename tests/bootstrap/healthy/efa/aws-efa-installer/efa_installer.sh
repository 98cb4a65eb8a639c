#!/usr/bin/env bash
# What the tarball of the fake curl holds.
set -euo pipefail
printf '%s\n' "efa_installer.sh $*" >>"$FAKE_CALLS"
