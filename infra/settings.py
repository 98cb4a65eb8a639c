"""Settings of a stack: one field a configuration key, with its type, default and description.

A field's docstring is its description. `make docs` writes the keys to Pulumi.yaml (tools/pulumi_keys.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.alias_generators import to_camel

from bootstrap.contract import ecr
from bootstrap.contract.settings import DEFAULT_GANG_WINDOW_MINUTES, SpotPolicy
from bootstrap.contract.shared_ceiling import SharedCeiling
from bootstrap.contract.staging import limit_s
from optimizer.contract.plan import INTERFACE_ENDPOINTS, FleetPlan, PolicyOutlook

# Command of nodes where gpufleet:trainCommand is not set; and its value for nodes that join and wait.
TRAINER_COMMAND = "-m bootstrap.trainer"
NO_COMMAND = "none"
# PyTorch 2.11 for x86_64, with kernel 6.17 and lustre-client-modules-6.17.0-1020-aws:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpupt211oss-ul2404-2026-08-17.html
WITH_LUSTRE_CLIENT = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Ubuntu 24.04) 20260815"

Mode = Literal["training", "workers"]


class ConfigError(ValueError):
    """A configuration or plan that this program cannot carry out; the message says value, limit and next step."""


def read_shared_ceiling(text: str) -> SharedCeiling | None:
    """Parse the value of gpufleet:sharedCeiling; None for none."""
    found = re.fullmatch(_SHARED_CEILING, text)
    return SharedCeiling(bucket=found[2], key=found[3], usd=float(found[4])) if found and found[1] else None


def _from_project(path: Path) -> Path:
    # A user names files from the folder of Pulumi.yaml; Pulumi runs the program in its `main`, which may be below it.
    here = Path.cwd()
    project = next((folder for folder in (here, *here.parents) if (folder / "Pulumi.yaml").is_file()), here)
    return project / path.expanduser()


# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_SHARED_CEILING = r"^(s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([\w.=+/-]+)@([1-9]\d*))?$"
Boolean = Annotated[bool, Field(strict=True)]
LocalPath = Annotated[Path, AfterValidator(_from_project)]
NonEmpty = Annotated[str, Field(min_length=1)]
# https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
TagKey = Annotated[str, Field(pattern=r"^[\w .:/=+@-]*$", min_length=1, max_length=128)]
TagValue = Annotated[str, BeforeValidator(str), Field(pattern=r"^[\w .:/=+@-]*$", max_length=256)]


class _Model(BaseModel):
    # Configuration keys are written likeThis, as Pulumi's are.
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, use_attribute_docstrings=True)


class ScalingSettings(_Model):
    """Value of gpufleet:scaling."""

    min_nodes: int = Field(default=0, ge=0)
    gpu_utilization_percent: float | None = Field(default=None, gt=0, lt=100)


class DlamiSettings(_Model):
    """Value of gpufleet:dlami."""

    id: str = Field(pattern=r"^ami-[0-9a-f]{8,17}$")
    parameter: str
    """SSM parameter that named the image."""
    region: str


class StackSettings(_Model):
    """Checked configuration of a stack; a value of nothing ("", 0, false, [], {}) means the default."""

    stack: str
    """Pulumi stack; no key."""
    plan: FleetPlan
    """The FleetPlan to carry out. Write it with `gpufleet stack set PLAN --stack NAME`, not by hand."""
    vpc_id: str = ""
    """Existing VPC to use instead of creating one; needs subnetIds. It must reach S3, EC2, Auto Scaling, SSM, STS,
    CloudWatch and CloudWatch Logs."""
    subnet_ids: tuple[NonEmpty, ...] = ()
    """Private subnets of vpcId. A fleet of several nodes runs in one zone and takes one subnet."""
    zone_id: str = ""
    """Zone to run in (use1-az6); the default is the zone of the plan's spot price, else the plan's first. Set it to
    the zone of an existing capacity reservation."""
    dlami: DlamiSettings | None = None
    """Deep Learning AMI of the nodes, {id, parameter, region}: `gpufleet stack set` writes the newest release that AWS
    has for the plan's type, and keeps it until --new-image. Unset, each `pulumi up` takes the newest."""
    ami_name: str = ""
    """Exact name of a Deep Learning AMI by Amazon, in place of the one for the plan's type."""
    ami_id: str = Field(default="", pattern=r"^(ami-[0-9a-f]{8,17})?$")
    """AMI of your own, derived from a Deep Learning AMI for Ubuntu. Excludes amiName."""
    wheels: LocalPath | None = None
    """Archive that `gpufleet stack wheels` packs, uploaded for nodes, which reach no package index: what the trainer or
    gpufleet:requirements need and the image lacks. Not needed for your own command without requirements on an image
    with torch, for an image of your own that has all (amiId), or in an existing VPC that reaches an index."""
    requirements: LocalPath | None = None
    """Packages of your own beside torch, locked with hashes (`pip-compile --generate-hashes`, `uv pip compile
    --generate-hashes`), installed on every node; `gpufleet stack wheels` packs them."""
    image: str = ""
    """Container image that the training runs in on every node, in place of the node's own Python: a private ECR
    registry's, in the stack's region, by digest, which `docker push` prints. A VPC of the stack's
    own gets two endpoints for ECR, billed by the hour beside the plan's cost; an existing one must reach ECR."""
    train_dir: LocalPath | None = None
    """Folder with your training code (at most 10 MiB), uploaded for the nodes; the command starts in it. Not needed
    for an image that has the code."""
    train_command: str = ""
    """Command of every node once healthy: a script or "-m module" with its arguments, which torchrun starts, or a
    program with a launcher of its own (accelerate, deepspeed, conda, python; docs/engines.md). Empty is
    gpufleet's own trainer (-m bootstrap.trainer) where it carries out the plan and trainDir is not set; else the nodes
    join and wait, as they do with none."""
    standby: Boolean = False
    """Keep processes ready that replace a failed worker of a script of your own within seconds (docs/training.md).
    gpufleet's own trainer has them in any case."""
    data: str = ""
    """Training data, an s3:// prefix, which every node copies to its NVMe before it is in service and may then read (a
    plan with a Lustre file system links that instead), or a folder on the nodes. The command finds it in
    GPUFLEET_DATA_DIR; without data gpufleet's own trainer makes synthetic samples. A bucket outside the stack's account
    or under another key must grant it too."""
    base_weights: str = ""
    """Weights that gpufleet's own trainer starts from, an s3:// prefix of safetensors that the nodes may then read, or
    a folder on the nodes; empty is random ones. Adapters and frozen layers need them."""
    alarm_email: str = Field(default="", pattern=r"^([^@\s]+@[^@\s]+\.[^@\s]+)?$")
    """Address of every alarm (missing, idle or unfit nodes, a silent controller, 80% of the ceiling) and of the
    budget; empty makes none."""
    # An S3 object takes 10 tags, with gpufleet's own: https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
    tags: dict[TagKey, TagValue] = Field(default={}, max_length=6)
    """Tags for every resource, beside those gpufleet sets for cost allocation."""
    undo_days: int = Field(default=14, ge=1, le=365)
    """Days that a deleted or overwritten checkpoint can be brought back, and is billed. Those that training prunes, as
    newer ones replace them, stay one day."""
    permissions_boundary: str = Field(default="", pattern=r"^(arn:aws[a-z-]*:iam::(\d{12}|aws):policy/[\w+=,.@/-]+)?$")
    """ARN of an IAM policy that bounds every role of the stack, where your organisation demands one. It must allow what
    the roles do (docs/security.md). Auto Scaling's service-linked role takes none."""
    isolate_training: Boolean = True
    """Give the training a role of its own, which reaches checkpoints, data, base weights and the stack's parameters
    alone, in place of the node's, and keep its user off the metadata service; false gives it the node's role. An
    existing VPC must reach STS."""
    waits: Boolean = False
    """Start no node before `gpufleet resume` or `gpufleet move` asks for the first time: until then the stack costs its
    endpoints and the like."""
    force_destroy: Boolean = False
    """Let `pulumi destroy` delete the checkpoints, their bucket and their key. They are protected otherwise."""
    mode: Mode = "training"
    """training, one job over all nodes of the plan; or workers, every node runs the command for itself and the group
    may scale."""
    nat: Boolean = False
    """Give the private subnets a NAT gateway to the internet, billed by the hour and GB. AWS's own services need
    none."""
    ceiling_usd: float | None = Field(default=0, ge=0, allow_inf_nan=False, validate_default=True)
    """Spend in USD at which the fleet is drained and ended; 0 for the plan's budget."""
    shared_ceiling: str = Field(default="", pattern=_SHARED_CEILING)
    """Spend in USD of several stacks of the account together, like s3://BUCKET/budgets/team.json@5000. Their
    controllers keep the object, in a versioned bucket of yours, whose KMS key must let them use it; each stack counts
    with all that its meter has."""
    # A node takes up to half an hour to its last test; a window of more than a day waits for nodes at full price.
    gang_window_minutes: int = Field(default=DEFAULT_GANG_WINDOW_MINUTES, ge=15, le=1440)
    """Minutes that an incomplete fleet is paid before all of it is given back, 15 to 1440; the time for the copy of
    gpufleet:data comes on top."""
    spot_policy: SpotPolicy = "fallback"
    """When a spot plan with a fallback buys on demand: fallback, once spot has not come, for the rest of the run; or
    adaptive, where spot will not do the work or the deadline demands it, and back to spot where that pays
    (docs/controller.md). The deadline needs time to spare for it."""
    scaling: ScalingSettings | None = None
    """Scaling of a group of workers, like {minNodes 1, gpuUtilizationPercent 60}; policies and scheduled actions of
    your own go on the group itself."""

    @field_validator("ceiling_usd")
    @classmethod
    def _plan_budget(cls, value: float | None, info: ValidationInfo) -> float | None:
        plan: FleetPlan | None = info.data.get("plan")
        return value or (plan.job.budget_usd if plan else None)

    @property
    def shared(self) -> SharedCeiling | None:
        """The ceiling over several stacks."""
        return read_shared_ceiling(self.shared_ceiling)

    @property
    def command(self) -> str:
        """Command that the nodes run; empty: they join and wait."""
        if self.train_command.strip():
            return "" if self.train_command.strip() == NO_COMMAND else self.train_command
        own_code = self.train_dir is not None or self.mode == "workers"
        return "" if own_code or self.plan.beyond_trainer else TRAINER_COMMAND

    @property
    def reached(self) -> tuple[str, ...]:
        """Services that the nodes reach by interface endpoints of their VPC."""
        return (*INTERFACE_ENDPOINTS, *(ecr.ENDPOINTS if self.image else ()))

    @property
    def own_endpoints(self) -> tuple[str, ...]:
        """Endpoints that the stack makes, in a VPC of its own."""
        return () if self.vpc_id else self.reached

    @property
    def read_prefixes(self) -> dict[str, str]:
        """URIs or paths that the nodes read, by their name in policies."""
        return {"Data": self.data, "BaseWeights": self.base_weights}

    @property
    def stages_data(self) -> bool:
        """The nodes' set-up copies data from S3, or waits for its file system."""
        return self.data.startswith("s3://")

    @property
    def staging_limit_s(self) -> int:
        """Time that a node's set-up may take longer for the copy of data, s."""
        planned = self.plan.staging.node_hours * 3600 if self.plan.staging else 0.0
        return limit_s(planned) if self.stages_data else 0

    @property
    def planned(self) -> FleetPlan | PolicyOutlook:
        """Hours and dollars under the stack's spot policy; the plan's own where it says nothing of that policy."""
        outlook = self.plan.spot_policy
        return outlook if outlook and outlook.policy == self.spot_policy == "adaptive" else self.plan

    @property
    def gang(self) -> bool:
        """Several nodes train together."""
        return self.mode == "training" and self.plan.node_count > 1

    @property
    def one_zone(self) -> bool:
        """A gang, reserved capacity, or a file system with its nodes, is in one zone."""
        is_reserved = self.plan.purchase.option in ("reserved", "capacity-block")
        return self.gang or is_reserved or self.plan.lustre is not None

    @property
    def min_nodes(self) -> int:
        """Fewest nodes: of workers that nothing scales, all; of a gang, none."""
        if self.mode == "training":
            return 0
        return self.scaling.min_nodes if self.scaling else self.plan.node_count

    def run_id(self, train_archive: str) -> str:
        """12 hex digits that name a run: other code, command, image, data, base, amount or layout is another run."""
        # A raised budget or a later deadline continues the same run.
        limits = {"job": {"budget_usd", "deadline_hours"}}
        plan = self.plan.model_dump(mode="json", include={"job", "parallelism"}, exclude=limits)
        parts: list[Any] = [train_archive, self.train_command, plan]
        if self.data:
            parts.append(self.data)
        if self.base_weights:
            parts.append({"base_weights": self.base_weights})
        if self.image:
            parts.append({"image": self.image})
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def keys() -> dict[str, dict[str, Any]]:
    """Entries of Pulumi.yaml by key, without "gpufleet:": type, items of an array, default, description.

    Pulumi has no type for a number with a fraction: such a key has none.
    """
    entries = {}
    for key, schema in StackSettings.model_json_schema()["properties"].items():
        if key == "stack":
            continue
        kind = schema.get("type") or schema.get("anyOf", [{}])[0].get("type", "object")
        entry = {"type": kind, "default": schema.get("default"), "description": " ".join(schema["description"].split())}
        if kind == "number":
            del entry["type"]
        if kind == "array":
            entry["items"] = {"type": schema["items"]["type"]}
        if key == "plan":
            del entry["default"]
        elif kind == "object":
            entry["default"] = {}
        elif entry["default"] is None:
            entry["default"] = ""
        entries[key] = entry
    return entries
