"""Read the training's output from the stack's log group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from bootstrap.contract.staging import copied_gib

# The nodes' CloudWatch agent (bootstrap/cloudwatch-agent.json) writes a stream a node below this.
STREAMS = "train/"
# Nodes send every five seconds, each for itself: a line may come after newer ones of other nodes.
LATE = timedelta(minutes=1)
# A node that could not reach CloudWatch sends its lines later: every twelfth reading (each minute with `logs -f`) goes
# back as far as this.
VERY_LATE = timedelta(minutes=15)
READINGS = 12
# A copy that has no line of progress for so long is over, or hangs.
COPY_WINDOW = timedelta(minutes=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a node."""

    node: str  # instance id
    at_ms: int
    text: str


@dataclass(kw_only=True)
class LogReader:
    """Reads a log group on and on, each line once.

    FilterLogEvents, not Live Tail, which is billed by the minute, drops lines above 500 a second and ends after three
    hours: https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_StartLiveTail.html
    """

    client: Any
    group: str
    node: str  # instance id; empty for all
    since: datetime
    rank: int | None = None  # of a GPU; None: all lines
    _seen: dict[str, int] = field(default_factory=dict, init=False)  # time in ms by event id
    _readings: int = field(default=0, init=False)

    def read(self) -> Iterator[LogLine]:
        """Read what came since the last time, in order of time.

        https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html
        """
        start_ms = known_ms = int(self.since.timestamp() * 1000)
        if self._seen:
            newest_ms = max(self._seen.values())
            known_ms = max(start_ms, newest_ms - VERY_LATE // timedelta(milliseconds=1))
            late = LATE if self._readings % READINGS else VERY_LATE
            start_ms = max(start_ms, newest_ms - late // timedelta(milliseconds=1))
        self._readings += 1
        # Prefix that bootstrap/training/rank_lines.py writes; the pattern finds it anywhere in a line:
        # https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/FilterAndPatternSyntax.html
        start = "" if self.rank is None else f"[rank {self.rank}] "
        pages = self.client.get_paginator("filter_log_events").paginate(
            logGroupName=self.group,
            logStreamNamePrefix=f"{STREAMS}{self.node}",
            startTime=start_ms,
            **({"filterPattern": f'"{start.strip()}"'} if start else {}),
        )
        self._seen = {event: at for event, at in self._seen.items() if at >= known_ms}
        for page in pages:
            for event in page["events"]:
                if event["eventId"] in self._seen or not event["message"].startswith(start):
                    continue
                self._seen[event["eventId"]] = event["timestamp"]
                node = event["logStreamName"].removeprefix(STREAMS)
                yield LogLine(node=node, at_ms=event["timestamp"], text=event["message"])


def read_copies(client: Any, group: str, now: datetime) -> Mapping[str, str]:
    """Read the newest line of progress of each node that copies the data, by instance id.

    https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html
    """
    pages = client.get_paginator("filter_log_events").paginate(
        logGroupName=group,
        logStreamNamePrefix=STREAMS,
        startTime=int((now - COPY_WINDOW).timestamp() * 1000),
        filterPattern='"files copied"',
    )
    try:
        events = [event for page in pages for event in page["events"] if copied_gib(event["message"]) is not None]
    except client.exceptions.ResourceNotFoundException:
        return {}
    events.sort(key=lambda event: event["timestamp"])
    return {event["logStreamName"].removeprefix(STREAMS): event["message"] for event in events}
