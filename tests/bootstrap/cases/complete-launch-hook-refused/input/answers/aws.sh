# shellcheck shell=bash
echo "An error occurred (ValidationError): No active Lifecycle Action found" >&2
exit 254
