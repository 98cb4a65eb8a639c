"""EC2 DescribeInstanceTypeOfferings: the zones of a region that offer a type.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from optimizer.aws.paging import filters, pages

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

NAME = "zones"
ORIGIN = "EC2 DescribeInstanceTypeOfferings"

# Zone ids are the region's short form: eu-central-1 has euc1-az1, ap-northeast-2 has apne2-az1.
# https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html
_DIRECTIONS = {
    "north": "n",
    "south": "s",
    "east": "e",
    "west": "w",
    "central": "c",
    "northeast": "ne",
    "northwest": "nw",
    "southeast": "se",
    "southwest": "sw",
    "gov": "g",
}


def zone_prefix(region: str) -> str:
    """Prefix of the zone ids of a region: "use1" for us-east-1."""
    area, *directions, number = region.split("-")
    return area + "".join(_DIRECTIONS.get(part, part) for part in directions) + number


def zone_ids_of(region: str) -> re.Pattern[str]:
    """Return the pattern of a region's zone ids; Local and Wavelength Zones (usw2-lax1-az1) have others."""
    return re.compile(zone_prefix(region) + r"-az[0-9]+")


def fetch(client: EC2Client, types: Collection[str]) -> list[dict[str, Any]]:
    """Offerings of ``types`` by zone id in the client's region."""
    asked = {"LocationType": "availability-zone-id", "Filters": filters({"instance-type": types})}
    return list(pages(client, "describe_instance_type_offerings", "InstanceTypeOfferings", **asked))


def parse(offerings: Iterable[Mapping[str, Any]], region: str) -> dict[str, tuple[str, ...]]:
    """Zone ids by type, sorted. Local and Wavelength Zones are left out: their prices differ."""
    zone = zone_ids_of(region)
    zone_ids: defaultdict[str, set[str]] = defaultdict(set)
    for offering in offerings:
        name, location = str(offering.get("InstanceType")), str(offering.get("Location"))
        if zone.fullmatch(location):
            zone_ids[name].add(location)
    return {name: tuple(sorted(ids)) for name, ids in zone_ids.items()}
