"""EC2 Capacity Manager: hours and interruptions of the account's own spot instances, by type and zone.

An account enables it in one region, which holds the data of all regions; a period is of whole hours:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-manager.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-manager-data-organization.html
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetCapacityManagerMetricData.html
No metric has the time until a pool has capacity again, so the wait is never learned from these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from bootstrap.contract.capacity import PoolEvents, PoolName
from optimizer.aws.paging import pages

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

NAME = "own interruptions"
USAGE_HOURS, INTERRUPTIONS = "spot-total-usage-hrs-inst", "spot-total-interruptions-inst"
# An event of ten days ago weighs half (optimizer/economics/interruption.py); one of a month ago an eighth.
DAYS = 30
_HOUR = timedelta(hours=1)


def is_enabled(client: EC2Client) -> bool:
    """Return whether the client's region holds the account's data (ec2:GetCapacityManagerAttributes)."""
    return client.get_capacity_manager_attributes().get("CapacityManagerStatus") == "enabled"


def fetch(client: EC2Client, now: datetime) -> list[dict[str, Any]]:
    """Data points of each hour, region, zone and type in the last DAYS days."""
    end = now.replace(minute=0, second=0, microsecond=0)
    asked = {
        "MetricNames": [USAGE_HOURS, INTERRUPTIONS],
        "StartTime": end - timedelta(days=DAYS),
        "EndTime": end,
        "Period": int(_HOUR.total_seconds()),
        "GroupBy": ["resource-region", "availability-zone-id", "instance-type"],
    }
    return list(pages(client, "get_capacity_manager_metric_data", "MetricDataResults", **asked))


def parse(points: Iterable[Mapping[str, Any]], types: Collection[str]) -> dict[str, PoolEvents]:
    """Events of the spot pools of ``types`` by PoolName; nodes that EC2 takes back in the same hour count as one."""
    hours: defaultdict[PoolName, list[tuple[datetime, float, float]]] = defaultdict(list)
    for point in points:
        place = point["Dimension"]
        values = {value["Metric"]: float(value["Value"]) for value in point.get("MetricValues", ())}
        used, interrupted = values.get(USAGE_HOURS, 0.0), values.get(INTERRUPTIONS, 0.0)
        if place.get("InstanceType") in types and place.get("AvailabilityZoneId") and (used > 0 or interrupted > 0):
            pool = PoolName(place["ResourceRegion"], place["AvailabilityZoneId"], place["InstanceType"], "spot")
            hours[pool].append((point["Timestamp"], used, interrupted))
    return {
        str(pool): PoolEvents(
            first_at=min(seen)[0],
            last_at=max(seen)[0] + _HOUR,
            asked=1,
            reclaimed=round(sum(interrupted for _, _, interrupted in seen)),
            reclaims=sum(interrupted > 0 for _, _, interrupted in seen),
            node_hours=sum(used for _, used, _ in seen),
            hours=sum(min(used, 1.0) for _, used, _ in seen),
        )
        for pool, seen in hours.items()
    }
