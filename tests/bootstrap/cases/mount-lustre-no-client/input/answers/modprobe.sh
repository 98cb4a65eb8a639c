# shellcheck shell=bash
exit 1
