# shellcheck shell=bash
case "$*" in
  --machine) echo x86_64 ;;
  --kernel-release) echo 6.14.0-1011-aws ;;
esac
exit 0
