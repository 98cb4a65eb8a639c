#!/usr/bin/env bash
# Looks once at the lease of this node (agent/__main__.py). Run by gpufleet-lease.timer as long as the node lives.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env
require_env GPUFLEET_BUCKET GPUFLEET_ASG_NAME GPUFLEET_REGION

agent check-lease
