# shellcheck shell=bash
case "$*" in
  *--query-gpu=name\ *) echo "Tesla T4" ;;
  *--query-gpu=index,ecc*) echo "0, 0, No" ;;
  *--query-gpu=index,pcie*) echo "0, 8" ;;
  *--query-gpu=index,clocks*) echo "0, Not Active, Not Active, Not Active, Not Active" ;;
  *fabric* | nvlink* | *--query-remapped-rows=*) exit 9 ;;
esac
exit 0
