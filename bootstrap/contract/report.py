"""A node's report: ``control/nodes/<instance id>.json``, written by ``tell_controller`` of bootstrap/fleet.sh.

A node overwrites its report when its state changes (bootstrap/README.md says what exit_status and step hold)::

    training   torchrun is started
    done       the command ended with 0; in mode workers it runs again a minute later
    gave-up    the command failed again and again, or cannot be started
    unfit      the set-up failed; the node is abandoned and replaced
    sick       a GPU failed while training; the node marked itself unhealthy and is replaced
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from bootstrap.contract.codec import FormatError, as_key, from_json, parse_json, time_text

FOLDER = "nodes"

ReportState = Literal["training", "done", "gave-up", "unfit", "sick"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """A node's report, with ``modified_at``, the time at which S3 took it."""

    schema_version: Literal[1]
    run_id: str = field(metadata=as_key("run"))
    state: ReportState
    exit_status: int
    step: str
    at: datetime
    modified_at: datetime


def read_report(text: str, modified_at: datetime, place: str) -> NodeReport:
    """Parse an object's content.

    Raises:
        FormatError: the content is not a report.
        RecursionError: JSON nested deeper than Python reads.
    """
    data = parse_json(text, place)
    if not isinstance(data, dict):
        raise FormatError(f"{place} is not an object")
    return from_json(NodeReport, {**data, "modified_at": time_text(modified_at)}, place)
