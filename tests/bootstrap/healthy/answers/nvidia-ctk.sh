# shellcheck shell=bash
echo "NVIDIA Container Toolkit CLI version 1.19.0"
exit 0
