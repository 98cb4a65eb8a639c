"""Whether the plan's zones are open to this account and offer the type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from optimizer.aws.preflight.model import Context, Row, Unknown
from optimizer.catalog.sources import offerings

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

_WHY_ONE = (
    "nodes that train together run in one zone: traffic between zones is slow and billed, and EFA does not cross them "
    "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits)"
)


def open_zones(ec2: EC2Client) -> frozenset[str]:
    """Ids of the zones the account may use; not Local and Wavelength Zones, which have no placement groups."""
    answer = ec2.describe_availability_zones(
        Filters=[
            {"Name": "state", "Values": ["available"]},
            {"Name": "opt-in-status", "Values": ["opt-in-not-required"]},
        ]
    )
    return frozenset(zone["ZoneId"] for zone in answer["AvailabilityZones"])


def check_zones(context: Context) -> Iterator[Row]:
    """DescribeInstanceTypeOfferings by zone id, as names ("us-east-1a") are another zone in every account."""
    plan, is_open = context.plan, context.open_zones
    types = (plan.instance_type, *plan.purchase.spot_types)
    offered = offerings.parse(offerings.fetch(context.ec2, types), context.region)
    if isinstance(is_open, Unknown):
        yield is_open.row("zones", why="which zones are open to this account")
    for name in types:
        usable = set(offered.get(name, ()))
        if not isinstance(is_open, Unknown):
            usable &= is_open
        yield from _zones_of(context, name, sorted(usable), further=name != plan.instance_type)


def _zones_of(context: Context, name: str, usable: list[str], *, further: bool) -> Iterator[Row]:
    wanted = context.zone_ids
    check = f"zones of {name}"
    missing = [zone for zone in wanted if zone not in usable]
    offering = ", ".join(usable) or "no zone"
    if not usable or (wanted and len(missing) == len(wanted)):
        other = f"pulumi config set gpufleet:zoneId {usable[0]}" if usable else "gpufleet recommend --region REGION"
        yield Row(
            check=check,
            # Without a further type a spot fleet has fewer pools, and starts all the same.
            level="warning" if further else "error",
            found=f"{', '.join(wanted) or 'the region'} does not offer {name} to this account; {offering} does",
            value=", ".join(wanted),
            limit=", ".join(usable),
            why=_WHY_ONE if context.target.one_zone else "no node could start there",
            next_step="choose a plan without it in purchase.spot_types" if further else other,
        )
    elif missing:
        yield Row(
            check=check,
            level="warning",
            found=f"{', '.join(missing)} does not offer {name} to this account; {offering} does",
            value=", ".join(missing),
            limit=", ".join(usable),
            why="fewer zones are fewer pools of capacity",
            next_step="gpufleet catalog refresh, then recommend again",
        )
    else:
        where = f"{', '.join(wanted)} offers {name}" if wanted else f"{offering} offers {name}"
        one = "; all nodes go there" if context.target.one_zone and wanted else ""
        yield Row(check=check, level="ok", found=f"{where}{one}", value=", ".join(wanted or usable))
