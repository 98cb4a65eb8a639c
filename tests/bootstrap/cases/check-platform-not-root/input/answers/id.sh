# shellcheck shell=bash
echo 1000
exit 0
