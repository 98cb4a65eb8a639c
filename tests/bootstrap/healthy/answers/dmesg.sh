# shellcheck shell=bash
echo "[    8.12] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.91.07"
exit 0
