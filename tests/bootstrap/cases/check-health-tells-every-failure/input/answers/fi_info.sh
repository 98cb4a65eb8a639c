# shellcheck shell=bash
exit 61
