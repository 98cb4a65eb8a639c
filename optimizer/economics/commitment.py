"""Commitments: capacity that is paid for its whole term, used or not, and the use that makes it pay.

A Reserved Instance is billed for every hour of its term (https://aws.amazon.com/ec2/pricing/reserved-instances/), a
Capacity Block upfront for its whole length (https://aws.amazon.com/ec2/capacityblocks/pricing/).
"""

from __future__ import annotations

from optimizer.contract.hardware import HourlyPrice
from optimizer.contract.units import HOURS_PER_YEAR


def break_even_share(commitment: HourlyPrice | None, other: HourlyPrice | None) -> float | None:
    """Return the share of its term from which a commitment's use costs less than ``other``.

    None where a price is missing, or the commitment costs more though used all the time.
    """
    if commitment is None or other is None or commitment.usd_per_hour >= other.usd_per_hour:
        return None
    return commitment.usd_per_hour / other.usd_per_hour


def break_even_hours(commitment: HourlyPrice | None, other: HourlyPrice | None, *, years: int) -> float | None:
    """Return the hours of use in a term of ``years`` from which a commitment costs less than ``other``, or None."""
    share = break_even_share(commitment, other)
    return None if share is None else share * HOURS_PER_YEAR * years
