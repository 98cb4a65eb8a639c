#!/usr/bin/env bash
# Order: 10
# Ends unless this machine and node.env are what the other steps expect: Ubuntu, root, complete variables, tools.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

[[ $(id --user) == 0 ]] || die "node_init.sh runs as root"
load_node_env
require_env GPUFLEET_STACK GPUFLEET_REGION GPUFLEET_ASG_NAME GPUFLEET_BUCKET GPUFLEET_NODE_COUNT \
  GPUFLEET_GPUS_PER_NODE GPUFLEET_EFA_CARDS GPUFLEET_GPU GPUFLEET_AMI_KIND
[[ $GPUFLEET_GPUS_PER_NODE =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "GPUFLEET_GPUS_PER_NODE is not a number"
[[ $GPUFLEET_EFA_CARDS =~ ^[0-9]+$ ]] || die "GPUFLEET_EFA_CARDS is not a whole number"
[[ $GPUFLEET_AMI_KIND == dlami || $GPUFLEET_AMI_KIND == custom ]] || die "GPUFLEET_AMI_KIND is neither dlami nor custom"

release="$(os_release ID) $(os_release VERSION_ID)"
case $release in
  "ubuntu 22.04" | "ubuntu 24.04") ;;
  *) die "this is \"$release\"; the steps are written for Ubuntu 22.04 and 24.04" ;;
esac

for tool in aws curl python3 flock timeout setsid gpg; do
  command -v "$tool" >/dev/null || die "$tool is not installed; user data needs aws and curl itself"
done
