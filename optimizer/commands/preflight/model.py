"""Input of the checks (Context) and their output (Finding, Unknown)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from botocore.exceptions import ClientError

from infra.settings import StackSettings
from optimizer.aws import errors
from optimizer.contract.plan import FleetPlan

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

Level = Literal["error", "warning", "unknown", "ok"]
# In the order of printing.
LEVELS: tuple[Level, ...] = ("error", "warning", "unknown", "ok")

Value = float | int | str | None
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of ``check``; ``value`` and ``limit`` are numbers or names of ``text``, in its unit.

    Level "error" stops the plan; "warning" may cost money, time or capacity; "unknown" could not be checked.
    """

    text: str
    _: KW_ONLY
    level: Level
    check: str = ""
    value: Value = None
    limit: Value = None
    why: str = ""
    next_step: str = ""


failure = partial(Finding, level="error")
warning = partial(Finding, level="warning")
unknown = partial(Finding, level="unknown")
passed = partial(Finding, level="ok")


def named(check: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield ``findings``; a finding without a check gets this check's name."""
    for finding in findings:
        yield finding if finding.check else replace(finding, check=check)


# Errors of a call to AWS, or of an answer that lacks a field.
UNREADABLE = (*errors.AWS_ERRORS, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

# Calls of all checks by service. Most take no resource, and the stack's own resources may not exist yet.
_READS = {
    "ec2": "DescribeAvailabilityZones DescribeCapacityReservations DescribeImages "
    "DescribeInstanceTypes DescribeInstances DescribeRouteTables DescribeSpotPriceHistory "
    "DescribeSubnets DescribeVpcAttribute DescribeVpcEndpoints",
    "ecr": "BatchGetImage",
    "pricing": "GetProducts",
    "servicequotas": "GetAWSDefaultServiceQuota GetServiceQuota",
    "ssm": "GetParameter",
    "sts": "GetCallerIdentity",
}


def iam_action(operation: str) -> str:
    """Return the IAM action that a call needs."""
    if operation == "HeadBucket":  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
        return "s3:ListBucket"
    services = (service for service, operations in _READS.items() if operation in operations.split())
    return f"{next(services, 'ec2')}:{operation}"


def preflight_policy() -> dict[str, Any]:
    """Return the IAM policy that allows the calls of all checks, but for HeadBucket of the user's data."""
    reads = [f"{service}:{action}" for service, actions in _READS.items() for action in actions.split()]
    statement = {"Sid": "GpufleetPreflight", "Effect": "Allow", "Action": reads, "Resource": "*"}
    return {"Version": "2012-10-17", "Statement": [statement]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """The reason why AWS gave no answer; ``action`` is the missing IAM action, if permission is the reason."""

    reason: str
    action: str = ""

    def finding(self, *, check: str = "", about: str = "", why: str = "", next_step: str = "") -> Finding:
        """Return the finding of a check that got no answer but ``about``; the default next step removes the reason."""
        if not next_step:
            allow = f"allow {self.action} (gpufleet stack policy preflight)"
            next_step = allow if self.action else "run gpufleet preflight again"
        text = f"{about}; {self.reason}" if about else self.reason
        return unknown(text, check=check, why=why, next_step=next_step)


def explain(error: BaseException) -> Unknown:
    """Return why AWS did not answer, given one of ``UNREADABLE``."""
    if isinstance(error, errors.UnusableAnswerError):
        return Unknown(reason=str(error))
    if not errors.is_aws_error(error):
        return Unknown(reason=f"AWS answered something unreadable: {error!r}")
    if errors.is_not_permitted(error) and isinstance(error, ClientError):
        action = iam_action(error.operation_name)
        return Unknown(reason=f"not permitted: {action} is missing ({errors.code(error)})", action=action)
    return Unknown(reason=errors.reason(error))


def ask(call: Callable[[], T]) -> T | Unknown:
    """Return the answer of ``call``, or why there is none."""
    try:
        return call()
    except UNREADABLE as error:
        return explain(error)


def find(call: Callable[[], T]) -> T | Unknown:
    """Return the answer of ``call``, or AWS's reason where the resource does not exist; other errors pass."""
    try:
        return call()
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        return Unknown(reason=errors.reason(error))


@dataclass(frozen=True, kw_only=True)
class Context:
    """The input of every check; ``subnets`` are those of the configuration, as AWS describes them."""

    settings: StackSettings
    stack: str  # empty where none was named
    account_id: str  # of the credentials
    ec2: EC2Client
    service_quotas: Any
    subnets: Sequence[Any] | Unknown
    now: datetime

    @property
    def plan(self) -> FleetPlan:
        """The plan."""
        return self.settings.plan

    @property
    def region(self) -> str:
        """The plan's region."""
        return self.plan.region

    @property
    def spot_nodes(self) -> int:
        """Nodes bought on the spot market."""
        return self.plan.node_count - self.plan.purchase.on_demand_base if self.plan.purchase.option == "spot" else 0

    @property
    def zone_ids(self) -> tuple[str, ...]:
        """Known zone ids of the nodes, as the Pulumi program chooses: the subnets', the configured one, the plan's."""
        settings = self.settings
        if settings.subnet_ids:
            subnets = () if isinstance(self.subnets, Unknown) else self.subnets
            zones = {subnet["SubnetId"]: subnet["AvailabilityZoneId"] for subnet in subnets}
            return tuple(zones[subnet_id] for subnet_id in settings.subnet_ids if subnet_id in zones)
        wanted = (settings.zone_id,) if settings.zone_id else self.plan.wanted_zone_ids
        return wanted[:1] if settings.one_zone else wanted

    def owns(self, resource: Mapping[str, Any]) -> bool:
        """Return whether a resource, as AWS describes it, belongs to the stack."""
        return {"Key": "gpufleet:stack", "Value": self.stack} in resource.get("Tags", ())


@dataclass(frozen=True, slots=True)
class Check:
    """One check; its findings have its ``name`` or one of their own, and the last may be why AWS failed it."""

    name: str
    call: Callable[[Context], Iterable[Finding]]

    def __call__(self, context: Context) -> Iterator[Finding]:
        """Yield the findings."""
        try:
            yield from named(self.name, self.call(context))
        except UNREADABLE as error:
            yield from named(self.name, [explain(error).finding()])
