# shellcheck shell=bash
exit 2 # no such label
