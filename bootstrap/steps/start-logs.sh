#!/usr/bin/env bash
# Installs and starts gpufleet-logs.service, which streams the training's output; a node without it goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

if [[ -z ${GPUFLEET_LOG_GROUP:-} ]]; then
  log "no log stream: GPUFLEET_LOG_GROUP is empty"
  exit 0
fi
start_side_service gpufleet-logs "this node streams no training output"
