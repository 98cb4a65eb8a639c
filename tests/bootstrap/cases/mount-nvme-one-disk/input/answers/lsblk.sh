# shellcheck shell=bash
echo 'PATH="/dev/nvme0n1" TYPE="disk" MODEL="Amazon Elastic Block Store"'
echo 'PATH="/dev/nvme1n1" TYPE="disk" MODEL="Amazon EC2 NVMe Instance Storage"'
exit 0
