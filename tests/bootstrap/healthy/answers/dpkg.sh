# shellcheck shell=bash
if [[ $* == --print-architecture ]]; then echo amd64; fi
exit 0
