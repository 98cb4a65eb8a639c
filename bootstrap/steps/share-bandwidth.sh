#!/usr/bin/env bash
# Order: 107
# Bounds what the node sends outside its VPC (checkpoints to S3) where gpufleet:uploadMbitPerS asks for it, so that the
# gradients on the same network card keep the rest. Gone after a reboot: gpufleet-train.service runs this again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

if [[ -z ${GPUFLEET_UPLOAD_MBIT_PER_S:-} ]]; then
  log "no bound on uploads"
  exit 0
fi
card=$(awk '$2 == "00000000" { print $1; exit }' "$ROOT/proc/net/route")
[[ -n $card ]] || die "no default route: the network card that sends to S3 is unknown"
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html
ranges=$(imds "network/interfaces/macs/$(imds mac)/vpc-ipv4-cidr-blocks")
command -v tc >/dev/null || die "no tc on this image: install iproute2 into it, or unset gpufleet:uploadMbitPerS"
# https://man7.org/linux/man-pages/man8/tc-htb.8.html: class 1:0 is sent as if there were no queue.
tc qdisc delete dev "$card" root 2>/dev/null || true
tc qdisc add dev "$card" root handle 1: htb default 1
tc class add dev "$card" parent 1: classid 1:1 htb rate "${GPUFLEET_UPLOAD_MBIT_PER_S}mbit" quantum 60000
for range in $ranges; do
  tc filter add dev "$card" parent 1: protocol ip prio 1 u32 match ip dst "$range" flowid 1:0
done
log "$card sends at most $GPUFLEET_UPLOAD_MBIT_PER_S Mbit/s outside of ${ranges//$'\n'/, }"
