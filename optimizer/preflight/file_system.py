"""Check the existing FSx for Lustre file system that the nodes mount."""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.aws.file_systems import find_file_system
from optimizer.preflight.model import Context, Finding, Unknown, failure, passed, problems_or

_CHECK = "file system"


def check_file_system(context: Context) -> Iterator[Finding]:
    """Check that it is there, as the configuration has it, and in the network and zone of the nodes."""
    if not context.target.file_system:
        return
    address, group = context.target.file_system
    id_, region = address.partition(".")[0], context.region
    found = find_file_system(id_, region)
    if isinstance(found, str):
        yield failure(
            _CHECK,
            found,
            why="each node would fail at the mount and be replaced, and is paid",
            next_step=f"aws fsx describe-file-systems --region {region}",
        )
        return

    def problems() -> Iterator[Finding]:
        if address != found.address or group not in found.security_groups:
            yield failure(
                _CHECK,
                f"gpufleet:fileSystem is {address}, {group}, and AWS has {found.address}, "
                f"{', '.join(found.security_groups)}",
                why="nodes would not reach it",
                next_step=f"gpufleet stack set PLAN --file-system {id_}",
            )
        if context.target.vpc_id and found.vpc_id != context.target.vpc_id:
            yield failure(
                _CHECK,
                f"{id_} is in {found.vpc_id}, and gpufleet:vpcId is {context.target.vpc_id}",
                value=found.vpc_id,
                limit=context.target.vpc_id,
                why="its security group cannot name the nodes' group of another VPC",
                next_step=f"pulumi config set gpufleet:vpcId {found.vpc_id}, with gpufleet:subnetIds in it",
            )
        if isinstance(context.subnet_zones, Unknown):
            yield context.subnet_zones.finding(_CHECK, about="zones of gpufleet:subnetIds")
        elif others := sorted({*context.subnet_zones} - {found.zone_id}):
            yield failure(
                _CHECK,
                f"{id_} is in zone {found.zone_id}, and gpufleet:subnetIds in {', '.join(others)}",
                value=", ".join(others),
                limit=found.zone_id,
                why="what nodes read across zones is slower and billed by the GB, which neither plan nor meter counts",
                next_step=f"name a subnet in {found.zone_id} in gpufleet:subnetIds",
            )

    yield from problems_or(
        problems(), lambda: passed(_CHECK, f"{id_} is in {found.vpc_id} and {found.zone_id}", value=id_)
    )
