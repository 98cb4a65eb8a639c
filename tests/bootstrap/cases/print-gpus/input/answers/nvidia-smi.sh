# shellcheck shell=bash
# Two H100 with driver 580 that answer; the exit status is of a third, which was lost.
echo "0, 87, 40536, 81559, 69.28, 33, 345, 0x0000000000000001, 0, 2"
echo "1, 0, 3, 81559, 60.00, 30, 345, 0x0000000000000000, 0, 0"
exit 15
