"""Files that a training keeps beside its checkpoints: ledger and measured rows (bootstrap/contract)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from bootstrap.contract.codec import FormatError
from bootstrap.contract.ledger import SEGMENT_PREFIX, Straggler, read_lines, read_loss, read_straggler
from bootstrap.contract.measured import FOLDER, MeasuredRow, parse, run_prefix
from optimizer.aws.paging import list_objects, read_object

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

SEGMENTS_READ = 15
# Objects of a ledger to read at once: a day has 1,440 of them, 30 ms each.
DOWNLOADS = 16
# Points of a line in a terminal.
MOST_POINTS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """The training at its newest event."""

    step: int  # optimizer steps done and not rolled back
    saved_step: int | None  # of the newest complete checkpoint
    at: datetime
    steps_per_second: float | None  # since the last start, checkpoints included
    measured_s: float  # time of that speed
    finished: bool  # ended well
    loss: float | None = None  # newest that was reported; None where it was not finite
    loss_step: int | None = None  # None where none was reported
    straggler: Straggler | None = None  # slowest rank of the last minute
    recent_losses: tuple[float, ...] = ()  # finite, the newest last
    recent_steps_per_second: tuple[float, ...] = ()  # between events since the last start


def read_progress(client: S3Client, bucket: str, checkpoint_prefix: str) -> TrainingProgress | None:
    """Read the ledger's newest quarter of an hour, if any."""
    return parse_progress(_read_lines(client, bucket, _segments(client, bucket, checkpoint_prefix)[-SEGMENTS_READ:]))


def read_ledger_lines(client: S3Client, bucket: str, checkpoint_prefix: str) -> list[str]:
    """Read all lines of the ledger; none where no training ever ran."""
    return list(_read_lines(client, bucket, _segments(client, bucket, checkpoint_prefix)))


def _segments(client: S3Client, bucket: str, checkpoint_prefix: str) -> list[str]:
    """Keys of the ledger's objects, the newest last."""
    segments = list_objects(client, bucket, f"{checkpoint_prefix}/{SEGMENT_PREFIX}")
    return [item["Key"] for item in sorted(segments, key=lambda item: item["LastModified"])]


def _read_lines(client: S3Client, bucket: str, keys: Iterable[str]) -> Iterator[str]:
    # A client serves many threads: https://boto3.amazonaws.com/v1/documentation/api/latest/guide/clients.html
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        for body in pool.map(lambda key: read_object(client, bucket, key), keys):
            yield from body.decode(errors="replace").splitlines()


def parse_progress(lines: Iterable[str]) -> TrainingProgress | None:
    """Fold ledger lines in any order, without those that are no event."""
    events = sorted(read_lines(lines)[0], key=lambda event: float(event["t"]))
    saved: int | None = None
    finished = False
    step = None
    loss: tuple[int, float | None] | None = None
    losses: list[float] = []
    straggler: Straggler | None = None
    marks: list[tuple[float, int]] = []  # since the last start
    for event in events:
        if event["event"] == "commit":
            saved = max(saved or 0, int(event["step"]))
            continue
        if event["event"] == "start":
            marks, straggler = [], None
        if event.get("step") is None:
            continue
        finished = event["event"] == "done"
        step = int(event["step"])
        if (reported := read_loss(event)) is not None:
            loss = reported
            losses += [reported[1]] if reported[1] is not None else []
        straggler = read_straggler(event) or straggler
        if event["event"] == "train":
            marks = []
        marks.append((float(event["t"]), step))
    if step is None:
        return None
    speed, measured_s = None, 0.0
    if marks and marks[-1][0] > marks[0][0] and marks[-1][1] > marks[0][1]:
        measured_s = marks[-1][0] - marks[0][0]
        speed = (marks[-1][1] - marks[0][1]) / measured_s
    return TrainingProgress(
        step=step,
        saved_step=saved,
        at=datetime.fromtimestamp(float(events[-1]["t"]), UTC),
        steps_per_second=speed,
        measured_s=measured_s,
        finished=finished,
        loss=loss[1] if loss else None,
        loss_step=loss[0] if loss else None,
        straggler=straggler,
        recent_losses=tuple(losses[-MOST_POINTS:]),
        recent_steps_per_second=tuple(
            (step - before) / (at - since)
            for (since, before), (at, step) in pairwise(marks[-MOST_POINTS - 1 :])
            if at > since
        ),
    )


def read_measured(
    client: S3Client, bucket: str, checkpoint_prefix: str, *, run_id: str | None = None
) -> tuple[list[MeasuredRow], dict[str, str]]:
    """Return the rows of a stack (or of one run), oldest first, and by key the reason why an object is no row."""
    prefix = f"{checkpoint_prefix}/{FOLDER if run_id is None else run_prefix(run_id)}"
    rows, unread = list[MeasuredRow](), dict[str, str]()
    for key in [item["Key"] for item in list_objects(client, bucket, prefix)]:
        try:
            body = read_object(client, bucket, key).decode(errors="replace")
            rows.append(parse(body, f"s3://{bucket}/{key}"))
        except FormatError as error:
            unread[key] = str(error)
    return sorted(rows, key=lambda row: row.at), unread
