"""Read a training's progress and speed from its ledger in the bucket (bootstrap/training/ledger)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Beside the checkpoints; each object has a minute of events.
LEDGER_FOLDER = "ledger/"
SEGMENTS_READ = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """The run at its newest event.

    Attributes:
        step: optimizer steps done and not rolled back.
        saved_step: steps that the newest complete checkpoint holds; None where the events read name none.
        at: time of the event, UTC.
        steps_per_second: since training last (re)started, checkpoints included; None before two marks.
        measured_s: seconds that speed is of.
        finished: whether the training ended well.
    """

    step: int
    saved_step: int | None
    at: datetime
    steps_per_second: float | None
    measured_s: float
    finished: bool


def read_progress(client: S3Client, bucket: str, checkpoint_prefix: str) -> TrainingProgress | None:
    """The newest quarter of an hour of the ledger; None where no training wrote one."""
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=f"{checkpoint_prefix}/{LEDGER_FOLDER}"
    )
    segments = sorted(
        (item for page in pages for item in page.get("Contents", [])), key=lambda item: item["LastModified"]
    )[-SEGMENTS_READ:]
    lines = [
        line
        for segment in segments
        for line in client.get_object(Bucket=bucket, Key=segment["Key"])["Body"]
        .read()
        .decode(errors="replace")
        .splitlines()
    ]
    return progress_of(lines)


def progress_of(lines: Iterable[str]) -> TrainingProgress | None:
    """What ledger lines say, in any order; a line that is no event is passed over, as the ledger's own reader does."""
    events = sorted(filter(None, map(_event, lines)), key=lambda event: float(event["t"]))
    step: int | None = None
    saved: int | None = None
    finished = False
    mark: tuple[float, int] | None = None
    last: tuple[float, int] | None = None
    for event in events:
        kind, at, at_step = event["event"], float(event["t"]), event.get("step")
        if kind == "commit":
            saved = max(saved or 0, int(event["step"]))
            continue
        if kind == "start":
            mark = last = None
        if at_step is None:
            continue
        finished = kind == "done"
        step = int(at_step)
        if kind == "train" or mark is None:
            mark = (at, step)
        last = (at, step)
    if step is None:
        return None
    speed, measured = None, 0.0
    if mark is not None and last is not None and last[0] > mark[0] and last[1] > mark[1]:
        measured = last[0] - mark[0]
        speed = (last[1] - mark[1]) / measured
    return TrainingProgress(
        step=step,
        saved_step=saved,
        at=datetime.fromtimestamp(float(events[-1]["t"]), UTC),
        steps_per_second=speed,
        measured_s=measured,
        finished=finished,
    )


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
        float(event["t"]), str(event["event"])
        if event["event"] == "commit" or event.get("step") is not None:
            int(event["step"])
    except (ValueError, KeyError, TypeError):
        return None
    assert isinstance(event, dict)
    return event
