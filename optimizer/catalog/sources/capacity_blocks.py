"""Rates of Capacity Blocks (data/inputs/capacity_blocks.csv), copied by hand from AWS's page of prices.

https://aws.amazon.com/ec2/capacityblocks/pricing/ : "reservation prices are updated regularly based on trends in supply
and demand"; a block costs its rate for each of its hours, upfront, used or not. The block that AWS offers for given
days has its own price (DescribeCapacityBlockOfferings), which is the one that counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optimizer.catalog.sources import Skipped, parse_csv, parse_price
from optimizer.contract.hardware import HourlyPrice

# No "prices": no plan is priced by a rate, so its age is no warning of every command.
NAME = "Capacity Block rates"
ORIGIN = "AWS Capacity Blocks pricing page"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRate:
    """Effective hourly rate of one instance of a type's Capacity Blocks in a region."""

    instance_type: str
    region: str
    rate: HourlyPrice


def parse(lines: Iterable[str]) -> tuple[list[BlockRate], list[Skipped]]:
    """Rates by type and region from CSV, and malformed rows."""
    return parse_csv(lines, NAME, _parse_row, key="instance_type")


def _parse_row(row: dict[str, str]) -> BlockRate:
    rate = parse_price(row["usd_per_hour"], row["as_of"], ORIGIN)
    return BlockRate(instance_type=row["instance_type"], region=row["region"], rate=rate)
