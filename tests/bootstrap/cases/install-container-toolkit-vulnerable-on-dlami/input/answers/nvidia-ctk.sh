# shellcheck shell=bash
echo "NVIDIA Container Toolkit CLI version 1.17.7"
exit 0
