"""Read what the nodes' GPUs do now from the stack's log group (bootstrap/contract/gpus.py)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from bootstrap.contract.codec import FormatError
from bootstrap.contract.gpus import STREAMS, NodeMinute, read_minute

# An older line says nothing of the present; nodes send one a minute.
WINDOW = timedelta(minutes=5)


def read_gpus(client: Any, log_group: str, now: datetime) -> Mapping[str, tuple[NodeMinute, ...]]:
    """Return the last five minutes of each node, the newest last; empty before any node ran.

    https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html
    """
    pages = client.get_paginator("filter_log_events").paginate(
        logGroupName=log_group, logStreamNamePrefix=STREAMS, startTime=int((now - WINDOW).timestamp() * 1000)
    )
    found: dict[str, list[NodeMinute]] = {}
    try:
        for event in (event for page in pages for event in page["events"]):
            stream = event["logStreamName"]
            try:
                minute = read_minute(event["message"], stream)
            except FormatError:
                continue  # whoever may write the group's streams may write anything
            found.setdefault(stream.removeprefix(STREAMS), []).append(minute)
    except client.exceptions.ResourceNotFoundException:
        return {}
    return {node: tuple(sorted(minutes, key=lambda minute: minute.at)) for node, minutes in found.items()}
