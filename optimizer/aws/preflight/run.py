"""Every check side by side; one that fails says so in a row and hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from optimizer.aws import clients
from optimizer.aws.preflight import (
    bucket,
    capacity,
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
from optimizer.aws.preflight.model import (
    LEVELS,
    UNREADABLE,
    Account,
    Context,
    Level,
    Row,
    Target,
    Unknown,
    ask,
    unknown,
)

Check = Callable[[Context], Iterator[Row]]

# In the order of reading within a level. The name is that of the row of a check which found out nothing at all.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("region", identity.check_region),
    ("hardware", hardware.check_hardware),
    ("zones", zones.check_zones),
    ("instance quotas", capacity.check_instance_quotas),
    ("storage quota", capacity.check_storage_quota),
    ("network quotas", capacity.check_network_quotas),
    ("Lambda concurrency", capacity.check_lambda_concurrency),
    ("spot placement score", spot.check_spot_score),
    ("reservation", reservation.check_reservation),
    ("image", image.check_image),
    ("KMS key", key.check_key),
    ("volume encryption", key.check_volume_encryption),
    ("bucket", bucket.check_bucket),
    ("VPC range", network.check_range),
    ("VPC", network.check_vpc),
    ("subnets", network.check_subnets),
    ("way to AWS", network.check_reach),
    ("placement groups", network.check_placement_groups),
    ("prices", money.check_prices),
    ("AWS budgets", money.check_aws_budgets),
)
# EC2's describe calls are throttled by account and region; twice as many as the catalog's refresh asks at once are well
# below it (https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html).
CHECKS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was found, the worst first.

    Attributes:
        account: whose account was asked; None where AWS did not say.
        at: when the checks began, UTC.
        rows: the answers.
    """

    account: Account | None
    at: datetime
    rows: tuple[Row, ...]

    def count(self, level: Level) -> int:
        """Rows of one level."""
        return sum(row.level == level for row in self.rows)


def preflight(target: Target, *, at: datetime | None = None) -> Report:
    """Ask AWS everything that decides whether ``target`` can be carried out now. Every call reads.

    Args:
        target: what is to be carried out.
        at: the time to judge by; now by default.

    Raises:
        optimizer.errors.GpufleetError: no credentials, refused ones, or no way to AWS.
    """
    now, region = at or datetime.now(UTC), target.plan.region
    who = identity.identify(region)
    account = None if isinstance(who, Unknown) else who
    first = (
        who.row("identity", why="names of buckets and keys hold the account")
        if isinstance(who, Unknown)
        else Row(check="identity", level="ok", found=f"account {who.id} as {who.arn}", value=who.id)
    )
    ec2 = clients.ec2(region)
    context = Context(
        target=target,
        account=account,
        ec2=ec2,
        service_quotas=clients.service_quotas(region),
        open_zones=ask(partial(zones.open_zones, ec2)),
        subnet_zones=ask(partial(network.subnet_zones, ec2, target.subnet_ids)),
        now=now,
    )
    with ThreadPoolExecutor(max_workers=CHECKS_AT_ONCE) as pool:
        answers = pool.map(lambda check: run_check(check[0], check[1], context), CHECKS)
        rows = [first, *(row for answer in answers for row in answer)]
    rows.sort(key=lambda row: LEVELS.index(row.level))
    return Report(account=account, at=now, rows=tuple(rows))


def run_check(name: str, check: Check, context: Context) -> list[Row]:
    """The rows of one check: those it found before AWS failed it, and why it failed."""
    rows: list[Row] = []
    try:
        for row in check(context):
            rows.append(row)
    except UNREADABLE as error:
        rows.append(unknown(error).row(name))
    return rows
