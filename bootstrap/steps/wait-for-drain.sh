#!/usr/bin/env bash
# Exits when the group ends this node.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

watch_notices --once
