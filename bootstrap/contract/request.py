"""A person's request: ``control/request.json``, written by `gpufleet stop` and `resume`, obeyed by the controller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from bootstrap.contract.codec import from_json, parse_json, to_json

FILE = "request.json"

Want = Literal["run", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpend:
    """Dollars that another stack spent on a job until ``at``, and what it costs per hour since then."""

    job: str
    usd: float
    usd_per_hour: float
    at: datetime

    def usd_until(self, now: datetime) -> float:
        """Dollars until ``now``."""
        return self.usd + max(0.0, (now - self.at).total_seconds()) / 3600 * self.usd_per_hour


def merge_spends(known: Mapping[str, StackSpend], told: Mapping[str, StackSpend]) -> dict[str, StackSpend]:
    """Return the later word on each stack."""
    newer = {stack: spend for stack, spend in told.items() if stack not in known or spend.at > known[stack].at}
    return {**known, **newer}


@dataclass(frozen=True, kw_only=True, slots=True)
class PersonRequest:
    """A request to run or to stop."""

    schema_version: Literal[1]
    want: Want
    at: datetime
    by: str  # ARN
    moved_to: str = ""  # stack where the run goes on
    elsewhere: dict[str, StackSpend] = field(default_factory=dict)  # by stack; counts against the ceiling
    begun_at: datetime | None = None  # start of a run that comes from another stack; its deadline counts from then
    progress: float = 0.0  # share of that run's work that is done

    def to_text(self) -> str:
        """Format the object; a controller of an earlier version reads one without the fields that moves added."""
        return json.dumps({key: value for key, value in to_json(self).items() if value}) + "\n"

    def is_same_ask(self, other: PersonRequest | None) -> bool:
        """Return True where both are the same request of a person; dollars of other stacks may differ."""
        return other is not None and (self.want, self.at, self.by) == (other.want, other.at, other.by)


def read_request(text: str, place: str, *, lenient: bool = False) -> PersonRequest:
    """Parse an object."""
    return from_json(PersonRequest, parse_json(text, place), place, lenient=lenient)
