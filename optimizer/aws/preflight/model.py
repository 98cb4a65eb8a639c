"""What the checks read and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from optimizer.aws import errors
from optimizer.plan import FleetPlan

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

Level = Literal["error", "warning", "unknown", "ok"]
# The order of reading: what stops the plan, what costs, what nobody knows, what is well.
LEVELS: tuple[Level, ...] = ("error", "warning", "unknown", "ok")

Value = float | int | str | None
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One answer of one check.

    Attributes:
        check: what was looked at.
        level: "error" stops the plan; "warning" may cost money, time or capacity; "unknown" could not be checked.
        found: what was found, in words.
        value, limit: the same as numbers or names where it has them; their unit is in ``found``.
        why: why it matters.
        next_step: what to run or change.
    """

    check: str
    level: Level
    found: str
    value: Value = None
    limit: Value = None
    why: str = ""
    next_step: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackNames:
    """Names of a stack's things that preflight looks for, as the Pulumi program makes them."""

    bucket: str
    key_alias: str
    service_role_arn: str


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The Pulumi stack the plan is for.

    Attributes:
        name: its name.
        tag: the tag that its instances and network carry, with ``name`` as value.
        names: its names in an account (12 digits) and partition.
    """

    name: str
    tag: str
    names: Callable[[str, str], StackNames]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be carried out.

    Attributes:
        plan: the plan.
        stack: the stack; None where none was named.
        gang: whether its nodes train together, hence in one zone and one placement group.
        zone_id: zone that the configuration names; empty for the plan's first.
        vpc_id, subnet_ids: an existing network; empty for one of the stack's own.
        vpc_cidr: IPv4 range of that one.
        nat: whether the stack makes a NAT gateway.
        endpoints: services with an interface endpoint in a network of the stack's own ("ec2"), which an existing one
            must reach too.
        beside: on-demand instances the stack starts besides the nodes, by type.
        ami_id, ami_name: the image, by one of the two.
        ami_problem: why there is no image; empty where there is one.
        ceiling_usd: spend at which the controller drains the fleet; None for no limit.
    """

    plan: FleetPlan
    stack: Stack | None
    gang: bool
    zone_id: str
    vpc_id: str
    subnet_ids: tuple[str, ...]
    vpc_cidr: str
    nat: bool
    endpoints: tuple[str, ...]
    beside: Mapping[str, int]
    ami_id: str
    ami_name: str
    ami_problem: str
    ceiling_usd: float | None

    @property
    def one_zone(self) -> bool:
        """Whether all nodes go to one zone."""
        return self.gang or self.plan.purchase.option in ("reserved", "capacity-block")

    @property
    def spot_nodes(self) -> int:
        """Nodes bought on the spot market."""
        return self.plan.node_count - self.plan.purchase.on_demand_base if self.plan.purchase.option == "spot" else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Whose credentials these are."""

    id: str
    arn: str

    @property
    def partition(self) -> str:
        """ "aws", "aws-us-gov" or "aws-cn"."""
        return self.arn.split(":")[1]


# What a call to AWS or the reading of its answer can raise. An answer that lacks a field is as good as none.
UNREADABLE = (
    ClientError,
    BotoCoreError,
    ResponseParserError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
)

# The permission each call needs, where it is not named like the call:
# https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html
ACTIONS = {
    "DescribeBudgets": "budgets:ViewBudget",
    "DescribeKey": "kms:DescribeKey",
    "GetAWSDefaultServiceQuota": "servicequotas:GetAWSDefaultServiceQuota",
    "GetAccountSettings": "lambda:GetAccountSettings",
    "GetCallerIdentity": "sts:GetCallerIdentity",
    "GetKeyPolicy": "kms:GetKeyPolicy",
    "GetKeyRotationStatus": "kms:GetKeyRotationStatus",
    "GetProducts": "pricing:GetProducts",
    "GetServiceQuota": "servicequotas:GetServiceQuota",
    "HeadBucket": "s3:ListBucket",
    "ListBuckets": "s3:ListAllMyBuckets",
}


def action_of(operation: str) -> str:
    """The IAM action of a call that preflight makes; EC2's are named like their calls."""
    return ACTIONS.get(operation, f"ec2:{operation}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """Why something could not be asked.

    Attributes:
        reason: in words.
        action: the IAM action that is missing; empty where permission is not the reason.
    """

    reason: str
    action: str = ""

    def row(self, check: str, *, about: str = "", why: str = "", next_step: str = "") -> Row:
        """The row of a check that failed for this.

        Args:
            check: the check.
            about: what is known all the same.
            why: why it matters.
            next_step: what to do; by default what helps against the reason.
        """
        if not next_step:
            next_step = f"allow {self.action} (docs/preflight.md)" if self.action else "run gpufleet preflight again"
        found = f"{about}; {self.reason}" if about else self.reason
        return Row(check=check, level="unknown", found=found, why=why, next_step=next_step)


def unknown(error: BaseException) -> Unknown:
    """What ``error``, one of ``UNREADABLE``, says about why AWS did not answer."""
    if isinstance(error, errors.UnusableAnswerError):
        return Unknown(reason=str(error))
    if not errors.is_aws_error(error):
        return Unknown(reason=f"AWS answered something unreadable: {error!r}")
    if errors.is_not_permitted(error) and isinstance(error, ClientError):
        action = action_of(error.operation_name)
        return Unknown(reason=f"not permitted: {action} is missing ({errors.code(error)})", action=action)
    return Unknown(reason=errors.reason(error))


def ask(call: Callable[[], T]) -> T | Unknown:
    """The answer of ``call``, or why there is none."""
    try:
        return call()
    except UNREADABLE as error:
        return unknown(error)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a check is told.

    Attributes:
        target: what is to be carried out.
        account: whose account it is; None where AWS did not say.
        ec2, service_quotas: clients of the plan's region, which most checks ask.
        open_zones: ids of the zones open to the account.
        subnet_zones: ids of the zones of ``target.subnet_ids``, in their order.
        now: the time the checks began, UTC.
    """

    target: Target
    account: Account | None
    ec2: EC2Client
    service_quotas: Any
    open_zones: frozenset[str] | Unknown
    subnet_zones: tuple[str, ...] | Unknown
    now: datetime

    @property
    def plan(self) -> FleetPlan:
        """The plan."""
        return self.target.plan

    @property
    def region(self) -> str:
        """The plan's region."""
        return self.target.plan.region

    @property
    def zone_ids(self) -> tuple[str, ...]:
        """Ids of the zones the nodes go to, as far as anybody knows; at most one where all go to one.

        As the Pulumi program chooses: those of the given subnets, else the configured one, else the plan's that are
        open to the account, of which a gang takes the first.
        """
        target, plan = self.target, self.target.plan
        if target.subnet_ids:
            return () if isinstance(self.subnet_zones, Unknown) else self.subnet_zones
        wanted = (target.zone_id,) if target.zone_id else plan.zone_ids
        if not isinstance(self.open_zones, Unknown):
            wanted = tuple(zone for zone in wanted if zone in self.open_zones) or wanted
        return wanted[:1] if target.one_zone else wanted
