"""Follow a run, a line an event, until it has ended."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from bootstrap.contract.state import ENDED
from optimizer.commands.stack.file import StackFile
from optimizer.commands.status import headline
from optimizer.commands.status.forecast import current_progress
from optimizer.commands.status.reading import Reading, read

if TYPE_CHECKING:
    from bootstrap.contract.state import Phase
    from infra.naming import Names

# The controller ticks once a minute.
POLL_S = 20


def follow(file: StackFile, names: Names, *, since: datetime) -> Phase:
    """Print what changes in a run until a tick after ``since`` finds it ended; return its phase."""
    before: set[str] = set()
    while True:
        reading = read(names, datetime.now(UTC))
        lines = [*headline(file.plan, reading), *_progress(file, reading)]
        for line in lines:
            if line not in before:
                click.echo(f"{reading.at:%H:%M:%SZ} {line}")
        before = set(lines)
        state = reading.state
        if state is not None and state.phase in ENDED and state.updated_at > since:
            return state.phase
        time.sleep(POLL_S)


def _progress(file: StackFile, reading: Reading) -> list[str]:
    progress, state = current_progress(reading), reading.state
    if progress is None:
        return []
    spent = f", {state.spent_usd:,.2f} USD" if state else ""
    return [f"step {progress.step:,} of {file.plan.job.steps:,}{spent}"]
