# shellcheck shell=bash
if [[ $* == *--query-remapped-rows=* ]]; then
  echo "00000000:00:1E.0, [N/A], [N/A]"
  exit 0
fi
