"""A node's report, written by bootstrap/agent/group.py (bootstrap/README.md).

    control/nodes/<ARN of the instance>.json

The node's policy names its own ARN alone (infra/policies/roles.py), so no node writes another's report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from bootstrap.contract.codec import FormatError, as_key, from_json, parse_json, time_text

FOLDER = "nodes"
# Exit status of a worker, torchrun and the agent (EX_CONFIG of sysexits.h): another start would end in the same way.
EXIT_AT_FAULT = 78

ReportState = Literal["training", "done", "gave-up", "unfit", "sick"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """A node's report."""

    schema_version: Literal[1]
    run_id: str = field(metadata=as_key("run"))
    state: ReportState
    exit_status: int
    step: str
    at: datetime
    modified_at: datetime  # when S3 took it
    done_steps: int | None = None  # optimizer steps, of the node of rank 0 while it trains


def instance_of(name: str) -> str:
    """Return the instance id of a report's name."""
    return name.rpartition("/")[2].removesuffix(".json")


def read_report(text: str, modified_at: datetime, place: str) -> NodeReport:
    """Parse an object; JSON nested deeper than Python reads is a RecursionError."""
    data = parse_json(text, place)
    if not isinstance(data, dict):
        raise FormatError(f"{place} is not an object")
    return from_json(NodeReport, {**data, "modified_at": time_text(modified_at)}, place)
