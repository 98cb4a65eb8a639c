#!/usr/bin/env bash
# Order: 35
# Starts the CloudWatch agent of the Deep Learning AMI, which sends GPU metrics, the training's speed and output; a node
# without the agent goes on.
#
# Images that have the agent: https://docs.aws.amazon.com/dlami/latest/devguide/tutorial-gpu-monitoring-gpumon.html; 1.300071 in
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpupt211oss-ul2404-2026-08-17.html
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

group=${GPUFLEET_LOG_GROUP:-}
if [[ -z $group ]]; then
  log "no metrics and no output in CloudWatch: GPUFLEET_LOG_GROUP is empty"
  exit 0
fi
control=$ROOT/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl
if [[ ! -x $control ]]; then
  log "WARN this image has no CloudWatch agent, so metrics and output stay on the node; a Deep Learning AMI brings it"
  exit 0
fi
config=$ETC_DIR/cloudwatch-agent.json
# The metrics' namespace is the group's name without its first slash (infra/naming.py).
sed "s|REGION|$GPUFLEET_REGION|; s|NAMESPACE|${group#/}|; s|GROUP|$group|; s|LOG_DIR|${LOG_DIR#"$ROOT"}|" \
  "$BOOTSTRAP_DIR/cloudwatch-agent.json" >"$config"
# Never at training's expense.
systemctl set-property amazon-cloudwatch-agent.service CPUWeight=1 MemoryMax=512M || log "the agent has no limits"
"$control" -a fetch-config -m ec2 -s -c "file:${config#"$ROOT"}" ||
  log "the CloudWatch agent did not start: journalctl -u amazon-cloudwatch-agent"
unit=gpufleet-gpus.service
install -D --mode 0644 "$BOOTSTRAP_DIR/$unit" "$ROOT/etc/systemd/system/$unit"
systemctl daemon-reload
systemctl enable --now "$unit" || log "$unit did not start: status shows no GPUs of this node"
log "the CloudWatch agent sends to $group"
