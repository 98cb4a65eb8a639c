"""Capacity reservations that the controller makes for the start of a gang on demand: how they are found, when they end.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateCapacityReservation.html: EC2 grants all instances or
none, at once, and bills the unused ones by the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

# Tags of a start reservation. One that `pulumi up` makes (purchase option reserved) lacks START_TAG, and stays.
STACK_TAG, START_TAG = "gpufleet:stack", "gpufleet:start"
# Preferences of an Auto Scaling group for its target reservations: fail outside of them, or go on on demand:
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CapacityReservationSpecification.html
ONLY, FIRST = "capacity-reservations-only", "capacity-reservations-first"
# End of a reservation that nobody cancels: "the Capacity Reservation is cancelled within an hour from the specified
# time" (the page above).
LASTS = timedelta(hours=1)
ENDS_WITHIN = timedelta(hours=1)


def read_reservations(ec2: Any) -> Iterator[Any]:
    """Yield EC2's entries of the reservations that are active, or about to be, shared ones too.

    The filters have no tag:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeCapacityReservations.html
    """
    filters = [{"Name": "state", "Values": ["active", "pending"]}]
    for page in ec2.get_paginator("describe_capacity_reservations").paginate(Filters=filters):
        yield from page["CapacityReservations"]


def start_token(entry: Any, stack: str) -> str:
    """Return the ClientToken of a start reservation of the stack; empty for another's, or another reservation."""
    tags = {tag["Key"]: tag["Value"] for tag in entry.get("Tags", [])}
    return str(tags.get(START_TAG, "")) if tags.get(STACK_TAG) == stack else ""
