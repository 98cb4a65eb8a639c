"""Capacity Blocks that AWS offers, and the purchase of one.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-purchase.html
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeCapacityBlockOfferings.html
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_PurchaseCapacityBlock.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from botocore import exceptions
from botocore.exceptions import ClientError

from optimizer.aws import errors, quotas
from optimizer.aws.paging import filters, pages
from optimizer.contract.plan import CapacityBlock, FleetPlan, usable_hours

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

# AWS's page of July 2025 takes these counts only; that of 2026 names but the limit of 64.
SIZES = (1, 2, 4, 8, 16, 32, 64)
MOST_NODES = SIZES[-1]
# Lengths of a block: days up to 14, then weeks up to 26 (CapacityDurationHours of DescribeCapacityBlockOfferings).
LENGTHS_H: tuple[int, ...] = (*range(24, 15 * 24, 24), *range(3 * 168, 27 * 168, 168))
PLATFORM: Final = "Linux/UNIX"
# Blocks of one length begin a day or more apart; a reservation's times may be rounded.
_SAME = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A question to DescribeCapacityBlockOfferings; ``hours`` is a length that AWS sells (``block_hours``)."""

    instance_type: str
    region: str
    nodes: int
    hours: int
    start: datetime | None = None
    until: datetime | None = None

    def __str__(self) -> str:
        return f"{self.nodes} x {self.instance_type} for {self.hours} h"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offering:
    """A Capacity Block that can be bought, and the search that found it: ``usd`` is its whole price, paid upfront."""

    id: str
    search: Search
    zone: str
    nodes: int
    times: CapacityBlock
    usd: Decimal

    @property
    def hours(self) -> float:
        """Length; AWS ends instances 30 minutes before it is over."""
        return (self.times.end - self.times.start) / timedelta(hours=1)

    @property
    def usd_per_node_hour(self) -> float:
        """Price of an hour of one instance."""
        return float(self.usd) / (self.nodes * self.hours)


def block_hours(hours: float, window_hours: float = math.inf) -> int:
    """Return the length of the shortest block of at least ``hours``, else of the longest that the window holds."""
    lengths = tuple(length for length in LENGTHS_H if length <= window_hours) or LENGTHS_H[:1]
    return next((length for length in lengths if length >= hours), lengths[-1])


def train_hours(plan: FleetPlan, times: CapacityBlock, now: datetime) -> float:
    """Hours of a block that the plan can train in, its last checkpoint saved."""
    return usable_hours([times], now) - plan.reserve_s / 3600


def find(client: EC2Client, search: Search) -> list[Offering]:
    """Return the offerings for a search that a plan can use, the cheapest first.

    Asks for the exact count and, where that is none of SIZES, for the next of them.
    """
    offered: dict[str, Any] = {}
    for count in sorted({search.nodes, next(size for size in SIZES if size >= search.nodes)}):
        try:
            offered |= {block["CapacityBlockOfferingId"]: block for block in _describe(client, search, count)}
        except ClientError as error:
            if count in SIZES or not errors.code(error).startswith("InvalidParameter"):
                raise
    read = (_read(block, search) for block in offered.values())
    usable = [offering for offering in read if offering and offering.nodes >= search.nodes]
    return sorted(usable, key=lambda offering: (offering.usd, offering.times.start))


def _describe(client: EC2Client, search: Search, count: int) -> Iterator[Any]:
    asked: Any = {
        "InstanceType": search.instance_type,
        "InstanceCount": count,
        "CapacityDurationHours": search.hours,
        **({"StartDateRange": search.start} if search.start else {}),
        **({"EndDateRange": search.until} if search.until else {}),
    }
    return pages(client, "describe_capacity_block_offerings", "CapacityBlockOfferings", **asked)


def _read(offer: Any, search: Search) -> Offering | None:
    """Return an offering, or None for one of another currency or tenancy, or of several segments (zones, times)."""
    try:
        usd = Decimal(offer["UpfrontFee"])
    except InvalidOperation:
        return None
    single = len(offer.get("CapacityBlockOfferingSegments") or ()) <= 1
    if offer["CurrencyCode"] != "USD" or not (usd.is_finite() and usd > 0) or not single:
        return None
    if offer.get("Tenancy", "default") != "default":
        return None
    return Offering(
        id=offer["CapacityBlockOfferingId"],
        search=search,
        zone=offer["AvailabilityZone"],
        nodes=offer["InstanceCount"],
        times=CapacityBlock(start=offer["StartDate"], end=offer["EndDate"]),
        usd=usd,
    )


def bought(client: EC2Client, offering: Offering) -> list[Any]:
    """Return the account's Capacity Blocks of an offering's type, zone, count and times, paid or to be paid."""
    of_type = filters({"instance-type": [offering.search.instance_type]})
    return [
        reservation
        for reservation in pages(client, "describe_capacity_reservations", "CapacityReservations", Filters=of_type)
        if quotas.is_block(reservation)
        and reservation["State"] in ("active", "scheduled", "pending", "payment-pending")
        and reservation["AvailabilityZone"] == offering.zone
        and reservation["TotalInstanceCount"] == offering.nodes
        and all(
            abs(reservation[f"{name.title()}Date"] - getattr(offering.times, name)) < _SAME for name in ("start", "end")
        )
    ]


def buy(client: EC2Client, offering: Offering) -> Any:
    """Buy an offering and return its reservation, as AWS describes it.

    PurchaseCapacityBlock takes no client token, so ``client`` must be of ``clients.ec2_once``: a second attempt could
    buy a second block.
    """
    answer: Any = client.purchase_capacity_block(CapacityBlockOfferingId=offering.id, InstancePlatform=PLATFORM)
    reservation = answer.get("CapacityReservation", {})
    if "CapacityReservationId" not in reservation:
        raise errors.UnusableAnswerError(f"AWS answered without a reservation's id: {sorted(answer)}")
    return reservation


def is_refused(error: BaseException) -> bool:
    """Return whether a failed purchase surely bought nothing: AWS refused, or no request left this machine."""
    if isinstance(error, ClientError):
        return not errors.is_server_fault(error)
    unsent = (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError, exceptions.ParamValidationError)
    return isinstance(error, unsent) or errors.has_no_credentials(error) or errors.is_misconfigured(error)
