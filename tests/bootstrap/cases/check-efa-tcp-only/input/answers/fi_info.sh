# shellcheck shell=bash
echo "fi_getinfo: -61 (No data available)" >&2
exit 61
