"""Physical names and the ARNs built from them: the one place that knows AWS's name rules and lengths.

Names that policies and user data must know before the resource exists are explicit and come from here; the others
(security groups, launch template, placement group, instance profile) are auto-named by Pulumi, so that a replacement
can be created before its predecessor is deleted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

PROJECT = "gpufleet"
# The tightest name is that of the service-linked role, 64 characters: "AWSServiceRoleForAutoScaling_" 29, slug, "-",
# region without hyphens up to 12; then the bucket's, 63: "gpufleet-" 9, slug, "-" account 13, "-" region up to 15.
_SLUG_LENGTH = 22
# What a tag may hold besides letters, digits and spaces: https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
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
        raise ValueError(f"stack name {stack!r}: use 1 to 100 letters, digits, '-', '_' or '.'")
    clean = re.sub(r"[^a-z0-9]+", "-", stack.lower()).strip("-")
    if clean == stack and len(clean) <= _SLUG_LENGTH:
        return clean
    # Folding case and cutting can make two stacks equal; six hex digits of the whole name keep them apart.
    digest = hashlib.sha256(stack.encode()).hexdigest()[:6]
    return f"{clean[: _SLUG_LENGTH - 7].strip('-')}-{digest}".lstrip("-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Names of one stack's resources in one account and region.

    Attributes:
        stack: the Pulumi stack.
        account_id: AWS account, 12 digits.
        region: "us-east-1".
        partition: "aws", "aws-cn" or "aws-us-gov".
    """

    stack: str
    account_id: str
    region: str
    partition: str

    @property
    def prefix(self) -> str:
        """Start of every name, like "gpufleet-dev"; logical names begin with it too."""
        return f"{PROJECT}-{slug(self.stack)}"

    @property
    def group(self) -> str:
        """Auto Scaling group (255 characters)."""
        return f"{self.prefix}-nodes"

    @property
    def bucket(self) -> str:
        """Checkpoint bucket: 63 characters, unique in the whole partition, hence account and region."""
        return f"{self.prefix}-{self.account_id}-{self.region}"

    @property
    def role(self) -> str:
        """Instance role (64 characters, unique in the account across regions, hence the region)."""
        return f"{self.prefix}-{self.region}"

    @property
    def key_alias(self) -> str:
        """KMS alias."""
        return f"alias/{self.prefix}"

    @property
    def queue(self) -> str:
        """SQS queue of node events (80 characters)."""
        return f"{self.prefix}-node-events"

    @property
    def dead_letter_queue(self) -> str:
        """SQS queue of events nobody could take."""
        return f"{self.prefix}-node-events-dead"

    @property
    def log_group(self) -> str:
        """CloudWatch log group of the nodes."""
        return f"/{PROJECT}/{slug(self.stack)}"

    @property
    def parameter_path(self) -> str:
        """SSM parameters a node may read; secrets of the training command go there, never into user data."""
        return f"/{PROJECT}/{slug(self.stack)}"

    @property
    def service_role_suffix(self) -> str:
        """Suffix of this stack's own Auto Scaling service-linked role (35 characters, unique in the account)."""
        return f"{slug(self.stack)}-{self.region.replace('-', '')}"

    def rule(self, event: str) -> str:
        """EventBridge rule for ``event`` (64 characters)."""
        return f"{self.prefix}-{event}"

    @property
    def metric_namespace(self) -> str:
        """CloudWatch namespace of this stack's metrics: one a stack, so that a policy can name it (255 characters)."""
        return f"{PROJECT}/{slug(self.stack)}"

    @property
    def controller(self) -> str:
        """Lambda function that starts, meters and ends the nodes (64 characters)."""
        return f"{self.prefix}-controller"

    @property
    def controller_role(self) -> str:
        """Role of the controller (64 characters, unique in the account across regions, hence the region)."""
        return f"{self.prefix}-{self.region}-control"

    @property
    def controller_log_group(self) -> str:
        """Log group of the controller; Lambda's own naming."""
        return f"/aws/lambda/{self.controller}"

    @property
    def flow_log_group(self) -> str:
        """Log group of the VPC's flow logs."""
        return f"{self.log_group}/flow"

    @property
    def dashboard(self) -> str:
        """CloudWatch dashboard (255 characters, unique in the account across regions, hence the region)."""
        return f"{self.prefix}-{self.region}"

    @property
    def budget(self) -> str:
        """AWS Budget (100 characters, unique in the account across regions, hence the region)."""
        return f"{self.prefix}-{self.region}"

    @property
    def cluster(self) -> str:
        """EKS cluster (100 characters)."""
        return self.prefix

    @property
    def cluster_log_group(self) -> str:
        """Log group of the cluster's control plane; EKS's own naming."""
        return f"/aws/eks/{self.cluster}/cluster"

    launch_hook = "gpufleet-launch"
    terminate_hook = "gpufleet-terminate"
    checkpoint_prefix = "checkpoints"
    bootstrap_prefix = "bootstrap"
    # What the controller knows (state.json), what a person wants (request.json), what each node says (nodes/).
    control_prefix = "control"
    # Where bootstrap/lib.sh looks for them (WHEELS_KEY).
    wheels_key = "bootstrap/wheels.tar"

    def arn(self, service: str, resource: str) -> str:
        """ARN of ``resource`` in this account and region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account_id}:{resource}"

    @property
    def account_root_arn(self) -> str:
        """The account itself as a principal."""
        return f"arn:{self.partition}:iam::{self.account_id}:root"

    @property
    def bucket_arn(self) -> str:
        """ARN of the checkpoint bucket."""
        return f"arn:{self.partition}:s3:::{self.bucket}"

    @property
    def queue_arn(self) -> str:
        """ARN of the queue of node events."""
        return self.arn("sqs", self.queue)

    @property
    def log_group_arn(self) -> str:
        """ARN of the log group, without the ":*" that names its streams."""
        return self.arn("logs", f"log-group:{self.log_group}")

    @property
    def group_arn(self) -> str:
        """ARN of the Auto Scaling group; its UUID is AWS's choice and known only afterwards, hence the "*".

        https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2autoscaling.html
        """
        return self.arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{self.group}")

    def rule_arn(self, event: str) -> str:
        """ARN of the EventBridge rule for ``event``."""
        return self.arn("events", f"rule/{self.rule(event)}")


def tags(stack: str, model: str, extra: dict[str, str]) -> dict[str, str]:
    """Cost allocation tags for every resource; gpufleet's own win over ``extra``.

    Activate ``gpufleet:stack`` as a cost allocation tag in the billing console, or Cost Explorer does not show it. A
    model's name is anybody's (a folder, a module): what a tag cannot hold becomes "_".
    """
    label = NOT_IN_TAGS.sub("_", model)[:TAG_VALUE_LENGTH]
    return {**extra, "Project": PROJECT, f"{PROJECT}:stack": stack, f"{PROJECT}:model": label}
