# shellcheck shell=bash
exit 254
