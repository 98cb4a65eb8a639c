# shellcheck shell=bash
case "$*" in
  "-c import torch"*) echo "2.11.0 2.28.9 True" ;;
  *"-m bootstrap.smoke "*) echo "smoke: pass" >&2 ;;
esac
exit 0
