"""Read the stack's log group: the training's output, copies of the data, and what the GPUs do."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from statistics import fmean
from typing import Any, Literal

from bootstrap.contract.gpus import FIELDS, slowed_by
from bootstrap.contract.gpus import STREAMS as GPU_STREAMS
from bootstrap.contract.staging import copied_gib
from optimizer.aws import errors
from optimizer.aws.paging import pages

# The nodes' CloudWatch agent (bootstrap/cloudwatch-agent.json) writes a stream a node below this.
STREAMS = "train/"
# Each node sends every five seconds, and waits longer after a failed call: a line may come minutes after newer ones of
# other nodes. No call asks by the time of arrival (https://github.com/aws/aws-cli/issues/6788), so the last minutes are
# read again each time, and ids tell which events are new.
LATE = timedelta(minutes=5)
# A copy that has no line of progress for so long is over, or hangs.
COPY_WINDOW = timedelta(minutes=2)
# An older line says nothing of the present; nodes send four a minute and GPU.
GPU_WINDOW = timedelta(minutes=5)
MINUTE_MS = 60_000
MIB_PER_GIB = 1024


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
    _newest_ms: int = field(default=0, init=False)
    # Time in ms by event id, of the last minutes alone: the first read may be of a month.
    _seen: OrderedDict[str, int] = field(default_factory=OrderedDict, init=False)

    def read(self) -> Iterator[LogLine]:
        """Return events since the last call, oldest first; without a log group boto3's error is raised."""
        late_ms = LATE // timedelta(milliseconds=1)
        start_ms = max(int(self.since.timestamp() * 1000), self._newest_ms - late_ms)
        # Prefix that bootstrap/training/rank_lines.py writes; the pattern finds it anywhere in a line:
        # https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/FilterAndPatternSyntax.html
        start = "" if self.rank is None else f"[rank {self.rank}] "
        chosen = {"filterPattern": f'"{start.strip()}"'} if start else {}
        for event in _filter(self.client, self.group, f"{STREAMS}{self.node}", start_ms, **chosen):
            if event["eventId"] in self._seen or not event["message"].startswith(start):
                continue
            self._seen[event["eventId"]] = event["timestamp"]
            self._newest_ms = max(self._newest_ms, event["timestamp"])
            while self._newest_ms - next(iter(self._seen.values())) > late_ms:
                self._seen.popitem(last=False)
            node = event["logStreamName"].removeprefix(STREAMS)
            yield LogLine(node=node, at_ms=event["timestamp"], text=event["message"])


def _filter(client: Any, group: str, streams: str, start_ms: int, **more: str) -> Iterator[Any]:
    """Yield the events of streams since a time, in order of time.

    https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html
    """
    asked = {"logGroupName": group, "logStreamNamePrefix": streams, "startTime": start_ms, **more}
    yield from pages(client, "filter_log_events", "events", **asked)


def read_copies(client: Any, group: str, now: datetime) -> Mapping[str, str]:
    """Read the newest line of progress of each node that copies the data, by instance id."""
    events = _read_events(client, group, STREAMS, now - COPY_WINDOW, filterPattern='"files copied"')
    return {
        event["logStreamName"].removeprefix(STREAMS): event["message"]
        for event in sorted(events, key=lambda event: int(event["timestamp"]))
        if copied_gib(event["message"]) is not None
    }


def _read_events(client: Any, group: str, streams: str, since: datetime, **more: str) -> list[Any]:
    """Read the events of streams since a time; none before the log group is there."""
    try:
        return list(_filter(client, group, streams, int(since.timestamp() * 1000), **more))
    except errors.AWS_ERRORS as error:
        if not errors.is_not_found(error):
            raise
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMinute:
    """One GPU; None for a value that it does not report."""

    busy_percent: float | None = None  # mean share of time in which a kernel ran
    memory_used_gib: float | None = None  # highest
    power_w: float | None = None  # mean
    temperature_celsius: float | None = None  # highest
    sm_clock_mhz: float | None = None  # mean
    throttled: dict[str, float] = field(default_factory=dict)  # share of the samples, by a word of THROTTLING
    ecc_uncorrected: int | None = None  # errors since the driver was loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMinute:
    """A node's GPUs by index, and its errors."""

    schema_version: Literal[1] = 1
    at: datetime  # newest sample
    gpus: dict[str, GpuMinute]
    xids: dict[str, int] = field(default_factory=dict)  # the kernel's messages by Xid number, since boot


Line = tuple[int, list[str]]  # time in ms, fields


def read_gpus(client: Any, log_group: str, now: datetime) -> Mapping[str, tuple[NodeMinute, ...]]:
    """Return the last five minutes of each node, the newest last; empty before any node ran."""
    lines: dict[str, list[Line]] = {}
    for event in _read_events(client, log_group, GPU_STREAMS, now - GPU_WINDOW):
        node = event["logStreamName"].removeprefix(GPU_STREAMS)
        fields = [text.strip() for text in event["message"].split(",")]
        lines.setdefault(node, []).append((event["timestamp"], fields))
    return {node: minutes for node, own in lines.items() if (minutes := fold_minutes(own))}


def fold_minutes(lines: Sequence[Line]) -> tuple[NodeMinute, ...]:
    """Fold a node's lines into minutes that end with the newest line, the newest minute last."""
    newest_ms = max(at_ms for at_ms, _ in lines)
    by_minute: dict[int, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line[0]):
        by_minute.setdefault((newest_ms - line[0]) // MINUTE_MS, []).append(line)
    return tuple(_fold(by_minute[ago]) for ago in sorted(by_minute, reverse=True))


def _fold(lines: Sequence[Line]) -> NodeMinute:
    gpus: dict[str, list[dict[str, str]]] = {}
    xids: dict[str, int] = {}
    for _, (kind, *values) in lines:
        if kind == "gpu" and len(values) == len(FIELDS) and values[0].isdecimal():
            gpus.setdefault(values[0], []).append(dict(zip(FIELDS, values, strict=True)))
        elif kind == "xid":
            with suppress(ValueError):  # whoever may write the group's streams may write anything
                number, count = values
                xids[number] = int(count)
    return NodeMinute(
        at=datetime.fromtimestamp(lines[-1][0] / 1000, UTC),
        gpus={
            index: gpu
            for index in sorted(gpus, key=int)
            if (gpu := _fold_gpu(gpus[index])).busy_percent is not None or gpu.memory_used_gib is not None
        },
        xids=xids,
    )


def _fold_gpu(samples: Sequence[dict[str, str]]) -> GpuMinute:
    def values(name: str, per: float = 1.0) -> list[float]:
        found = []
        for sample in samples:
            with suppress(ValueError):  # "[N/A]", "[GPU is lost]" and the like
                found.append(float(sample[name]) / per)
        return found

    def mean(name: str) -> float | None:
        return round(fmean(numbers), 1) if (numbers := values(name)) else None

    def highest(name: str, per: float = 1.0) -> float | None:
        return round(max(numbers), 1) if (numbers := values(name, per)) else None

    uncorrected, reasons = values("ecc.errors.uncorrected.volatile.total"), Counter[str]()
    for sample in samples:
        with suppress(ValueError):
            reasons.update(slowed_by(int(sample["clocks_event_reasons.active"], 16)))
    return GpuMinute(
        busy_percent=mean("utilization.gpu"),
        memory_used_gib=highest("memory.used", MIB_PER_GIB),
        power_w=mean("power.draw"),
        temperature_celsius=highest("temperature.gpu"),
        sm_clock_mhz=mean("clocks.sm"),
        throttled={reason: round(times / len(samples), 2) for reason, times in reasons.items()},
        ecc_uncorrected=int(uncorrected[-1]) if uncorrected else None,
    )
