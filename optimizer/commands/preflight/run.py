"""The list of checks, run side by side. A check that fails yields a finding and hides no other check."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from infra.settings import StackSettings
from optimizer.aws import clients, errors
from optimizer.commands.preflight import capacity, image, money, network, reservation
from optimizer.commands.preflight.model import LEVELS, Account, Check, Context, Finding, Unknown, ask, named, passed
from optimizer.contract.errors import GpufleetError

# In the order of printing within a level.
CHECKS = (
    Check("instance quotas", capacity.check_instance_quotas),
    Check("reservation", reservation.check_reservation),
    Check("image", image.check_image),
    Check("container image", image.check_container_image),
    Check("data bucket", network.check_data_bucket),
    Check("VPC", network.check_vpc),
    Check("addresses", network.check_addresses),
    Check("way to AWS", network.check_reach),
    Check("prices", money.check_prices),
)
# EC2 throttles describe calls far above this, by account and region:
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html
CHECKS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightReport:
    """The findings, errors first, of checks that began ``at`` (UTC); ``account`` is None where AWS did not say."""

    account: Account | None
    at: datetime
    findings: tuple[Finding, ...]

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each level."""
        return {level: sum(finding.level == level for finding in self.findings) for level in LEVELS}


def identify(region: str) -> Account | Unknown:
    """Return the account of the credentials; the call needs no permission, and the region to be enabled.

    https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html

    Raises:
        GpufleetError: there are no credentials, AWS refuses them in ``region``, or it cannot be reached.
    """

    def call() -> Account:
        try:
            answer = clients.sts(region).get_caller_identity()
        except Exception as error:
            if errors.stops_all_calls(error):
                raise GpufleetError(
                    f"nothing was checked in {region}: {errors.reason(error)}",
                    limit="credentials that may read, and a way to AWS",
                    why="preflight asks the account the plan would run in",
                    next_step=f"{errors.CHECK_CREDENTIALS}; aws account enable-region --region-name {region} enables "
                    "a region",
                ) from error
            raise
        return Account(id=answer["Account"], arn=answer["Arn"])

    return ask(call)


def preflight(
    settings: StackSettings,
    *,
    stack: str = "",
    more: Sequence[Check] = (),
    offline: Sequence[Finding] = (),
    at: datetime | None = None,
) -> PreflightReport:
    """Check with AWS whether a configuration can be carried out ``at`` a time, by default now; ``stack`` is its name.

    ``more`` are further checks, ``offline`` findings made without AWS.

    Raises:
        GpufleetError: no credentials, refused ones, or no way to AWS.
    """
    now, region = at or datetime.now(UTC), settings.plan.region
    caller = identify(region)
    if isinstance(caller, Unknown):
        first = caller.finding(why="names of buckets and keys hold the account")
    else:
        first = passed(f"account {caller.id} as {caller.arn}", value=caller.id)
    ec2 = clients.ec2(region)
    known_account = None if isinstance(caller, Unknown) else caller
    context = Context(
        settings=settings,
        stack=stack,
        account=known_account,
        ec2=ec2,
        service_quotas=clients.service_quotas(region),
        subnet_zones=ask(partial(network.subnet_zones, ec2, settings.subnet_ids)),
        now=now,
    )
    with ThreadPoolExecutor(max_workers=CHECKS_AT_ONCE) as pool:
        answers = list(pool.map(lambda check: list(check(context)), (*CHECKS, *more)))
    findings = [*offline, *named("identity", [first]), *(finding for answer in answers for finding in answer)]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return PreflightReport(account=known_account, at=now, findings=tuple(findings))
