# shellcheck shell=bash
echo "0x438 ext4 0b3f1a2c data"
exit 0
