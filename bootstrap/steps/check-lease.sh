#!/usr/bin/env bash
# Looks once at the lease of this node (agent/__main__.py). Run by gpufleet-lease.timer as long as the node lives.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

agent check-lease
