#!/usr/bin/env bash
# Order: 106
# Keeps the training's user off the metadata service, and so off the node's credentials, where training has a role of its
# own (GPUFLEET_TRAIN_ROLE_ARN). The rule is gone after a reboot: gpufleet-train.service runs this again.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

if [[ -z ${GPUFLEET_TRAIN_ROLE_ARN:-} ]]; then
  log "training has the node's role"
  exit 0
fi
user=$(sed --silent 's/^GPUFLEET_TRAIN_USER=//p' "$RUNTIME_ENV" 2>/dev/null || true)
[[ -n $user ]] || die "GPUFLEET_TRAIN_USER is missing from $RUNTIME_ENV: create-training-user.sh writes it"
command -v iptables >/dev/null || end_run "no iptables on this image: training would reach the node's credentials;" \
  "install it into the image, or set gpufleet:isolateTraining false"
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-limiting-access.html
# First in the chain, before a rule that accepts. The service's IPv6 address is off unless a launch template asks for it.
rule=(OUTPUT --proto tcp --destination 169.254.169.254 --match owner --uid-owner "$user" --jump REJECT)
if ! iptables --wait --check "${rule[@]}" 2>/dev/null; then
  iptables --wait --insert "${rule[@]}" || die "iptables takes no rule for user $user"
fi
log "user $user does not reach the metadata service"
