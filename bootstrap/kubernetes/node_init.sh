#!/usr/bin/env bash
# Checks the hardware of a Kubernetes node (Amazon's EKS image of Amazon Linux 2023), or has the node replaced. Run as
# root by user data, which cloud-init runs before nodeadm starts kubelet: an unhealthy node never joins the cluster.
# https://github.com/awslabs/amazon-eks-ami/blob/main/templates/al2023/runtime/rootfs/etc/systemd/system/nodeadm-run.service
#
# The training container brings its own software, so this script installs none, and starts gpufleet-node.service
# (serve.sh), which runs as long as the node.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# Attempts of a check, RETRY_DELAY_S apart: drivers and NVIDIA's fabric manager come up beside cloud-init.
: "${CHECK_ATTEMPTS:=24}"
# 2 MiB pages for EFA's programs on each node, as EFA's driver reserves them:
# https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
: "${EFA_HUGE_PAGES:=5128}"

current=start

on_exit() {
  local status=$?
  trap - EXIT
  if ((status == 0)); then return; fi
  log "FAIL node set-up failed in $current with exit code $status after $SECONDS s: this node is replaced"
  timeout 60 "$BOOTSTRAP_DIR/steps/report-failure.sh" "$current" "$status" || log "the failure could not be reported"
  # The launch template makes a shutdown a termination, and the group starts another node.
  "$BOOTSTRAP_DIR/steps/complete-launch-hook.sh" ABANDON || log "ABANDON failed"
  shutdown -h now
  exit "$status"
}

# check_efa_devices: check their number; check-efa needs libfabric and NCCL's plugin, which are the container's.
check_efa_devices() {
  local -a devices=("$ROOT"/sys/class/infiniband/*)
  [[ -e ${devices[0]} ]] || devices=()
  ((${#devices[@]} == GPUFLEET_EFA_CARDS)) ||
    die "${#devices[@]} EFA devices are there, the plan counts on $GPUFLEET_EFA_CARDS"
}

# reserve_huge_pages: before kubelet starts and counts them.
reserve_huge_pages() {
  local have
  have=$(sysctl --values vm.nr_hugepages)
  ((have >= EFA_HUGE_PAGES)) || sysctl --quiet --write "vm.nr_hugepages=$EFA_HUGE_PAGES"
  have=$(sysctl --values vm.nr_hugepages)
  ((have >= EFA_HUGE_PAGES)) || die "$have huge pages could be reserved, EFA needs $EFA_HUGE_PAGES"
}

umask 022
mkdir -p "$LOG_DIR" "$STATE_DIR" "$GPUFLEET_RUN_DIR"
LOG_COPY=$LOG_FILE
trap on_exit EXIT
load_node_env

current=start-lease
"$BOOTSTRAP_DIR/steps/start-lease.sh"
checks=$(in_order checks)
for current in $checks; do
  [[ $current != check-efa ]] || continue
  retry "$CHECK_ATTEMPTS" "$BOOTSTRAP_DIR/checks/$current.sh" >>"$LOG_FILE" 2>&1 || die "$current failed"
done
if ((GPUFLEET_EFA_CARDS > 0)); then
  current=check-efa-devices
  check_efa_devices
  current=reserve-huge-pages
  reserve_huge_pages
fi
current=start-service
install -D --mode 0644 "$BOOTSTRAP_DIR/kubernetes/gpufleet-node.service" \
  "$ROOT/etc/systemd/system/gpufleet-node.service"
systemctl daemon-reload
# gpufleet-node waits for kubelet, which waits for this script.
systemctl enable --now --no-block gpufleet-node.service
log "node proven after $SECONDS s; kubelet may start"
