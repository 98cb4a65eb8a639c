"""The stack's configuration, typed and checked before anything is created."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import re
import tarfile
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import pulumi
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from infra.bundle import files_of
from infra.naming import NOT_IN_TAGS, slug, tags
from infra.refusals import block_refusals, purchase_refusals, scaling_refusals, start_refusals
from infra.secret_text import secrets_in
from optimizer.plan import FleetPlan, PlanError, plan_from_dict

Mode = Literal["training", "workers"]
Platform = Literal["ec2", "eks"]


class ConfigError(ValueError):
    """A configuration or plan that this program cannot carry out; the message says value, limit and next step."""


M = TypeVar("M", bound=BaseModel)


class _Model(BaseModel):
    # Configuration keys are written likeThis, as Pulumi's are.
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)


class Queue(_Model):
    """A queue of the user's own whose depth decides how many workers there are."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,80}(\.fifo)?$", description="SQS queue in the stack's region.")
    messages_per_node: int = Field(ge=1, description="Messages, waiting or being worked on, for each node.")


class Schedule(_Model):
    """A size from a time on."""

    cron: str = Field(description="Five fields, as Auto Scaling takes them.")
    nodes: int = Field(ge=0)
    timezone: str = "Etc/UTC"


class Scaling(_Model):
    """gpufleet:scaling."""

    min_nodes: int = Field(default=0, ge=0)
    gpu_utilization_percent: float | None = Field(default=None, gt=0, lt=100)
    queue: Queue | None = None
    schedules: tuple[Schedule, ...] = ()


class Eks(_Model):
    """gpufleet:eks."""

    public_access_cidrs: tuple[IPv4Network, ...] = Field(
        default=(), description="Who may reach the cluster's API from outside the VPC; none by default."
    )
    registry: str = Field(
        default="", description="Registry that mirrors the cluster's images; empty needs gpufleet:nat."
    )
    admin_arns: tuple[Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:iam::\d{12}:(role|user)/[\w+=,.@/-]+$")], ...] = (
        Field(default=(), description="IAM roles and users who administer the cluster; nobody else can.")
    )
    subnet_ids: tuple[Annotated[str, Field(pattern=r"^subnet-[0-9a-f]{8,17}$")], ...] = Field(
        default=(), description="Subnets of an existing VPC, in two zones at least, for the cluster's control plane."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a stack is told; the keys are described in Pulumi.yaml.

    Attributes:
        stack: Pulumi stack name.
        plan: the FleetPlan to carry out.
        vpc_id, subnet_ids: an existing network, or both empty to create one.
        vpc_cidr: IPv4 range of the VPC to create.
        zone_id: zone to run in; empty for the plan's first.
        ami_id, ami_name: image override; both empty for the pinned one.
        wheels: wheels.tar to upload for the nodes' Python environment; None for none.
        train_dir: folder with the training code to upload for the nodes; None for none.
        train_command: what the nodes run; empty for nothing.
        alarm_email: who is told; empty for nobody.
        tags: the user's own tags.
        force_destroy: whether destroy may delete the checkpoints.
        mode: "training", one job over all nodes; or "workers", each node for itself.
        platform: "ec2", nodes that boot gpufleet's own set-up; or "eks", the same plan as a Kubernetes cluster.
        nat: whether the private subnets get a way to the internet.
        ceiling_usd: spend at which the fleet is drained; None for no limit.
        gang_window_s: how long an incomplete fleet is paid before all of it is given back, s.
        scaling: how a group of workers scales; None for a fixed size.
        warm_pool: stopped nodes of a group of workers kept ready.
        eks: what platform "eks" needs besides.
    """

    stack: str
    plan: FleetPlan
    vpc_id: str
    subnet_ids: tuple[str, ...]
    vpc_cidr: ipaddress.IPv4Network
    zone_id: str
    ami_id: str
    ami_name: str
    wheels: Path | None
    train_dir: Path | None
    train_command: str
    alarm_email: str
    tags: dict[str, str]
    force_destroy: bool
    mode: Mode
    platform: Platform
    nat: bool
    ceiling_usd: float | None
    gang_window_s: int
    scaling: Scaling | None
    warm_pool: int
    eks: Eks

    @property
    def gang(self) -> bool:
        """Whether the nodes train together: then one zone, one placement group."""
        return self.mode == "training" and self.plan.node_count > 1

    @property
    def one_zone(self) -> bool:
        """Whether all nodes are in one zone: a gang's, or that of the reserved capacity."""
        return self.gang or self.plan.purchase.option in ("reserved", "capacity-block")

    @property
    def min_nodes(self) -> int:
        """Fewest nodes of a group that runs: of workers that nothing scales, all; of a gang, none."""
        if self.mode == "training":
            return 0
        return self.scaling.min_nodes if self.scaling else self.plan.node_count

    @property
    def moving_bounds(self) -> bool:
        """Whether the controller moves the group's bounds, as something else than it moves the size between them."""
        return self.mode == "workers" or bool(self.scaling and self.scaling.schedules)

    def run_id(self, train_archive: str) -> str:
        """12 hex digits that name what is trained: other code, command, amount or layout is another run.

        Args:
            train_archive: key of the training code in the bucket; empty for none.
        """
        plan = self.plan.model_dump(mode="json", include={"job", "parallelism"})
        # A raised budget or a later deadline continues the same run.
        for limit in ("budget_usd", "deadline_hours"):
            del plan["job"][limit]
        text = json.dumps([train_archive, self.train_command, plan], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load(*, starts_nodes: bool) -> Settings:
    """Read and check the current stack's configuration.

    Args:
        starts_nodes: whether to refuse what is only wrong once nodes start (``start_refusals``); false to look only.

    Raises:
        ConfigError: a key is missing, malformed or contradicts another, or the plan cannot be carried out.
    """
    config = pulumi.Config("gpufleet")
    stack = pulumi.get_stack()
    plan_data = config.get_object("plan")
    if plan_data is None:
        raise ConfigError(f"stack {stack} has no gpufleet:plan: run `gpufleet stack set PLAN --stack {stack}` first")
    try:
        plan = plan_from_dict(plan_data, origin="gpufleet:plan")
    except PlanError as error:
        raise ConfigError(f"{error}\nwrite it anew: gpufleet stack set PLAN --stack {stack}") from error
    settings = Settings(
        stack=stack,
        plan=plan,
        vpc_id=config.get("vpcId") or "",
        subnet_ids=tuple(_strings("subnetIds", config.get_object("subnetIds") or [])),
        vpc_cidr=_network(config.get("vpcCidr") or DEFAULT_VPC_CIDR),
        zone_id=config.get("zoneId") or "",
        ami_id=config.get("amiId") or "",
        ami_name=config.get("amiName") or "",
        wheels=_wheels(config.get("wheels") or "", plan.node.cpu_architecture),
        train_dir=_train_dir(config.get("trainDir") or ""),
        train_command=config.get("trainCommand") or "",
        alarm_email=config.get("alarmEmail") or "",
        tags=_tags(config.get_object("tags") or {}),
        force_destroy=config.get_bool("forceDestroy") or False,
        mode=_choice("mode", config.get("mode") or "training", Mode),
        platform=_choice("platform", config.get("platform") or "ec2", Platform),
        nat=config.get_bool("nat") or False,
        ceiling_usd=_ceiling(config.get_float("ceilingUsd"), plan),
        gang_window_s=60 * (config.get_int("gangWindowMinutes") or DEFAULT_GANG_WINDOW_MINUTES),
        scaling=_model("scaling", config.get_object("scaling"), Scaling),
        warm_pool=config.get_int("warmPool") or 0,
        eks=_model("eks", config.get_object("eks"), Eks) or Eks(),
    )
    problems = _unknown_keys() + refusals(settings, region=pulumi.Config("aws").get("region") or "")
    if starts_nodes:
        problems += start_refusals(settings)
    if problems:
        raise ConfigError(f"stack {stack} cannot be deployed:\n  " + "\n  ".join(problems))
    return settings


# Also the default in Pulumi.yaml, which the CLI fills in; here for programs run without the CLI (preview, tests).
DEFAULT_VPC_CIDR = "10.42.0.0/16"
DEFAULT_GANG_WINDOW_MINUTES = 45


def plan_refusals(plan: FleetPlan) -> list[str]:
    """Everything in ``plan`` that this version cannot carry out, whatever the rest of the configuration says."""
    found = []
    if plan.region.startswith("cn-"):
        found.append(
            f"region {plan.region} is in the China partition, whose service names and endpoints differ; this version "
            "does not carry plans out there: choose a plan for another region"
        )
    found += purchase_refusals(plan)
    if plan.node.efa_cards and plan.node.network_cards - plan.node.efa_cards not in (0, 1):
        found.append(
            f"node.efa_cards is {plan.node.efa_cards} of {plan.node.network_cards} network cards: which cards have EFA "
            "is known only when all have it, or all but the first"
        )
    return found


def refusals(settings: Settings, *, region: str) -> list[str]:
    """Everything that stops the stack from being deployed, not only the first; empty when nothing does."""
    from infra.controller import node_prices  # it imports this module, and pulumi_aws, which `stack set` does without

    plan = settings.plan
    found = plan_refusals(plan)
    if region != plan.region:
        found.append(
            f"aws:region is {region or 'not set'} and the plan is for {plan.region}: prices and zones differ by "
            f"region; `gpufleet stack set PLAN --stack {settings.stack}` writes both"
        )
    if bool(settings.vpc_id) != bool(settings.subnet_ids):
        found.append("gpufleet:vpcId and gpufleet:subnetIds go together: set both to use an existing VPC, or neither")
    if settings.one_zone and len(settings.subnet_ids) > 1:
        found.append(
            f"gpufleet:subnetIds has {len(settings.subnet_ids)} subnets and this fleet runs in one zone "
            f"({plan.node_count} nodes, {plan.purchase.option}): traffic between zones is slow and billed, and EFA "
            f"does not cross them; keep one"
        )
    if settings.zone_id and plan.zone_ids and settings.zone_id not in plan.zone_ids:
        found.append(
            f"gpufleet:zoneId {settings.zone_id} does not offer {plan.instance_type}: the plan has "
            f"{', '.join(plan.zone_ids)}"
        )
    if settings.ami_id and settings.ami_name:
        found.append("gpufleet:amiId and gpufleet:amiName are both set: keep one")
    if settings.ami_id and not re.fullmatch(r"ami-[0-9a-f]{8,17}", settings.ami_id):
        found.append(f"gpufleet:amiId {settings.ami_id!r} is not an AMI id (ami- and 8 to 17 hex digits)")
    if not settings.train_command.isprintable():
        found.append("gpufleet:trainCommand has a line break or control character: put several steps into a script")
    for secret in secrets_in(settings.train_command):
        found.append(
            f"gpufleet:trainCommand has what looks like a secret, {secret}, and becomes user data, which whoever may "
            f"describe instances can read: put it into an SSM parameter below /gpufleet/{slug(settings.stack)}/ as a "
            "SecureString, and read it in the training code (docs/security.md)"
        )
    if settings.alarm_email and not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", settings.alarm_email):
        found.append(f"gpufleet:alarmEmail {settings.alarm_email!r} is not an e-mail address")
    if settings.nat and settings.vpc_id:
        found.append("gpufleet:nat is true and gpufleet:vpcId set: an existing VPC keeps its own routes; drop one")
    try:
        node_prices(plan)
    except ConfigError as error:
        found.append(str(error))
    found += block_refusals(settings)
    found += scaling_refusals(settings)
    if settings.platform == "eks":
        found += _eks_refusals(settings)
    return found


# A wider range than that of one large company is no longer a list of who may.
_WIDEST_PUBLIC_ACCESS = 8


def _eks_refusals(settings: Settings) -> list[str]:
    plan, eks = settings.plan, settings.eks
    found = []
    if settings.mode != "training":
        found.append(
            f"gpufleet:mode {settings.mode} does not go with gpufleet:platform eks: the cluster runs one job over all "
            "nodes of the plan; use platform ec2 for workers"
        )
    if plan.node.gpu_count < 1 or plan.node.gpu == "V100":
        found.append(
            f"{plan.instance_type} has {plan.node.gpu_count:g} x {plan.node.gpu}: Kubernetes hands out whole GPUs, and "
            "CUDA 13 of the training images starts with Turing; use platform ec2"
        )
    if not eks.admin_arns:
        found.append(
            "gpufleet:eks has no adminArns: nobody could use the cluster; list the IAM roles and users who may, like "
            "`pulumi config set --path 'gpufleet:eks.adminArns[0]' arn:aws:iam::111122223333:role/ml`"
        )
    for network in eks.public_access_cidrs:
        if network.prefixlen < _WIDEST_PUBLIC_ACCESS:
            found.append(
                f"gpufleet:eks publicAccessCidrs has {network}: the cluster's API is open to /{_WIDEST_PUBLIC_ACCESS} "
                "and narrower ranges at most; name the addresses of those who work with it"
            )
    if settings.vpc_id and len(eks.subnet_ids) < 2:
        found.append(
            f"gpufleet:eks subnetIds has {len(eks.subnet_ids)} subnets of the existing VPC, and a control plane needs "
            "two, in different zones (https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html)"
        )
    if eks.subnet_ids and not settings.vpc_id:
        found.append("gpufleet:eks subnetIds goes with gpufleet:vpcId: a VPC of the stack's own has its subnets")
    if not (settings.nat or eks.registry or settings.vpc_id):
        found.append(
            "neither gpufleet:nat nor gpufleet:eks registry is set: NVIDIA's device plugin and the JobSet controller "
            "come from public registries, which private subnets do not reach; `pulumi config set gpufleet:nat true`, "
            "or mirror their images (docs/kubernetes.md, 'Images')"
        )
    return found


# Those of Pulumi.yaml; Pulumi takes any other without a word, and a misspelled ceilingUsd would be no ceiling.
KEYS = {
    "gpufleet:plan",
    "gpufleet:vpcId",
    "gpufleet:subnetIds",
    "gpufleet:vpcCidr",
    "gpufleet:zoneId",
    "gpufleet:amiName",
    "gpufleet:amiId",
    "gpufleet:wheels",
    "gpufleet:trainDir",
    "gpufleet:trainCommand",
    "gpufleet:alarmEmail",
    "gpufleet:tags",
    "gpufleet:forceDestroy",
    "gpufleet:mode",
    "gpufleet:platform",
    "gpufleet:nat",
    "gpufleet:ceilingUsd",
    "gpufleet:gangWindowMinutes",
    "gpufleet:scaling",
    "gpufleet:warmPool",
    "gpufleet:eks",
}


def _unknown_keys() -> list[str]:
    given = pulumi.runtime.get_config_env() | pulumi.runtime.config.CONFIG.get()
    return [
        f"{key} is no key that the program reads, so what it asks for would not be done: Pulumi.yaml has them all, one "
        f"inside an object is set with `pulumi config set --path`; `pulumi config rm '{key}'`"
        for key in sorted(given.keys() - KEYS)
        if key.startswith("gpufleet:")
    ]


def _strings(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"gpufleet:{key} is {value!r}, and must be a list of strings")
    return value


def _choice(key: str, value: str, kind: Any) -> Any:
    if value not in get_args(kind):
        raise ConfigError(f"gpufleet:{key} is {value!r}, and must be one of {', '.join(get_args(kind))}")
    return value


def _ceiling(value: float | None, plan: FleetPlan) -> float | None:
    if not value:
        return plan.job.budget_usd
    if not 0 < value < math.inf:
        raise ConfigError(f"gpufleet:ceilingUsd is {value:g}, and must be above 0 USD, or 0 for the plan's budget")
    return value


def _model(key: str, value: Any, kind: type[M]) -> M | None:
    if not value:
        return None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or key}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"gpufleet:{key} is wrong: {'; '.join(lines)}") from error


def _local(path: str) -> Path:
    # A relative path is the checkout's, not the program's: Pulumi runs the program in infra/.
    return Path(__file__).resolve().parents[1] / Path(path).expanduser()


# The archive travels inside the stack's state, which Pulumi reads and writes whole.
TRAIN_DIR_LIMIT_MIB = 10


def _train_dir(folder: str) -> Path | None:
    if not folder:
        return None
    path = _local(folder)
    if not path.is_dir():
        raise ConfigError(f"gpufleet:trainDir {path} is not a folder: name the one with your training code")
    size = sum(file.stat().st_size for file in files_of(path))
    if not 0 < size <= TRAIN_DIR_LIMIT_MIB * 2**20:
        raise ConfigError(
            f"gpufleet:trainDir {path} has {size / 2**20:.1f} MiB of files, the limit is above 0 and at most "
            f"{TRAIN_DIR_LIMIT_MIB}: it is for code; data belongs into a bucket the nodes may read"
        )
    return path


def _wheels(file: str, cpu_architecture: str) -> Path | None:
    if not file:
        return None
    path = _local(file)
    try:
        with tarfile.open(path, "r:") as archive:
            wheels = [name.removeprefix("./") for name in archive.getnames() if name.endswith(".whl")]
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"gpufleet:wheels {path} cannot be read as an uncompressed tar: {error}") from error
    # The nodes look for the wheels at the top of the archive.
    if not any(name.startswith("torch-") for name in wheels):
        raise ConfigError(
            f"gpufleet:wheels is {path}, with {len(wheels)} wheels and none of torch at its top: it must hold every "
            "wheel of bootstrap/requirements-node.txt (docs/bootstrap.md, 'Wheels for private subnets')"
        )
    # A wheel's last tag is its platform: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    machine = {"arm64": "aarch64"}.get(cpu_architecture, cpu_architecture)
    torch = next(name for name in wheels if name.startswith("torch-"))
    if not torch.endswith(f"{machine}.whl"):
        raise ConfigError(
            f"gpufleet:wheels has {torch}, and the plan's nodes are {machine}: get the wheels of that platform "
            "(docs/bootstrap.md, 'Wheels for private subnets')"
        )
    return path


def _network(text: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise ConfigError(f"gpufleet:vpcCidr {text!r} is not an IPv4 range: {error}") from error
    # https://docs.aws.amazon.com/vpc/latest/userguide/vpc-cidr-blocks.html
    if not 16 <= network.prefixlen <= 28:
        raise ConfigError(f"gpufleet:vpcCidr {text} has a /{network.prefixlen} mask: a VPC takes /16 to /28")
    return network


def _tags(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ConfigError(f"gpufleet:tags is {value!r}, and must map tag to value")
    # https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html; 40 leaves room for ours.
    for key, text in value.items():
        if not 1 <= len(key) <= 128 or key.lower().startswith("aws:") or len(str(text)) > 256:
            raise ConfigError(
                f"gpufleet:tags {key!r}: a tag has 1 to 128 characters, a value up to 256, and no aws: prefix"
            )
        if NOT_IN_TAGS.search(key + str(text)):
            raise ConfigError(
                f"gpufleet:tags {key!r}: {str(text)!r} has a character that AWS refuses in tags: use letters, digits, "
                "spaces and _ . : / = + - @"
            )
    # IAM refuses two keys that differ in case alone: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_tags.html
    keys = [*value, *(key for key in tags("", "", {}) if key not in value)]
    for key in value:
        twins = sorted(other for other in keys if other.lower() == key.lower() and other != key)
        if twins:
            raise ConfigError(
                f"gpufleet:tags {key!r} differs from {twins[0]!r} in case alone, and IAM refuses two such tags: "
                "name it otherwise"
            )
    if len(value) > 6:
        # An S3 object takes 10 tags, and gpufleet adds its own: https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
        raise ConfigError(
            f"gpufleet:tags has {len(value)} tags: the limit is 6, as an S3 object takes 10 with gpufleet's own"
        )
    return {key: str(text) for key, text in value.items()}
