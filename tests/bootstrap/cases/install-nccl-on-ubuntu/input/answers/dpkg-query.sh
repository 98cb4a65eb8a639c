# shellcheck shell=bash
echo -n 1.1-1
exit 0
