# shellcheck shell=bash
if [[ $* == *gpufleet-gpus* || $* == set-property* ]]; then exit 1; fi
