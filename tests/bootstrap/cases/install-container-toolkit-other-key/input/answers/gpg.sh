# shellcheck shell=bash
if [[ $* == *--fingerprint* ]]; then
  printf "%s\n" pub:::: fpr:::::::::1111111111111111111111111111111111111111:
  exit 0
fi
