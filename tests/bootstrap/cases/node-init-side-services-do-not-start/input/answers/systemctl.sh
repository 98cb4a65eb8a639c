# shellcheck shell=bash
if [[ $* == *gpufleet-metrics* || $* == *gpufleet-logs* ]]; then exit 1; fi
