"""User data: a node's first boot writes the plan's facts to a file, fetches the bootstrap bundle, checks and runs it.

Every process on the node, and everyone who may describe the launch template, can read it: no secret belongs here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message

from bootstrap.contract import report
from bootstrap.contract.codec import to_json
from bootstrap.contract.node_env import NodeEnvironment
from infra.bundle import ENTRY_POINT, KUBERNETES_ENTRY_POINT
from infra.naming import Names
from infra.settings import Settings

# Raw, before base64: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-add-user-data.html
LIMIT_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Facts of a node that are known once the other components exist."""

    bucket: str
    bundle_key: str
    bundle_sha256: str
    train_archive: str
    key_arn: str
    log_group: str
    ami_kind: str
    lustre: str = ""


def environment(settings: Settings, names: Names, facts: NodeFacts) -> NodeEnvironment:
    """Variables of /etc/gpufleet/node.env."""
    plan, split = settings.plan, settings.plan.parallelism
    budget, deadline = plan.job.budget_usd, plan.job.deadline_hours
    # A worker trains alone: its job has the node's share of the plan's ranks and price.
    jobs = plan.node_count if settings.mode == "workers" else 1
    return {
        "GPUFLEET_STACK": names.stack,
        "GPUFLEET_RUN": settings.run_id(facts.train_archive),
        "GPUFLEET_MODE": settings.mode,
        "GPUFLEET_REGION": names.region,
        "GPUFLEET_ASG_NAME": names.group,
        "GPUFLEET_LAUNCH_HOOK": names.launch_hook,
        "GPUFLEET_TERMINATE_HOOK": names.terminate_hook,
        "GPUFLEET_BUCKET": facts.bucket,
        "GPUFLEET_REPORT_FOLDER": f"{names.control_prefix}/{report.FOLDER}/{names.arn('ec2', 'instance')}",
        "GPUFLEET_CHECKPOINT_PREFIX": names.checkpoint_prefix,
        "GPUFLEET_KMS_KEY_ARN": facts.key_arn,
        "GPUFLEET_LOG_GROUP": facts.log_group,
        "GPUFLEET_NODE_COUNT": str(plan.node_count // jobs),
        "GPUFLEET_GPUS_PER_NODE": str(plan.node.ranks),
        "GPUFLEET_EFA_CARDS": str(plan.node.efa_cards),
        "GPUFLEET_GPUDIRECT": str(int(plan.node.needs_efa)),
        "GPUFLEET_INSTANCE_TYPE": plan.instance_type,
        "GPUFLEET_GPU": plan.node.gpu,
        "GPUFLEET_ARCHITECTURE": _compact_json(plan.job.architecture) if plan.job.architecture else "",
        "GPUFLEET_PRECISION": plan.job.precision,
        "GPUFLEET_OPTIMIZER": plan.job.optimizer,
        "GPUFLEET_METHOD": plan.job.tuning.method,
        "GPUFLEET_LORA_RANK": str(plan.job.tuning.lora_rank),
        "GPUFLEET_LORA_ALPHA": str(plan.job.tuning.lora_alpha),
        "GPUFLEET_LORA_TARGETS": plan.job.tuning.lora_targets,
        "GPUFLEET_FROZEN": plan.job.tuning.frozen,
        "GPUFLEET_COMPILED": str(int(plan.job.compiled)),
        "GPUFLEET_GLOBAL_BATCH": str(plan.job.global_batch // jobs),
        "GPUFLEET_STEPS": str(plan.job.steps),
        "GPUFLEET_DATA_PARALLEL": str(split.data // jobs),
        "GPUFLEET_SHARDING": split.sharding,
        "GPUFLEET_TENSOR_PARALLEL": str(split.tensor),
        "GPUFLEET_PIPELINE_PARALLEL": str(split.pipeline),
        "GPUFLEET_CONTEXT_PARALLEL": str(split.context),
        "GPUFLEET_EXPERT_PARALLEL": str(split.expert),
        "GPUFLEET_SEQUENCE_PARALLEL": str(int(split.sequence_parallel)),
        "GPUFLEET_VIRTUAL_STAGES": str(split.virtual_stages),
        "GPUFLEET_SEQ_LEN": str(plan.job.seq_len),
        "GPUFLEET_TARGET_LEN": str(plan.job.target_len or ""),
        "GPUFLEET_MICRO_BATCH": str(split.micro_batch),
        "GPUFLEET_GRAD_ACCUM": str(split.grad_accum),
        "GPUFLEET_ACTIVATION_CHECKPOINTING": split.activation_checkpointing,
        "GPUFLEET_GRADIENT_COMPRESSION": split.gradient_compression,
        "GPUFLEET_SHARES": "",  # a stack's nodes have one type of GPU
        "GPUFLEET_STEP_TIME_S": _number(plan.step_time_s),
        "GPUFLEET_STEP_TIME_P95_S": _number(plan.step_time_p95_s),
        "GPUFLEET_TOKENS_PER_SECOND": _number(plan.tokens_per_second / jobs),
        "GPUFLEET_EXPECTED": _compact_json(to_json(plan.expected)) if plan.expected else "",
        "GPUFLEET_PEAK_MEMORY_GIB": _number(plan.memory.peak_gib),
        "GPUFLEET_CHECKPOINT_INTERVAL_S": _number(plan.interruption.checkpoint_interval_s),
        "GPUFLEET_SCALE_IN_LIMIT_S": str(plan.save_limit_s),
        "GPUFLEET_DEADLINE_HOURS": "" if deadline is None else _number(deadline),
        "GPUFLEET_BUDGET_USD": "" if budget is None else _number(budget),
        "GPUFLEET_PRICE_USD_PER_HOUR": _number(plan.compute_usd_per_hour / jobs),
        "GPUFLEET_TRAIN_ARCHIVE": facts.train_archive,
        "GPUFLEET_TRAIN_COMMAND": settings.command,
        "GPUFLEET_IMAGE": settings.image,
        "GPUFLEET_NSIGHT": "1" if settings.nsight else "",
        "GPUFLEET_BAD_HOST_HOLD_S": "0" if settings.in_reservation else "",
        "GPUFLEET_STANDBY": "1" if settings.standby else "",
        "GPUFLEET_TRAIN_ROLE_ARN": names.training_role_arn(settings.iam_path) if settings.has_training_role else "",
        "GPUFLEET_UPLOAD_MBIT_PER_S": str(settings.upload_mbit_per_s or ""),
        "GPUFLEET_TRAIN_DATA": settings.data,
        "GPUFLEET_LUSTRE": facts.lustre,
        "GPUFLEET_STAGING_LIMIT_S": str(settings.staging_limit_s),
        "GPUFLEET_BASE_WEIGHTS": settings.base_weights,
        "GPUFLEET_AMI_KIND": facts.ami_kind,
    }


# User data runs at the first boot only, and a node of the warm pool boots again with its launch hook waiting. A node
# that has the training service only reboots.
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


def environment_file(variables: Mapping[str, object]) -> str:
    """Lines that a shell reads back exactly; a value with a control character raises ValueError."""
    texts = {name: str(value) for name, value in variables.items()}
    for name, text in texts.items():
        if not text.isprintable():
            raise ValueError(f"{name} has a line break or control character: {text!r}")
    return "".join(f"{name}={shlex.quote(text)}\n" for name, text in texts.items())


def user_data(settings: Settings, names: Names, facts: NodeFacts, node_config: str = "") -> str:
    """Script of a node's first boot, at most 16 KiB (else ValueError); on eks with ``node_config`` for nodeadm."""
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
{environment_file(environment(settings, names, facts))}END_OF_NODE_ENV
chmod 0644 /etc/gpufleet/node.env

bundle=$(mktemp)
# In a stack's first minute its role and policies are still spreading through AWS.
for attempt in {{1..10}}; do
  if aws s3 cp --only-show-errors --region {quote(names.region)} \\
    {quote(f"s3://{facts.bucket}/{facts.bundle_key}")} "${{bundle}}"; then
    break
  fi
  echo "gpufleet: attempt ${{attempt}} of 10 to read the bundle failed" >&2
  sleep "${{RETRY_DELAY_S:-6}}"
done
echo "{facts.bundle_sha256}  ${{bundle}}" | sha256sum --check --status
tar -xzf "${{bundle}}" -C /opt/gpufleet --no-same-owner
rm -f "${{bundle}}"
{_AT_EVERY_BOOT if settings.warm_pool else ""}
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
    """Join contents by content type; cloud-init and nodeadm take each its part.

    https://cloudinit.readthedocs.io/en/latest/explanation/format.html#mime-multi-part-archive
    """
    whole = Message()
    whole["MIME-Version"] = "1.0"
    # Fixed, so that the same plan gives the same launch template.
    whole["Content-Type"] = 'multipart/mixed; boundary="=====gpufleet====="'
    for content_type, content in parts.items():
        part = Message()
        part["Content-Type"] = content_type
        part.set_payload(content)
        whole.attach(part)
    return whole.as_string()


def _compact_json(value: Mapping[str, object]) -> str:
    # ASCII without single quotes, which every reader of node.env takes alike within single quotes.
    return json.dumps(value, separators=(",", ":"), sort_keys=True).replace("'", "\\u0027")


def _number(value: float) -> str:
    return format(value, ".10g")
