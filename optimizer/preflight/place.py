"""Check instance types' hardware and zones, how likely spot nodes come, and the region of the data's bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from optimizer.aws import clients
from optimizer.aws.errors import UnusableAnswerError
from optimizer.aws.paging import filters, pages
from optimizer.catalog.sources import offerings
from optimizer.preflight.model import (
    Context,
    Finding,
    Level,
    Unknown,
    ask,
    failure,
    named,
    passed,
    unknown,
    warning,
)

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

_WHY_ONE = (
    "nodes that train together run in one zone: traffic between zones is slow and billed, and EFA does not cross them "
    "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits)"
)


def open_zones(ec2: EC2Client) -> frozenset[str]:
    """Return ids of the zones the account may use, without Local and Wavelength Zones (no placement groups there)."""
    usable: Any = filters({"state": ["available"], "opt-in-status": ["opt-in-not-required"]})
    answer = ec2.describe_availability_zones(Filters=usable)
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
        yield zones.finding(why="which zones are open to this account")
    for name in types:
        usable = set(offered.get(name, ()))
        if not isinstance(zones, Unknown):
            usable &= zones
        if name in own:
            finding = _check_zones(context, name, sorted(usable), further=name != plan.instance_type)
            yield from named(f"zones of {name}", [finding])
        if name in alternates:
            finding = _check_alternates(name, sorted(set(alternates[name])), usable)
            yield from named(f"alternate zones of {name}", [finding])


def _check_alternates(name: str, wanted: list[str], usable: set[str]) -> Finding:
    missing = [zone for zone in wanted if zone not in usable]
    if not missing:
        return passed(f"{', '.join(wanted)} offers {name}", value=", ".join(wanted))
    return warning(
        f"{', '.join(missing)} does not offer {name} to this account",
        value=", ".join(missing),
        limit=", ".join(sorted(usable)),
        why="the plan cannot go there when its own place has no capacity",
        next_step="gpufleet catalog refresh, then recommend again",
    )


def _check_zones(context: Context, name: str, usable: list[str], *, further: bool) -> Finding:
    wanted = context.zone_ids
    missing = [zone for zone in wanted if zone not in usable]
    offering = ", ".join(usable) or "no zone"
    if not usable or (wanted and len(missing) == len(wanted)):
        other = f"pulumi config set gpufleet:zoneId {usable[0]}" if usable else "gpufleet recommend --region REGION"
        # A spot fleet starts without a further type, in fewer pools.
        return Finding(
            f"{', '.join(wanted) or 'the region'} does not offer {name} to this account; {offering} does",
            level="warning" if further else "error",
            value=", ".join(wanted),
            limit=", ".join(usable),
            why=_WHY_ONE if context.target.one_zone else "no node could start there",
            next_step="choose a plan without it in purchase.spot_types" if further else other,
        )
    if missing:
        return warning(
            f"{', '.join(missing)} does not offer {name} to this account; {offering} does",
            value=", ".join(missing),
            limit=", ".join(usable),
            why="fewer zones are fewer pools of capacity",
            next_step="gpufleet catalog refresh, then recommend again",
        )
    where = f"{', '.join(wanted)} offers {name}" if wanted else f"{offering} offers {name}"
    one = "; all nodes go there" if context.target.one_zone and wanted else ""
    return passed(f"{where}{one}", value=", ".join(wanted or usable))


# AWS defines the ends of its scale only, 10 "highly likely to succeed" and 1 "not likely"; the upper third counts as
# likely here, the lower third as unlikely.
LIKELY = 7
UNLIKELY = 3
# With fewer types AWS answers with a low score whatever the capacity is:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/how-sps-works.html
TYPES_FOR_A_FAIR_SCORE = 3


def check_spot_score(context: Context) -> Iterator[Finding]:
    """Check AWS's placement score of as many spot nodes as the plan buys, in one zone for a gang.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html
    """
    plan, target = context.plan, context.target
    nodes = target.spot_nodes
    if nodes == 0:
        return
    types = [plan.instance_type, *plan.purchase.spot_types]
    answers = pages(
        context.ec2,
        "get_spot_placement_scores",
        "SpotPlacementScores",
        InstanceTypes=types,
        TargetCapacity=nodes,
        TargetCapacityUnitType="units",
        SingleAvailabilityZone=target.one_zone,
        RegionNames=[context.region],
    )
    scores: dict[str, int] = {}
    for answer in answers:
        score = int(answer["Score"])
        if not 1 <= score <= 10:
            raise UnusableAnswerError(f"a spot placement score of {score}, and the scale is 1 to 10")
        scores[answer["AvailabilityZoneId"] if target.one_zone else answer["Region"]] = score
    best = max(scores, key=lambda place: scores[place], default="")
    # Without a chosen zone the Pulumi program takes any zone that offers the type.
    zone = context.zone_ids[0] if context.zone_ids else best
    place = zone if target.one_zone else context.region
    wanted = f"{nodes} spot {' or '.join(types)} in {place or context.region}"
    if place not in scores:
        yield unknown(
            f"AWS gave no score for {wanted}" + (f"; {best} has {scores[best]} of 10" if best else ""),
            why="a zone AWS leaves out is none of its ten best",
            next_step=f"pulumi config set gpufleet:zoneId {best}" if best else "gpufleet preflight another --plan N",
        )
        return
    score = scores[place]
    likely, fair = score >= LIKELY, len(types) >= TYPES_FOR_A_FAIR_SCORE
    level: Level = "ok" if likely else "warning"
    if score <= UNLIKELY and fair and plan.purchase.fallback == "none":
        level = "error"
    text, next_step = f"{score} of 10 for {wanted}", "gpufleet recommend --purchase on-demand"
    if target.one_zone and scores[best] > score:
        text += f"; {best} has {scores[best]}"
        next_step = f"pulumi config set gpufleet:zoneId {best}"
    why = (
        "AWS's estimate, now, of whether the request succeeds; no promise of capacity, and nothing about how long it "
        "lasts (docs/preflight.md)"
    )
    if not fair:
        why += (
            f"; AWS scores fewer than {TYPES_FOR_A_FAIR_SCORE} types low whatever there is, and these are {len(types)}"
        )
    yield Finding(text, level=level, value=score, limit=LIKELY, why=why, next_step="" if likely else next_step)


def check_data_bucket(context: Context) -> Iterator[Finding]:
    """Check that a bucket which a file system is linked to is in the fleet's region."""
    bucket, plan = context.target.data_bucket, context.plan
    if plan.lustre is None or not bucket:
        return  # the configuration's check refuses a file system without data
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
    region = ask(lambda: clients.s3(context.region).head_bucket(Bucket=bucket)["BucketRegion"])
    if isinstance(region, Unknown):
        yield region.finding(about=f"region of {bucket}", why="reading across regions is billed by the GB")
    elif region == plan.region:
        yield passed(f"{bucket} is in {region}, as the file system that shows it", value=region)
    else:
        yield failure(
            f"{bucket} is in {region}, and the file system in {plan.region}",
            value=region,
            limit=plan.region,
            why="what it reads across regions is billed by the GB, which neither plan nor meter counts",
            next_step=f"copy the data into a bucket in {plan.region}, or plan without workload.lustre_gib",
        )
