"""A person's request for a profiler trace: ``traces/request.json`` beside the checkpoints, by `gpufleet logs trace`.

Its answer is ``traces/ID/rank-R.json.gz`` of torch.profiler, or ``traces/ID/rank-R.txt`` with why there is none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from bootstrap.contract.codec import from_json, parse_json, to_json

FOLDER = "traces"
REQUEST = f"{FOLDER}/request.json"
# The training looks for a request every POLL_S; an older request than MAX_AGE is not carried out any more.
POLL_S = 30.0
MAX_AGE = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """A request to trace ``steps`` steps of one rank."""

    schema_version: Literal[1] = 1
    id: str
    rank: int
    steps: int
    at: datetime
    by: str  # ARN

    @property
    def trace(self) -> str:
        """Name of the trace, below the checkpoints' prefix."""
        return f"{FOLDER}/{self.id}/rank-{self.rank}.json.gz"

    @property
    def failure(self) -> str:
        """Name of the reason why there is no trace."""
        return f"{FOLDER}/{self.id}/rank-{self.rank}.txt"

    def to_text(self) -> str:
        """Format the object."""
        return json.dumps(to_json(self)) + "\n"


def read_trace_request(text: str, place: str) -> TraceRequest:
    """Parse an object, also a newer version's; else a FormatError."""
    return from_json(TraceRequest, parse_json(text, place), place, lenient=True)
