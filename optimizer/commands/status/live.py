"""A run that is watched: a line an event, until Ctrl-C or the run's end."""

from __future__ import annotations

import time
from collections.abc import Callable

from optimizer.commands.output import format_number, say
from optimizer.commands.progress import patience
from optimizer.commands.status.forecast import current_progress, forecast
from optimizer.commands.status.measures import compare, headline
from optimizer.commands.status.reading import Reading
from optimizer.contract.plan import FleetPlan

# The controller ticks once a minute.
POLL_S = 20
# Measures of a line on a step.
_STEP_LINE = ("speed", "loss", "cost so far", "hours left", "cost at the end")


def watch(
    plan: FleetPlan,
    read: Callable[[], Reading],
    every_s: float,
    *,
    ended: Callable[[Reading], bool] = lambda reading: False,
) -> Reading:
    """Print a run's events until a reading has ``ended`` it; return that reading."""
    with patience("reading the stack"):
        reading = read()
    before: Reading | None = None
    while True:
        print_events(plan, before, reading)
        if ended(reading):
            return reading
        time.sleep(every_s)
        before, reading = reading, read()


def print_events(plan: FleetPlan, before: Reading | None, reading: Reading) -> None:
    """Print what changed since the reading before: phase, nodes, failed launches, steps."""
    told = set(_lines(plan, before)) if before else set()
    for line in _lines(plan, reading):
        if line not in told:
            say(f"{reading.at:%H:%M:%SZ} {line}")


def _lines(plan: FleetPlan, reading: Reading) -> list[str]:
    lines = [*headline(plan, reading), *(f"launch failed: {failure.message}" for failure in reading.failures)]
    lines += [f"{part} cannot be read: {reason}" for part, reason in reading.unread.items()]
    if (progress := current_progress(reading)) is not None:
        shown = [f"step {progress.step:,} of {plan.job.steps:,}"]
        shown += [f"saved up to {progress.saved_step:,}"] * (progress.saved_step is not None)
        for row in compare(plan, reading, forecast(plan, reading)):
            if row["measure"] in _STEP_LINE and row["actual"] is not None:
                shown.append(f"{row['measure']} {format_number(row['actual'])} {row['unit']}".strip())
            elif row["measure"] == "loss":
                shown.append(f"loss {row['note']}")  # not finite
        lines.append(", ".join(shown))
    return lines
