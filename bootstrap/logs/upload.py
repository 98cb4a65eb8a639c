"""Batches of lines for PutLogEvents, and a log stream that takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from bootstrap.logs.journal import Line

GROUP_VARIABLE = "GPUFLEET_LOG_GROUP"
# https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutLogEvents.html
# No line reaches an event's limit, 256 KB or more: the journal splits output at 48 KiB (LineMax=, journald.conf(5)).
BATCH_BYTES = 1_048_576
EVENT_OVERHEAD_BYTES = 26
BATCH_EVENTS = 10_000
BATCH_SPAN_MS = 24 * 3_600_000


def batches(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Split lines into batches that PutLogEvents takes, each in order of time."""
    batch: list[Line] = []
    size = 0
    for line in lines:
        own = len(line.text.encode()) + EVENT_OVERHEAD_BYTES
        far = bool(batch) and abs(line.at_ms - batch[0].at_ms) >= BATCH_SPAN_MS / 2  # a clock may be set back, too
        if batch and (far or size + own > BATCH_BYTES or len(batch) == BATCH_EVENTS):
            yield sorted(batch, key=lambda each: each.at_ms)
            batch, size = [], 0
        batch.append(line)
        size += own
    if batch:
        yield sorted(batch, key=lambda each: each.at_ms)


class LogStream:
    """One stream of the stack's log group, made when it is first written."""

    def __init__(self, client: Any, group: str, stream: str) -> None:
        self._client, self._group, self._stream = client, group, stream

    @classmethod
    def of_node(cls, client: Any, group: str, instance: str) -> Self:
        """Stream of a node's output, which ``gpufleet logs`` reads."""
        return cls(client, group, f"train/{instance}")

    def put(self, batch: Sequence[Line]) -> None:
        """Send one batch. Lines older than two weeks, or than the group keeps, are dropped by CloudWatch."""
        # An event has at least one character.
        events = [{"timestamp": line.at_ms, "message": line.text or " "} for line in batch]
        request = {"logGroupName": self._group, "logStreamName": self._stream, "logEvents": events}
        missing = self._client.exceptions.ResourceNotFoundException
        try:
            self._client.put_log_events(**request)
        except missing:
            self._client.create_log_stream(logGroupName=self._group, logStreamName=self._stream)
            self._client.put_log_events(**request)
