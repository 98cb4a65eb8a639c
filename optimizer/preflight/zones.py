"""Check that the plan's zones are open to the account and offer the type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from optimizer.catalog.sources import offerings
from optimizer.preflight.model import Context, Finding, Unknown, passed, warning

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

_WHY_ONE = (
    "nodes that train together run in one zone: traffic between zones is slow and billed, and EFA does not cross them "
    "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits)"
)


def open_zones(ec2: EC2Client) -> frozenset[str]:
    """Return ids of the zones the account may use, without Local and Wavelength Zones (no placement groups there)."""
    answer = ec2.describe_availability_zones(
        Filters=[
            {"Name": "state", "Values": ["available"]},
            {"Name": "opt-in-status", "Values": ["opt-in-not-required"]},
        ]
    )
    return frozenset(zone["ZoneId"] for zone in answer["AvailabilityZones"])


def check_zones(context: Context) -> Iterator[Finding]:
    """Check offerings by zone id, as a name ("us-east-1a") is another zone in every account."""
    plan, zones = context.plan, context.open_zones
    alternates: dict[str, list[str]] = {}
    for alternate in plan.alternates:
        alternates.setdefault(alternate.instance_type, []).append(alternate.zone_id)
    own = (plan.instance_type, *plan.purchase.spot_types)
    types = tuple(dict.fromkeys((*own, *alternates)))
    offered = offerings.parse(offerings.fetch(context.ec2, types), context.region)
    if isinstance(zones, Unknown):
        yield zones.finding("zones", why="which zones are open to this account")
    for name in types:
        usable = set(offered.get(name, ()))
        if not isinstance(zones, Unknown):
            usable &= zones
        if name in own:
            yield _check_type(context, name, sorted(usable), further=name != plan.instance_type)
        if name in alternates:
            yield _check_alternates(name, sorted(set(alternates[name])), usable)


def _check_alternates(name: str, wanted: list[str], usable: set[str]) -> Finding:
    check, missing = f"alternate zones of {name}", [zone for zone in wanted if zone not in usable]
    if not missing:
        return passed(check, f"{', '.join(wanted)} offers {name}", value=", ".join(wanted))
    return warning(
        check,
        f"{', '.join(missing)} does not offer {name} to this account",
        value=", ".join(missing),
        limit=", ".join(sorted(usable)),
        why="the plan cannot go there when its own place has no capacity",
        next_step="gpufleet catalog refresh, then recommend again",
    )


def _check_type(context: Context, name: str, usable: list[str], *, further: bool) -> Finding:
    wanted = context.zone_ids
    check = f"zones of {name}"
    missing = [zone for zone in wanted if zone not in usable]
    offering = ", ".join(usable) or "no zone"
    if not usable or (wanted and len(missing) == len(wanted)):
        other = f"pulumi config set gpufleet:zoneId {usable[0]}" if usable else "gpufleet recommend --region REGION"
        # A spot fleet starts without a further type, in fewer pools.
        return Finding(
            check,
            f"{', '.join(wanted) or 'the region'} does not offer {name} to this account; {offering} does",
            level="warning" if further else "error",
            value=", ".join(wanted),
            limit=", ".join(usable),
            why=_WHY_ONE if context.target.one_zone else "no node could start there",
            next_step="choose a plan without it in purchase.spot_types" if further else other,
        )
    if missing:
        return warning(
            check,
            f"{', '.join(missing)} does not offer {name} to this account; {offering} does",
            value=", ".join(missing),
            limit=", ".join(usable),
            why="fewer zones are fewer pools of capacity",
            next_step="gpufleet catalog refresh, then recommend again",
        )
    where = f"{', '.join(wanted)} offers {name}" if wanted else f"{offering} offers {name}"
    one = "; all nodes go there" if context.target.one_zone and wanted else ""
    return passed(check, f"{where}{one}", value=", ".join(wanted or usable))
