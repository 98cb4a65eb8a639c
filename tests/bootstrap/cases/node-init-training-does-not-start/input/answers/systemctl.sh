# shellcheck shell=bash
if [[ $* == *gpufleet-train.service && $1 == enable ]]; then exit 1; fi
