# shellcheck shell=bash
cat >/dev/null
exit 1
