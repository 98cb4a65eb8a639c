"""Physical names and the ARNs built from them: the one place that knows AWS's name rules and lengths.

Pulumi makes up all other names, so that a replacement can be created before its predecessor is deleted.

Two people may each have a stack "dev" in one account. AWS refuses a second role, key alias, log group, function, group
or budget of a name, but silently overwrites rules (PutRule), returns the first's queue (CreateQueue), and in us-east-1
its bucket (https://github.com/hashicorp/terraform-provider-aws/issues/13185); a destroy of the second would then delete
them. So these come after the service-linked role, of whose name there is only one:
https://docs.aws.amazon.com/IAM/latest/APIReference/API_CreateServiceLinkedRole.html (CustomSuffix).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from bootstrap.contract.checkpoint import FOLDER
from bootstrap.contract.settings import MAX_PLACES, STACK_TAG, group_name

PROJECT = "gpufleet"
# The tightest name is that of the service-linked role, 64 characters: "AWSServiceRoleForAutoScaling_" 29, slug, "-",
# region without hyphens up to 12; then the bucket's, 63: "gpufleet-" 9, slug, "-" account 13, "-" region up to 15.
_SLUG_LENGTH = 22
# Characters beside letters, digits and spaces that a tag takes:
# https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
NOT_IN_TAGS = re.compile(r"[^\w\s.:/=+@-]")
TAG_VALUE_LENGTH = 256
# Rules of `pulumi stack init` (https://www.pulumi.com/docs/iac/concepts/stacks/): letters, digits, "-", "_" and ".".
_STACK = re.compile(r"[A-Za-z0-9._-]{1,100}")


def slug(stack: str) -> str:
    """``stack`` as lower-case letters, digits and hyphens, at most 22 characters; different stacks stay different.

    Raises:
        ValueError: not a Pulumi stack name.
    """
    if not _STACK.fullmatch(stack):
        raise ValueError(f"stack name {stack!r}: use 1 to 100 letters, digits, '-', '_' or '.', as Pulumi does")
    clean = re.sub(r"[^a-z0-9]+", "-", stack.lower()).strip("-")
    if clean == stack and len(clean) <= _SLUG_LENGTH:
        return clean
    # Folding case and cutting can make two stacks equal; six hex digits of the whole name keep them apart.
    digest = hashlib.sha256(stack.encode()).hexdigest()[:6]
    return f"{clean[: _SLUG_LENGTH - 7].strip('-')}-{digest}".lstrip("-")


class _Name:
    """A name made of the stack, account and region, by a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get__(self, names: Names, owner: type[Names]) -> str:
        return self._pattern.format(
            slug=slug(names.stack),
            prefix=f"{PROJECT}-{slug(names.stack)}",
            account=names.account_id,
            region=names.region,
            short_region=names.region.replace("-", ""),
            partition=names.partition,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Names of one stack's resources in one account and region.

    Names of IAM and budgets are unique in the account across regions, and a bucket's in the partition.
    """

    stack: str
    account_id: str
    region: str
    partition: str

    prefix = _Name("{prefix}")  # "gpufleet-dev"; logical names begin with it too
    # Nodes, with the number of characters that AWS takes.
    group = _Name("{prefix}-nodes")  # 255; of the plan's own place
    bucket = _Name("{prefix}-{account}-{region}")  # 63
    role = _Name("{prefix}-{region}")  # 64
    service_role_suffix = _Name("{slug}-{short_region}")  # 35; this stack's own Auto Scaling service-linked role
    training_role = _Name("{prefix}-{region}-train")
    key_alias = _Name("alias/{prefix}")
    # Secrets of the training command, never in user data.
    parameter_path = _Name("/gpufleet/{slug}")
    # Events, logs and metrics.
    queue = _Name("{prefix}-node-events")  # 80
    log_group = _Name("/gpufleet/{slug}")
    metric_namespace = _Name("gpufleet/{slug}")  # 255; one a stack, so that a policy can name it
    budget = _Name("{prefix}-{region}")  # 100
    # Controller; Lambda names the log group.
    controller = _Name("{prefix}-controller")  # 64
    controller_role = _Name("{prefix}-{region}-control")  # 64
    controller_log_group = _Name("/aws/lambda/{prefix}-controller")

    account_root_arn = _Name("arn:{partition}:iam::{account}:root")
    training_role_arn = _Name("arn:{partition}:iam::{account}:role/{prefix}-{region}-train")
    bucket_arn = _Name("arn:{partition}:s3:::{prefix}-{account}-{region}")
    queue_arn = _Name("arn:{partition}:sqs:{region}:{account}:{prefix}-node-events")
    # Without the ":*" that names the streams.
    log_group_arn = _Name("arn:{partition}:logs:{region}:{account}:log-group:/gpufleet/{slug}")
    # AWS makes up the group's UUID, known only afterwards, hence the "*":
    # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2autoscaling.html
    _group_arn = _Name(
        "arn:{partition}:autoscaling:{region}:{account}:autoScalingGroup:*:autoScalingGroupName/{prefix}-nodes"
    )

    launch_hook = "gpufleet-launch"
    terminate_hook = "gpufleet-terminate"
    checkpoint_prefix = FOLDER
    bootstrap_prefix = "bootstrap"
    # Holds the controller's state.json, a person's request.json and each node's report below nodes/.
    control_prefix = "control"
    # bootstrap/lib.sh reads the wheels here (WHEELS_KEY).
    wheels_key = "bootstrap/wheels.tar"

    @property
    def groups(self) -> tuple[str, ...]:
        """Auto Scaling groups that a stack may have, one a place; ``group`` is that of the plan's own."""
        return tuple(group_name(self.group, number) for number in range(1, MAX_PLACES + 1))

    @property
    def group_arns(self) -> list[str]:
        """ARNs of ``groups``; no other stack's group fits them, as each stack's first ends with "-nodes"."""
        return [self._group_arn, f"{self._group_arn}-?"]

    def arn(self, service: str, resource: str) -> str:
        """ARN of ``resource`` in this account and region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account_id}:{resource}"

    def rule(self, event: str) -> str:
        """EventBridge rule for ``event`` (64 characters)."""
        return f"{self.prefix}-{event}"


def read_s3_prefix(uri: str) -> tuple[str, str] | None:
    """Bucket and prefix, without slashes at its ends, of an s3:// URI of a setting; None for anything else."""
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([\w.=+-]+(?:/[\w.=+-]+)*)/?", uri, re.ASCII)
    return (match[1], match[2]) if match else None


def tags(stack: str, model: str, extra: dict[str, str]) -> dict[str, str]:
    """Cost allocation tags for every resource; gpufleet's own win over ``extra``.

    A model's name may be a folder or a module: characters that a tag does not take become "_".
    """
    label = NOT_IN_TAGS.sub("_", model)[:TAG_VALUE_LENGTH]
    return {**extra, "Project": PROJECT, STACK_TAG: stack, f"{PROJECT}:model": label}
