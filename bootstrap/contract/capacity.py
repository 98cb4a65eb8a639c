"""Capacity events of a stack's pools, in ``control/state.json`` over all its runs, for `gpufleet catalog learn`.

A pool is one instance type in one zone, bought one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple


class PoolName(NamedTuple):
    """A pool, as the keys of the events name it: "us-east-1/use1-az4/p5.48xlarge/spot"."""

    region: str
    zone_id: str
    instance_type: str
    purchase: str  # spot, on-demand (in a reservation, too) or capacity-block

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def parse(cls, text: str) -> PoolName:
        """Read a key; ValueError for another text."""
        parts = text.split("/")
        if len(parts) != len(cls._fields) or not all(parts):
            raise ValueError(f"{text!r} is no pool: {'/'.join(cls._fields)}")
        return cls(*parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolEvents:
    """Events of one pool since ``first_at``. A drought lasts from a refusal or reclaim to the next launch."""

    first_at: datetime
    last_at: datetime
    asked: int  # nodes that the stack wants together: a gang's, 1 for workers
    launched: int = 0  # nodes that came
    refused: int = 0  # launches that EC2 refused for lack of capacity
    reclaimed: int = 0  # nodes that EC2 took back
    reclaims: int = 0  # times that it did; nodes that go together count once
    node_hours: float = 0.0  # lived by all nodes
    hours: float = 0.0  # with a node or more
    returns: int = 0  # droughts whose end was seen
    empty_hours: float = 0.0  # of ended droughts
    empty_since: datetime | None = None  # start of the present drought
    empty_at: datetime | None = None  # last refusal or reclaim of it
    reclaimed_at: datetime | None = None
