"""Read the training's newest loss from the log lines of the reference trainer (bootstrap/trainer/report)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

# An older value says nothing of the present.
WINDOW = timedelta(minutes=15)
_LINE = re.compile(r"step ([\d,]+)/[\d,]+  loss (\S+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The mean loss of a step's global batch."""

    step: int
    value: float


def read_loss(client: Any, log_group: str, now: datetime) -> Loss | None:
    """Return the newest loss of the last quarter of an hour; None without a line.

    https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html
    """
    pages = client.get_paginator("filter_log_events").paginate(
        logGroupName=log_group, filterPattern='"loss"', startTime=int((now - WINDOW).timestamp() * 1000)
    )
    try:
        messages = [event["message"] for page in pages for event in page["events"]]
    except client.exceptions.ResourceNotFoundException:  # no node has run yet
        return None
    losses = [parse_loss(message) for message in messages]
    return max(filter(None, losses), key=lambda loss: loss.step, default=None)


def parse_loss(line: str) -> Loss | None:
    """Read a line of the trainer; None for any other."""
    match = _LINE.search(line)
    try:
        return Loss(step=int(match[1].replace(",", "")), value=float(match[2])) if match else None
    except ValueError:
        return None
