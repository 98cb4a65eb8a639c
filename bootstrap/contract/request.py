"""A person's request: ``control/request.json``, written by `gpufleet stop` and `resume`, obeyed by the controller."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from bootstrap.contract.codec import from_json, parse_json, to_json

FILE = "request.json"

Want = Literal["run", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PersonRequest:
    """A request to run or to stop."""

    schema_version: Literal[1]
    want: Want
    at: datetime
    by: str  # ARN

    def to_text(self) -> str:
        """Format the object."""
        return json.dumps(to_json(self)) + "\n"


def read_request(text: str, place: str, *, lenient: bool = False) -> PersonRequest:
    """Parse an object."""
    return from_json(PersonRequest, parse_json(text, place), place, lenient=lenient)
