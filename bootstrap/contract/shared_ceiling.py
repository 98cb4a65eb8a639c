"""A ceiling over several stacks of an account: one object in S3 with a row of each stack, which its controller writes.

S3 reads what was written last, and writes only over what was read, so no two stacks count on the same dollars:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/Welcome.html#ConsistencyModel
https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from bootstrap.contract.codec import from_json, parse_json
from bootstrap.contract.timings import HOUR, LEASE, LEASE_ACTS


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedCeiling:
    """Value of gpufleet:sharedCeiling, s3://BUCKET/KEY@USD."""

    bucket: str
    key: str
    usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StackRow:
    """Spend of a stack until ``at``, and its rate with all nodes that it may get before its next tick."""

    usd: float
    usd_per_hour: float
    stack_usd_per_hour: float = 0.0  # of it, what the stack costs without a node, until it is destroyed
    end_s: float  # until the nodes have ended where the next tick ends them
    at: datetime

    def usd_until(self, now: datetime) -> float:
        """Return the most dollars that the stack owes: a silent controller's nodes end with their lease."""
        silent = max(timedelta(), now - self.at)
        paid = min(silent, LEASE + LEASE_ACTS) + timedelta(seconds=self.end_s)
        rest = max(timedelta(), silent - paid)
        return self.usd + self.usd_per_hour * (paid / HOUR) + self.stack_usd_per_hour * (rest / HOUR)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpend:
    """The object: rows by the name of a stack's meter. The row of a deleted stack stays."""

    schema_version: Literal[1] = 1
    rows: dict[str, StackRow] = field(default_factory=dict)


def read_shared_spend(text: str, place: str) -> SharedSpend:
    """Parse an object."""
    return from_json(SharedSpend, parse_json(text, place), place)
