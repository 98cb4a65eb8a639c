"""The list of checks, run side by side. A check that fails yields a finding and hides no other check."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from infra.settings import StackSettings
from optimizer.aws import clients
from optimizer.commands.preflight import capacity, image, money, network, reservation
from optimizer.commands.preflight.model import LEVELS, Check, Context, Finding, ask, passed
from optimizer.commands.stack_file import caller_of

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
    """The findings, errors first, of checks that began ``at`` (UTC)."""

    account_id: str
    at: datetime
    findings: tuple[Finding, ...]

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each level."""
        return {level: sum(finding.level == level for finding in self.findings) for level in LEVELS}


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
    caller = caller_of(region)
    account_id, ec2 = caller["Account"], clients.ec2(region)
    identity = passed(f"account {account_id} as {caller['Arn']}", check="identity", value=account_id)
    context = Context(
        settings=settings,
        stack=stack,
        account_id=account_id,
        ec2=ec2,
        service_quotas=clients.service_quotas(region),
        subnet_zones=ask(partial(network.subnet_zones, ec2, settings.subnet_ids)),
        now=now,
    )
    with ThreadPoolExecutor(max_workers=CHECKS_AT_ONCE) as pool:
        answers = list(pool.map(lambda check: list(check(context)), (*CHECKS, *more)))
    findings = [*offline, identity, *(finding for answer in answers for finding in answer)]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return PreflightReport(account_id=account_id, at=now, findings=tuple(findings))
