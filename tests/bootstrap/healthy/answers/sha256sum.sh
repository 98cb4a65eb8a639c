# shellcheck shell=bash
# Reads what it is asked to check, or the asker dies of a closed pipe.
cat >/dev/null
exit 0
