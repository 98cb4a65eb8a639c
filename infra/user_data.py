"""What a node runs at first boot: write the plan's facts to a file, fetch the bootstrap bundle, check it, run it.

Pure: a plan and names go in, text comes out. User data can be read by every process on the node and by everyone who may
describe the launch template, so no secret belongs here; secrets are SSM parameters.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from infra.bundle import ENTRY_POINT, KUBERNETES_ENTRY_POINT
from optimizer.plan import FleetPlan

# Raw, before base64: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-add-user-data.html
LIMIT_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What a node must know besides the plan; all of it is known when the launch template is made."""

    stack: str
    run: str
    mode: Literal["training", "workers"]
    group: str
    launch_hook: str
    terminate_hook: str
    bucket: str
    checkpoint_prefix: str
    key_arn: str
    log_group: str
    metric_namespace: str
    train_archive: str
    train_command: str
    ami_kind: str
    bundle_key: str
    bundle_sha256: str
    warm_pool: bool


def environment(plan: FleetPlan, facts: NodeFacts) -> dict[str, str]:
    """Variables of /etc/gpufleet/node.env: the contract with the bootstrap, which reads nothing else.

    Times in seconds, money in USD; GPUFLEET_PRICE_USD_PER_HOUR is the expected price of compute of all the nodes that
    train together. Deadline, budget, training code and command are empty where there are none. The parallelism is the
    plan's, number by number, for the training command: nothing downstream decides it again. A worker trains alone: its
    job is one node, with the node's share of the plan's data-parallel ranks.
    """
    budget, deadline = plan.job.budget_usd, plan.job.deadline_hours
    split = plan.parallelism
    jobs = plan.node_count if facts.mode == "workers" else 1
    return {
        "GPUFLEET_STACK": facts.stack,
        "GPUFLEET_RUN": facts.run,
        "GPUFLEET_MODE": facts.mode,
        "GPUFLEET_REGION": plan.region,
        "GPUFLEET_ASG_NAME": facts.group,
        "GPUFLEET_LAUNCH_HOOK": facts.launch_hook,
        "GPUFLEET_TERMINATE_HOOK": facts.terminate_hook,
        "GPUFLEET_BUCKET": facts.bucket,
        "GPUFLEET_CHECKPOINT_PREFIX": facts.checkpoint_prefix,
        "GPUFLEET_KMS_KEY_ARN": facts.key_arn,
        "GPUFLEET_LOG_GROUP": facts.log_group,
        "GPUFLEET_METRIC_NAMESPACE": facts.metric_namespace,
        "GPUFLEET_NODE_COUNT": str(plan.node_count // jobs),
        "GPUFLEET_GPUS_PER_NODE": str(plan.node.ranks),
        "GPUFLEET_EFA_CARDS": str(plan.node.efa_cards),
        "GPUFLEET_GPU": plan.node.gpu,
        "GPUFLEET_DATA_PARALLEL": str(split.data // jobs),
        "GPUFLEET_SHARDING": split.sharding,
        "GPUFLEET_TENSOR_PARALLEL": str(split.tensor),
        "GPUFLEET_PIPELINE_PARALLEL": str(split.pipeline),
        "GPUFLEET_CONTEXT_PARALLEL": str(split.context),
        "GPUFLEET_EXPERT_PARALLEL": str(split.expert),
        "GPUFLEET_SEQUENCE_PARALLEL": str(int(split.sequence_parallel)),
        "GPUFLEET_VIRTUAL_STAGES": str(split.virtual_stages),
        "GPUFLEET_SEQ_LEN": str(plan.job.seq_len),
        "GPUFLEET_MICRO_BATCH": str(split.micro_batch),
        "GPUFLEET_GRAD_ACCUM": str(split.grad_accum),
        "GPUFLEET_ACTIVATION_CHECKPOINTING": split.activation_checkpointing,
        "GPUFLEET_CHECKPOINT_INTERVAL_S": _number(plan.interruption.checkpoint_interval_s),
        "GPUFLEET_SCALE_IN_LIMIT_S": str(plan.save_limit_s),
        "GPUFLEET_DEADLINE_HOURS": "" if deadline is None else _number(deadline),
        "GPUFLEET_BUDGET_USD": "" if budget is None else _number(budget),
        "GPUFLEET_PRICE_USD_PER_HOUR": _number(plan.compute_usd_per_hour / jobs),
        "GPUFLEET_TRAIN_ARCHIVE": facts.train_archive,
        "GPUFLEET_TRAIN_COMMAND": facts.train_command,
        "GPUFLEET_AMI_KIND": facts.ami_kind,
    }


# User data runs at the first boot only, and a node of the warm pool boots again, perhaps on another host, with its
# launch hook waiting once more. The training service comes when a node enters service: with it, this boot is a reboot.
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/warm-pool-instance-lifecycle.html
# https://docs.cloud-init.io/en/latest/reference/modules.html#scripts-per-boot
_AT_EVERY_BOOT = f"""
cat >/var/lib/cloud/scripts/per-boot/gpufleet.sh <<'END_OF_SCRIPT'
#!/bin/bash
if [[ ! -e /etc/systemd/system/gpufleet-train.service ]]; then
  rm -f /var/lib/gpufleet/launch-hook
  exec /opt/gpufleet/{ENTRY_POINT}
fi
END_OF_SCRIPT
chmod 0755 /var/lib/cloud/scripts/per-boot/gpufleet.sh
"""


def environment_file(variables: Mapping[str, str]) -> str:
    """``variables`` as lines a shell reads back exactly, whatever the values hold.

    Raises:
        ValueError: a value has a line break or another control character.
    """
    for name, value in variables.items():
        if not value.isprintable():
            raise ValueError(f"{name} has a line break or control character: {value!r}")
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())


def user_data(plan: FleetPlan, facts: NodeFacts, node_config: str = "") -> str:
    """The script, at most 16 KiB; on platform eks beside what makes the node one of the cluster.

    Args:
        plan: the plan.
        facts: what a node must know besides.
        node_config: what nodeadm reads (infra.kubernetes.cluster.node_config); empty on platform ec2.

    Raises:
        ValueError: a value has a control character, or the script is too long.
    """
    quote = shlex.quote
    text = f"""#!/bin/bash
# Written by gpufleet; a change takes effect on nodes launched afterwards. Log: /var/log/cloud-init-output.log
set -euo pipefail

# A node that cannot even start its bootstrap must not idle at full price until its launch hook times out. The launch
# template turns shutdown into termination, and the group launches another; the console log keeps what happened.
trap 'echo "gpufleet: user data failed in line ${{LINENO}}, shutting down" >&2; shutdown -h now' ERR

install -d -m 0755 /etc/gpufleet /opt/gpufleet
# No line below can equal the delimiter: each begins with a variable's name, and no value has a line break.
cat >/etc/gpufleet/node.env <<'END_OF_NODE_ENV'
{environment_file(environment(plan, facts))}END_OF_NODE_ENV
chmod 0644 /etc/gpufleet/node.env

bundle=$(mktemp)
# In a stack's first minute its role and policies are still spreading through AWS.
for attempt in {{1..10}}; do
  if aws s3 cp --only-show-errors --region {quote(plan.region)} \\
    {quote(f"s3://{facts.bucket}/{facts.bundle_key}")} "${{bundle}}"; then
    break
  fi
  echo "gpufleet: attempt ${{attempt}} of 10 to read the bundle failed" >&2
  sleep "${{RETRY_DELAY_S:-6}}"
done
echo "{facts.bundle_sha256}  ${{bundle}}" | sha256sum --check --status
tar -xzf "${{bundle}}" -C /opt/gpufleet --no-same-owner
rm -f "${{bundle}}"
{_AT_EVERY_BOOT if facts.warm_pool else ""}
trap - ERR
exec /opt/gpufleet/{KUBERNETES_ENTRY_POINT if node_config else ENTRY_POINT}
"""
    if node_config:
        text = _multipart({"application/node.eks.aws": node_config, 'text/x-shellscript; charset="utf-8"': text})
    size = len(text.encode())
    if size > LIMIT_BYTES:
        raise ValueError(
            f"user data is {size} bytes, the limit is {LIMIT_BYTES}: put a long gpufleet:trainCommand into a script"
        )
    return text


def _multipart(parts: Mapping[str, str]) -> str:
    """Parts by content type, as cloud-init and nodeadm take them from one user data.

    https://cloudinit.readthedocs.io/en/latest/explanation/format.html#mime-multi-part-archive
    """
    boundary = "=====gpufleet====="
    text = f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{boundary}"\n'
    for content_type, content in parts.items():
        text += f"\n--{boundary}\nContent-Type: {content_type}\n\n{content}"
    return f"{text}\n--{boundary}--\n"


def _number(value: float) -> str:
    return format(value, ".10g")
