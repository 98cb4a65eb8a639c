"""User data: a node's first boot writes the plan's facts to a file, fetches the bootstrap bundle, checks and runs it.

Every process on the node, and everyone who may describe the launch template, can read it: no secret belongs here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath

from bootstrap.contract import report
from bootstrap.contract.node_env import NodeEnvironment
from infra.bundle import ENTRY_POINT
from infra.naming import Names
from infra.settings import StackSettings
from optimizer.contract.plan_variables import plan_variables

# Raw, before base64: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-add-user-data.html
LIMIT_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Facts of a node that are known once the other components exist."""

    bucket: str
    bundle_key: str  # names its digest
    train_archive: str
    key_arn: str
    log_group: str
    ami_kind: str
    group: str  # Auto Scaling groups of its place with commas, the node's own first
    lustre: str = ""

    @classmethod
    def longest(cls) -> NodeFacts:
        """Make facts no shorter than the real ones (a name with a digest), before there is a resource."""
        return cls(**dict.fromkeys((item.name for item in fields(cls)), "0" * 90))


def environment(settings: StackSettings, names: Names, facts: NodeFacts) -> NodeEnvironment:
    """Variables of /etc/gpufleet/node.env."""
    plan = settings.plan
    # A worker trains alone: its job has the node's share of the plan's ranks and price.
    jobs = plan.node_count if settings.mode == "workers" else 1
    return {
        "GPUFLEET_STACK": names.stack,
        "GPUFLEET_RUN": settings.run_id(facts.train_archive),
        "GPUFLEET_MODE": settings.mode,
        "GPUFLEET_REGION": names.region,
        "GPUFLEET_ASG_NAME": facts.group,
        "GPUFLEET_TERMINATE_HOOK": names.terminate_hook,
        "GPUFLEET_BUCKET": facts.bucket,
        "GPUFLEET_REPORT_FOLDER": f"{names.control_prefix}/{report.FOLDER}/{names.arn('ec2', 'instance')}",
        "GPUFLEET_KMS_KEY_ARN": facts.key_arn,
        "GPUFLEET_LOG_GROUP": facts.log_group,
        **plan_variables(plan, jobs=jobs),
        "GPUFLEET_TRAIN_ARCHIVE": facts.train_archive,
        "GPUFLEET_TRAIN_COMMAND": settings.command,
        "GPUFLEET_IMAGE": settings.image,
        "GPUFLEET_STANDBY": "1" if settings.standby else "",
        "GPUFLEET_TRAIN_ROLE_ARN": names.training_role_arn if settings.isolate_training else "",
        "GPUFLEET_TRAIN_DATA": settings.data,
        "GPUFLEET_LUSTRE": facts.lustre,
        "GPUFLEET_STAGING_LIMIT_S": str(settings.staging_limit_s),
        "GPUFLEET_BASE_WEIGHTS": settings.base_weights,
        "GPUFLEET_AMI_KIND": facts.ami_kind,
    }


def environment_file(variables: Mapping[str, object]) -> str:
    """Lines that a shell reads back exactly; a value with a control character raises ValueError."""
    texts = {name: str(value) for name, value in variables.items()}
    for name, text in texts.items():
        if not text.isprintable():
            raise ValueError(
                f"{name} has a line break or control character, {text!r}: let bash run.sh have a command's lines"
            )
    return "".join(f"{name}={shlex.quote(text)}\n" for name, text in texts.items())


def user_data(settings: StackSettings, names: Names, facts: NodeFacts) -> str:
    """Script of a node's first boot; ValueError above 16 KiB, or for a control character."""
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
echo "{PurePosixPath(facts.bundle_key).name.partition(".")[0]}  ${{bundle}}" | sha256sum --check --status
tar -xzf "${{bundle}}" -C /opt/gpufleet --no-same-owner
rm -f "${{bundle}}"

trap - ERR
exec /opt/gpufleet/{ENTRY_POINT}
"""
    size = len(text.encode())
    if size > LIMIT_BYTES:
        raise ValueError(
            f"user data is {size} bytes, the limit of EC2 is {LIMIT_BYTES}: gpufleet:trainCommand has "
            f"{len(settings.command)} characters, the plan's model {len(json.dumps(settings.plan.job.architecture))}: "
            "put a long command into a script, or leave out of config.json what does not shape the model, and plan anew"
        )
    return text
