# shellcheck shell=bash
echo 'PATH="/dev/nvme0n1" TYPE="disk" MODEL="Amazon Elastic Block Store              "'
for disk in 1 2 3 4 5 6 7 8; do
  echo "PATH=\"/dev/nvme${disk}n1\" TYPE=\"disk\" MODEL=\"Amazon EC2 NVMe Instance Storage        \""
done
exit 0
