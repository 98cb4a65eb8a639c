# shellcheck shell=bash
if [[ $* == *--query-remapped-rows=* ]]; then
  echo "00000000:10:1C.0, No, No"
  echo "00000000:10:1D.0, No, Yes"
  exit 0
fi
