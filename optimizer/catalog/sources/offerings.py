"""EC2 DescribeInstanceTypeOfferings: the zones of a region that offer a type.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from optimizer.aws.paging import filters, pages
from optimizer.contract.spelling import ZONE_ID

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

NAME = "zones"
ORIGIN = "EC2 DescribeInstanceTypeOfferings"


def fetch(client: EC2Client, types: Collection[str]) -> list[dict[str, Any]]:
    """Offerings of ``types`` by zone id in the client's region."""
    asked = {"LocationType": "availability-zone-id", "Filters": filters({"instance-type": types})}
    return list(pages(client, "describe_instance_type_offerings", "InstanceTypeOfferings", **asked))


def parse(offerings: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Zone ids by type, sorted. Local and Wavelength Zones are left out: their prices differ."""
    zone_ids: defaultdict[str, set[str]] = defaultdict(set)
    for offering in offerings:
        name, location = str(offering.get("InstanceType")), str(offering.get("Location"))
        if re.match(ZONE_ID, location):
            zone_ids[name].add(location)
    return {name: tuple(sorted(ids)) for name, ids in zone_ids.items()}
