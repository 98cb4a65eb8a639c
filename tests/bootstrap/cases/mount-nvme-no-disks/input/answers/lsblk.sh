# shellcheck shell=bash
echo 'PATH="/dev/nvme0n1" TYPE="disk" MODEL="Amazon Elastic Block Store"'
exit 0
