# shellcheck shell=bash
grep --quiet --line-regexp --fixed-strings -- "${*: -1}" "$FAKE_STATE/mounts"
exit
