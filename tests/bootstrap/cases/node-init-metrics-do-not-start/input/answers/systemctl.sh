# shellcheck shell=bash
if [[ $* == *gpufleet-metrics* ]]; then exit 1; fi
