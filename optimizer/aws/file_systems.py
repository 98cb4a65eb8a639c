"""FSx for Lustre file systems as AWS describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimizer.aws import clients, errors


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystem:
    """An available Lustre file system: what nodes mount, where it is, and the groups of its network interfaces."""

    address: str
    vpc_id: str
    zone_id: str
    security_groups: tuple[str, ...]


def find_file_system(file_system_id: str, region: str) -> FileSystem | str:
    """Find a file system, or the reason why nodes cannot mount it. Raises boto3's errors.

    https://docs.aws.amazon.com/fsx/latest/APIReference/API_DescribeFileSystems.html
    """
    try:
        answer: Any = clients.fsx(region).describe_file_systems(FileSystemIds=[file_system_id])
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        return f"there is no file system {file_system_id} in {region}"
    (system,) = answer["FileSystems"]
    if system["FileSystemType"] != "LUSTRE":
        return f"{file_system_id} is of type {system['FileSystemType']}, and the nodes mount LUSTRE"
    if system["Lifecycle"] != "AVAILABLE":
        return f"{file_system_id} is {system['Lifecycle']}, not AVAILABLE"
    ec2 = clients.ec2(region)
    (subnet,) = ec2.describe_subnets(SubnetIds=system["SubnetIds"])["Subnets"]
    # FSx tells interfaces, and EC2 their groups.
    interfaces = ec2.describe_network_interfaces(NetworkInterfaceIds=system["NetworkInterfaceIds"][:1])
    return FileSystem(
        address=f"{system['DNSName']}@tcp:/{system['LustreConfiguration']['MountName']}",
        vpc_id=system["VpcId"],
        zone_id=subnet["AvailabilityZoneId"],
        security_groups=tuple(group["GroupId"] for group in interfaces["NetworkInterfaces"][0]["Groups"]),
    )
