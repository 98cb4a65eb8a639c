"""A stack's bill from Cost Explorer, by its cost allocation tag.

Its figures come once a day and settle later (https://docs.aws.amazon.com/cost-management/latest/userguide/ce-what-is.html):
too late to enforce a limit. Requests are billed (https://aws.amazon.com/aws-cost-management/aws-cost-explorer/pricing/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

# Lines of the bill that belong to the account, not to the stack.
NOT_COUNTED = ["Credit", "Refund", "Tax"]

Part = Literal["compute", "volumes", "storage", "transfer", "head_node", "other"]
# Part of a plan's cost by a text in the usage type, after a region's prefix; the first match counts:
# https://docs.aws.amazon.com/cur/latest/userguide/Lineitem-columns.html
PART_OF_USAGE: tuple[tuple[str, Part], ...] = (
    ("EBS:", "volumes"),
    ("BoxUsage", "compute"),
    ("SpotUsage", "compute"),
    ("Reservation:", "compute"),
    ("UnusedBox", "compute"),
    ("UnusedDed", "compute"),
    ("CapacityBlock", "compute"),
    ("HeavyUsage", "compute"),
    ("VpcEndpoint", "transfer"),
    ("NatGateway", "transfer"),
    ("PublicIPv4", "transfer"),
    ("DataTransfer", "transfer"),
    ("AWS-Out-Bytes", "transfer"),  # to another region: USE1-EUW1-AWS-Out-Bytes, of S3 too
)
PART_OF_SERVICE: dict[str, Part] = {
    "Amazon Simple Storage Service": "storage",
    "AWS Key Management Service": "storage",
    "Amazon FSx": "storage",  # a plan's file system is there too
    "AWS Lambda": "head_node",
    "AmazonCloudWatch": "head_node",
    "Amazon Simple Queue Service": "head_node",
    "Amazon Simple Notification Service": "head_node",
    "CloudWatch Events": "head_node",
    "Amazon EventBridge": "head_node",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Billed:
    """Cost of a usage type on a day (UTC); ``estimated``: not final."""

    day: date
    service: str
    usage_type: str
    usd: float
    estimated: bool

    @property
    def part(self) -> Part:
        """The part of a plan's cost."""
        parts = (part for text, part in PART_OF_USAGE if text in self.usage_type)
        return next(parts, PART_OF_SERVICE.get(self.service, "other"))


def read_tagged(client: Any, key: str, value: str, start: date, end: date) -> list[Billed]:
    """Return costs with this tag, from ``start`` to before ``end``."""
    tagged = {"Tags": {"Key": key, "Values": [value], "MatchOptions": ["EQUALS"]}}
    counted = {"Not": {"Dimensions": {"Key": "RECORD_TYPE", "Values": NOT_COUNTED}}}
    query: dict[str, Any] = {
        # https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_DateInterval.html
        "TimePeriod": {"Start": start.isoformat(), "End": end.isoformat()},
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "GroupBy": [{"Type": "DIMENSION", "Key": "SERVICE"}, {"Type": "DIMENSION", "Key": "USAGE_TYPE"}],
        "Filter": {"And": [tagged, counted]},
    }
    billed: list[Billed] = []
    while True:
        answer = client.get_cost_and_usage(**query)
        for day in answer["ResultsByTime"]:
            billed += _parse_day(day)
        if not answer.get("NextPageToken"):
            return billed
        query["NextPageToken"] = answer["NextPageToken"]


def _parse_day(day: Mapping[str, Any]) -> Iterator[Billed]:
    for group in day["Groups"]:
        usd = float(group["Metrics"]["UnblendedCost"]["Amount"])
        service, usage_type = group["Keys"]
        if usd:
            yield Billed(
                day=date.fromisoformat(day["TimePeriod"]["Start"]),
                service=service,
                usage_type=usage_type,
                usd=usd,
                estimated=day["Estimated"],
            )
