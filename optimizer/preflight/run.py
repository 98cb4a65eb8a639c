"""The list of checks, run side by side. A check that fails yields a finding and hides no other check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from optimizer.aws import clients
from optimizer.preflight import (
    access,
    bucket,
    capacity,
    file_system,
    hardware,
    identity,
    image,
    key,
    money,
    network,
    reservation,
    spot,
    zones,
)
from optimizer.preflight.model import (
    LEVELS,
    UNREADABLE,
    Account,
    Context,
    Deployment,
    Finding,
    Unknown,
    ask,
    explain,
    passed,
)

Check = Callable[[Context], Iterator[Finding]]

# In the order of printing within a level. The name is used where a check cannot name its own finding.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("region", identity.check_region),
    ("hardware", hardware.check_hardware),
    ("zones", zones.check_zones),
    ("instance quotas", capacity.check_instance_quotas),
    ("storage quota", capacity.check_storage_quota),
    ("file system quotas", capacity.check_file_system_quotas),
    ("network quotas", capacity.check_network_quotas),
    ("Lambda concurrency", capacity.check_lambda_concurrency),
    ("spot placement score", spot.check_spot_score),
    ("reservation", reservation.check_reservation),
    ("image", image.check_image),
    ("container image", image.check_container_image),
    ("KMS key", key.check_key),
    ("volume encryption", key.check_volume_encryption),
    ("permissions boundary", access.check_boundary),
    ("session logs", access.check_session_logs),
    ("bucket", bucket.check_bucket),
    ("data bucket", bucket.check_data_bucket),
    ("file system", file_system.check_file_system),
    ("VPC range", network.check_range),
    ("VPC", network.check_vpc),
    ("subnets", network.check_subnets),
    ("way to AWS", network.check_reach),
    ("placement groups", network.check_placement_groups),
    ("prices", money.check_prices),
    ("AWS budgets", money.check_aws_budgets),
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


def preflight(
    target: Deployment,
    *,
    offline: Sequence[Finding] = (),
    at: datetime | None = None,
    told: Callable[[str], None] = lambda check: None,
) -> PreflightReport:
    """Check with AWS whether ``target`` can be carried out ``at`` a time, by default now.

    ``offline`` are findings made without AWS, to report with the others; ``told`` gets each check's name at its end.

    Raises:
        optimizer.contract.errors.GpufleetError: no credentials, refused ones, or no way to AWS.
    """
    now, region = at or datetime.now(UTC), target.plan.region
    account = identity.identify(region)
    if isinstance(account, Unknown):
        first, known_account = account.finding("identity", why="names of buckets and keys hold the account"), None
    else:
        text = f"account {account.id} as {account.arn}"
        first, known_account = passed("identity", text, value=account.id), account
    ec2 = clients.ec2(region)
    context = Context(
        target=target,
        account=known_account,
        ec2=ec2,
        service_quotas=clients.service_quotas(region),
        open_zones=ask(partial(zones.open_zones, ec2)),
        subnet_zones=ask(partial(network.subnet_zones, ec2, target.subnet_ids)),
        now=now,
    )
    with ThreadPoolExecutor(max_workers=CHECKS_AT_ONCE) as pool:
        answers = pool.map(lambda check: run_check(check[0], check[1], context, told), CHECKS)
        findings = [*offline, first, *(finding for answer in answers for finding in answer)]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return PreflightReport(account=known_account, at=now, findings=tuple(findings))


def run_check(
    name: str, check: Check, context: Context, told: Callable[[str], None] = lambda check: None
) -> list[Finding]:
    """Return the findings of one check, the last one why AWS failed it."""
    findings: list[Finding] = []
    try:
        for finding in check(context):
            findings.append(finding)
    except UNREADABLE as error:
        findings.append(explain(error).finding(name))
    told(name)
    return findings
