#!/usr/bin/env bash
# Ends when the group ends this node.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

watch_notices --once
