# shellcheck shell=bash
if [[ $* == *--verify* ]]; then exit 1; fi
