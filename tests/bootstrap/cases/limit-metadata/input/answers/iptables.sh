# shellcheck shell=bash
if [[ $* == *--insert* ]]; then
  touch "$FAKE_STATE/rule"
elif [[ ! -e $FAKE_STATE/rule ]]; then
  exit 1
fi
exit 0
