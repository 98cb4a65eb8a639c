"""Check the checkpoint bucket, the region of the data's bucket, and an existing FSx for Lustre file system."""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.aws import clients
from optimizer.aws.file_systems import find_file_system
from optimizer.preflight.model import Context, Finding, Unknown, ask, failure, passed, problems_or


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


def check_file_system(context: Context) -> Iterator[Finding]:
    """Check that it is there, as the configuration has it, and in the network and zone of the nodes."""
    if not context.target.file_system:
        return
    address, group = context.target.file_system
    id_, region = address.partition(".")[0], context.region
    found = find_file_system(id_, region)
    if isinstance(found, str):
        yield failure(
            found,
            why="each node would fail at the mount and be replaced, and is paid",
            next_step=f"aws fsx describe-file-systems --region {region}",
        )
        return

    def problems() -> Iterator[Finding]:
        if address != found.address or group not in found.security_groups:
            yield failure(
                f"gpufleet:fileSystem is {address}, {group}, and AWS has {found.address}, "
                f"{', '.join(found.security_groups)}",
                why="nodes would not reach it",
                next_step=f"gpufleet stack set PLAN --file-system {id_}",
            )
        if context.target.vpc_id and found.vpc_id != context.target.vpc_id:
            yield failure(
                f"{id_} is in {found.vpc_id}, and gpufleet:vpcId is {context.target.vpc_id}",
                value=found.vpc_id,
                limit=context.target.vpc_id,
                why="its security group cannot name the nodes' group of another VPC",
                next_step=f"pulumi config set gpufleet:vpcId {found.vpc_id}, with gpufleet:subnetIds in it",
            )
        if isinstance(context.subnet_zones, Unknown):
            yield context.subnet_zones.finding(about="zones of gpufleet:subnetIds")
        elif others := sorted({*context.subnet_zones} - {found.zone_id}):
            yield failure(
                f"{id_} is in zone {found.zone_id}, and gpufleet:subnetIds in {', '.join(others)}",
                value=", ".join(others),
                limit=found.zone_id,
                why="what nodes read across zones is slower and billed by the GB, which neither plan nor meter counts",
                next_step=f"name a subnet in {found.zone_id} in gpufleet:subnetIds",
            )

    yield from problems_or(problems(), lambda: passed(f"{id_} is in {found.vpc_id} and {found.zone_id}", value=id_))
