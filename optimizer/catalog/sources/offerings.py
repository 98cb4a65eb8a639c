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

# A region's own zones: eu-central-1 has euc1-az1. Local and Wavelength Zones have more parts (usw2-lax1-az1):
# https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html
REGIONAL_ZONE = re.compile(r"[a-z]+[0-9]+-az[0-9]+")


def fetch(client: EC2Client, types: Collection[str]) -> list[dict[str, Any]]:
    """Offerings of ``types`` by zone id in the client's region."""
    asked = {"LocationType": "availability-zone-id", "Filters": filters({"instance-type": types})}
    return list(pages(client, "describe_instance_type_offerings", "InstanceTypeOfferings", **asked))


def parse(offerings: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Zone ids by type, sorted. Local and Wavelength Zones are left out: their prices differ."""
    zone_ids: defaultdict[str, set[str]] = defaultdict(set)
    for offering in offerings:
        name, location = str(offering.get("InstanceType")), str(offering.get("Location"))
        if REGIONAL_ZONE.fullmatch(location):
            zone_ids[name].add(location)
    return {name: tuple(sorted(ids)) for name, ids in zone_ids.items()}
