# shellcheck shell=bash
if [[ $* == "update "* && ! -e $FAKE_STATE/released ]]; then
  echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)" >&2
  exit 100
fi
