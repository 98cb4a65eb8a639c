"""Check the zones that offer the types, how likely spot nodes come, and the region of the data's bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infra.s3_uri import read_s3_prefix
from optimizer.aws import clients
from optimizer.aws.errors import UnusableAnswerError
from optimizer.aws.paging import filters, pages
from optimizer.catalog.sources import offerings
from optimizer.commands.preflight.model import Context, Finding, Unknown, ask, failure, passed, unknown

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
    name, wanted = context.plan.instance_type, context.zone_ids
    check = f"zones of {name}"
    offered = offerings.parse(offerings.fetch(context.ec2, [name]), context.region)
    open_to_account = set(offered.get(name, ()))
    if isinstance(context.open_zones, Unknown):
        yield context.open_zones.finding(why="which zones are open to this account")
    else:
        open_to_account &= context.open_zones
    usable = sorted(open_to_account)
    missing = [zone for zone in wanted if zone not in usable]
    value, offering = ", ".join(wanted or usable), ", ".join(usable)
    if usable and not missing:
        one = "; all nodes go there" if context.settings.one_zone else ""
        yield passed(f"{value} offers {name}{one}", check=check, value=value)
        return
    stops = len(missing) == len(wanted)
    other = f"pulumi config set gpufleet:zoneId {usable[0]}" if usable else "gpufleet recommend --region REGION"
    why = _WHY_ONE if context.settings.one_zone else "no node could start there"
    yield Finding(
        f"{', '.join(missing) or 'the region'} does not offer {name} to this account; {offering or 'no zone'} does",
        check=check,
        level="error" if stops else "warning",
        value=", ".join(missing),
        limit=offering,
        why=why if stops else "fewer zones are fewer pools of capacity",
        next_step=other if stops else "gpufleet catalog refresh, then recommend again",
    )


# AWS defines the ends of its scale only, 10 "highly likely to succeed" and 1 "not likely"; the upper third counts as
# likely.
LIKELY = 7


def check_spot_score(context: Context) -> Iterator[Finding]:
    """Check AWS's placement score of as many spot nodes as the plan buys, in one zone for a gang.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html
    """
    plan, one_zone, nodes = context.plan, context.settings.one_zone, context.spot_nodes
    if nodes == 0:
        return
    answers = pages(
        context.ec2,
        "get_spot_placement_scores",
        "SpotPlacementScores",
        InstanceTypes=[plan.instance_type],
        TargetCapacity=nodes,
        TargetCapacityUnitType="units",
        SingleAvailabilityZone=one_zone,
        RegionNames=[context.region],
    )
    place_of = "AvailabilityZoneId" if one_zone else "Region"
    scores: dict[str, int] = {answer[place_of]: int(answer["Score"]) for answer in answers}
    if faulty := [score for score in scores.values() if not 1 <= score <= 10]:
        raise UnusableAnswerError(f"a spot placement score of {faulty[0]}, and the scale is 1 to 10")
    best = max(scores, key=lambda place: scores[place], default="")
    # Without a chosen zone the Pulumi program takes any zone that offers the type.
    zone = context.zone_ids[0] if context.zone_ids else best
    place = zone if one_zone else context.region
    wanted = f"{nodes} spot {plan.instance_type} in {place or context.region}"
    elsewhere = f"pulumi config set gpufleet:zoneId {best}"
    if place not in scores:
        yield unknown(
            f"AWS gave no score for {wanted}" + (f"; {best} has {scores[best]} of 10" if best else ""),
            why="a zone AWS leaves out is none of its ten best",
            next_step=elsewhere if best else "gpufleet preflight another --plan N",
        )
        return
    score = scores[place]
    text = f"{score} of 10 for {wanted}"
    if has_better := one_zone and scores[best] > score:
        text += f"; {best} has {scores[best]}"
    if score >= LIKELY:
        yield passed(text, value=score, limit=LIKELY)
        return
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/how-sps-works.html
    why = (
        "AWS's estimate, now, of whether the request succeeds; no promise of capacity, and nothing about how long it "
        "lasts; AWS scores fewer than 3 types low whatever there is"
    )
    next_step = elsewhere if has_better else "gpufleet recommend --purchase on-demand"
    yield Finding(text, level="warning", value=score, limit=LIKELY, why=why, next_step=next_step)


def check_data_bucket(context: Context) -> Iterator[Finding]:
    """Check that a bucket which a file system is linked to is in the fleet's region."""
    plan, place = context.plan, read_s3_prefix(context.settings.data)
    if plan.lustre is None or place is None:
        return  # the configuration's check refuses a file system without data
    bucket, _ = place
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
