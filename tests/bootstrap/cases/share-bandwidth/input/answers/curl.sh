# shellcheck shell=bash
case "$*" in
  */latest/meta-data/mac) cat >/dev/null && echo -n 0e:49:61:0f:c3:11 && exit ;;
  */network/interfaces/macs/0e:49:61:0f:c3:11/vpc-ipv4-cidr-blocks) cat >/dev/null && printf '10.42.0.0/16\n10.43.0.0/16' && exit ;;
esac
