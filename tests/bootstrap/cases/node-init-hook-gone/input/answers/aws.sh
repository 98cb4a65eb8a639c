# shellcheck shell=bash
if [[ $* == *complete-lifecycle-action* ]]; then exit 254; fi
