# shellcheck shell=bash
if [[ $* == *--fingerprint* ]]; then
  printf "%s\n" pub:::: fpr:::::::::4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC: pub:::: fpr:::::::::1111111111111111111111111111111111111111:
  exit 0
fi
