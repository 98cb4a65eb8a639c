# shellcheck shell=bash
if [[ $* == *ABANDON ]]; then exit 0; fi
