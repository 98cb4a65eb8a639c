# shellcheck shell=bash
exit 1 # not installed
