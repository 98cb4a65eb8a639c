# shellcheck shell=bash
exit 28
