"""Check the zones that offer the types, and the region of the data's bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infra.s3_uri import read_s3_prefix
from optimizer.aws import clients
from optimizer.aws.paging import filters
from optimizer.catalog.sources import offerings
from optimizer.commands.preflight.model import Context, Finding, Unknown, ask, failure, passed

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
