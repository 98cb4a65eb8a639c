# shellcheck shell=bash
printf '%s\n' Avail 150G
exit 0
