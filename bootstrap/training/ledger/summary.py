"""Summary of a ledger in a file or on S3, and as text."""

from __future__ import annotations

from pathlib import Path

from bootstrap.contract.ledger import (
    CATEGORIES,
    LEDGER_FILE,
    SEGMENT_PREFIX,
    LedgerError,
    Summary,
    read_lines,
    summarize,
)
from bootstrap.contract.words import counted
from bootstrap.training.errors import TrainingError
from bootstrap.training.ledger import PRICE_VARIABLE
from bootstrap.training.stores import open_store


def read_ledger(address: str) -> Summary:
    """Summary of the ledger in a file, checkpoint directory or S3 prefix; TrainingError without one."""
    if address.startswith("s3://"):
        store = open_store(address)
        names = store.names(SEGMENT_PREFIX)
        lines = [line for name in names for line in store.read(name).decode(errors="replace").splitlines()]
    else:
        path = Path(address) / LEDGER_FILE if Path(address).is_dir() else Path(address)
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise TrainingError(f"cannot read the ledger: {error}") from error
    events, skipped = read_lines(lines)
    try:
        return summarize(events, skipped_lines=skipped)
    except LedgerError as error:
        raise TrainingError(str(error)) from error


def table(summary: Summary) -> str:
    """Summary as text for a terminal."""
    usd = summary.usd or {}
    wall_s = summary.wall_seconds or 1.0
    rows: list[tuple[str, float, float | None]] = [
        *((category, summary.seconds[category], usd.get(category)) for category in CATEGORIES),
        ("wall", summary.wall_seconds, sum(usd.values()) if usd else None),
    ]
    lines = [f"{'':<12}{'seconds':>12}{'share':>9}" + (f"{'USD':>12}" if usd else "")]
    for name, seconds, dollars in rows:
        share = 1 if name == "wall" else seconds / wall_s
        lines.append(f"{name:<12}{seconds:>12.2f}{share:>9.1%}" + ("" if dollars is None else f"{dollars:>12.4f}"))
    state = "finished" if summary.finished else f"not finished, {summary.unsaved_seconds:.1f} s of it not yet saved"
    lines.append(
        f"{counted(summary.steps, 'step')} kept, {summary.lost_steps:,} recomputed, "
        f"{counted(summary.starts, 'start')}, {state}"
    )
    if summary.skipped_lines:
        lines.append(
            f"{counted(summary.skipped_lines, 'unreadable line')} skipped (a process was killed while writing)"
        )
    if not usd:
        lines.append(f"no dollars: set {PRICE_VARIABLE} on the node to the fleet's price")
    return "\n".join(lines)
