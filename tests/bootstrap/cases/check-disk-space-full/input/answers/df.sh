# shellcheck shell=bash
printf "%s\n" Avail 3G
exit 0
