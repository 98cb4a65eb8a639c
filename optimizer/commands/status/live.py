"""A run that is watched: a live page in a terminal, redrawn until Ctrl-C, elsewhere a line an event."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bootstrap.contract.state import ENDED, UP, ControllerState, Phase
from bootstrap.contract.words import counted
from infra.naming import Names
from optimizer.commands.output import format_number, output_width, say
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import StackFile, follow_policy
from optimizer.commands.status.forecast import Forecast, current_progress, forecast, notices, utc
from optimizer.commands.status.gpus import gpu_notices
from optimizer.commands.status.measures import compare, headline
from optimizer.commands.status.reading import Reading, read_file
from optimizer.contract.plan import FleetPlan

if TYPE_CHECKING:
    from rich.console import RenderableType


EVENTS_SHOWN = 8
# The controller ticks once a minute.
POLL_S = 20
# Measures of a line on a step.
_STEP_LINE = ("speed", "loss", "cost so far", "hours left", "cost at the end")
_BARS = "▁▂▃▄▅▆▇█"


def watch(
    plan: FleetPlan,
    stack: str,
    read: Callable[[], Reading],
    every_s: float,
    *,
    live: bool,
    ended: Callable[[Reading], bool] = lambda reading: False,
) -> Reading:
    """Show a run until a reading has ``ended`` it, or Ctrl-C; return that reading.

    ``live`` redraws a page and leaves the last one standing; otherwise each event is a line.
    """
    with patience("reading the stack"):
        reading = read()
    before: Reading | None = None
    with _live_page(plan, stack, every_s) if live else nullcontext(partial(print_events, plan)) as show:
        while True:
            show(before, reading)
            if ended(reading):
                return reading
            time.sleep(every_s)
            before, reading = reading, read()


@contextmanager
def _live_page(plan: FleetPlan, stack: str, every_s: float) -> Iterator[Callable[[Reading | None, Reading], None]]:
    """Yield a function that redraws the page for a reading and the one before it."""
    events: deque[str] = deque(maxlen=EVENTS_SHOWN)
    with Live(console=Console(width=output_width(), highlight=False), auto_refresh=False) as drawn:

        def show(before: Reading | None, reading: Reading) -> None:
            events.extend(f"{reading.at:%H:%M:%S} {event}" for event in changes(before, reading))
            drawn.update(page(plan, stack, reading, list(events), every_s), refresh=True)

        yield show


def print_events(plan: FleetPlan, before: Reading | None, reading: Reading) -> None:
    """Print a line for each event between two readings, for new steps, and for the next attempt to start nodes."""
    told = set(_standing(plan, before)) if before else set()
    lines = [*changes(before, reading), *_standing(plan, reading)]
    for line in lines:
        if line not in told:
            say(f"{reading.at:%H:%M:%SZ} {line}")


def _standing(plan: FleetPlan, reading: Reading) -> list[str]:
    """Lines that hold until a later reading has others."""
    state = reading.state
    lines = [f"{part} cannot be read: {reason}" for part, reason in reading.unread.items()]
    if state is None and "state" not in reading.unread:
        lines.append("no word from the controller yet")
    if state is not None and state.is_silent(reading.at):
        lines.append(
            f"controller SILENT for {state.silent_s(reading.at) / 60:.0f} min: nobody meters or ends the nodes"
        )
    ahead = forecast(plan, reading)
    if state is not None and _decides_at(reading, state) is not None:
        lines.append(f"next: {next_decision(reading, ahead)}")
    if copy := reading.slowest_copy():
        lines.append(f"copying data: {copy}")
    if (progress := current_progress(reading)) is not None:
        rows = [row for row in compare(plan, reading, ahead) if row["measure"] in _STEP_LINE and _is_known(row)]
        shown = [
            f"{row['measure']} {row['note']}"
            if row["actual"] is None
            else f"{row['measure']} {format_number(row['actual'])} {row['unit']}".strip()
            for row in rows
        ]
        lines.append(", ".join([f"step {progress.step:,} of {plan.job.steps:,}", *shown]))
    return lines


def _is_known(row: dict[str, Any]) -> bool:
    """Return whether a measure has a value, or is a loss that is not finite, as its note says."""
    return row["actual"] is not None or row["measure"] == "loss"


def page(plan: FleetPlan, stack: str, reading: Reading, events: list[str], every_s: float) -> RenderableType:
    """Lay out one page: what the stack does, its measures, notices, and the last events."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    ahead, progress = forecast(plan, reading), current_progress(reading)
    lines: dict[str, tuple[float, ...]] = {}
    if progress is not None:
        per_step = plan.job.global_batch * plan.job.seq_len
        speeds = tuple(per_step * speed for speed in progress.recent_steps_per_second)
        lines = {"speed": speeds, "loss": progress.recent_losses}
    for row in compare(plan, reading, ahead):
        if _is_known(row):
            planned = "" if row["predicted"] is None else f"planned {format_number(row['predicted'])}"
            words = ", ".join(filter(None, (f"{row['unit']} {planned}".strip(), row["note"])))
            actual = "-" if row["actual"] is None else format_number(row["actual"])
            table.add_row(row["measure"], actual, Text(words))
            if len(values := lines.get(row["measure"], ())) > 1:
                table.add_row("", "", Sparkline(values))
    decision = next_decision(reading, ahead)
    said = [*headline(plan, reading), *([f"next: {decision}"] if decision else [])]
    parts: list[RenderableType] = [Panel(Group(*map(Text, said), table), title=Text(stack), title_align="left")]
    told = [*notices(plan, ahead, stack), *gpu_notices(reading, stack)]
    parts += [Text(line, style="yellow") for line in told]
    parts += [Text(f"{part} cannot be read: {reason}", style="red") for part, reason in reading.unread.items()]
    parts.append(Panel(Text("\n".join(events) or "none yet"), title="last events", title_align="left"))
    parts.append(Text(f"read at {utc(reading.at)}, again every {every_s:g} s; Ctrl-C ends the page, not the run"))
    return Group(*parts)


@dataclass
class Sparkline:
    """Bars between the least and the largest value, which alone a terminal that knows ASCII only gets."""

    values: Sequence[float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        values = self.values[-options.max_width :]
        low, high = min(values), max(values)
        bars = "".join(_BARS[int(7 * (value - low) / (high - low or 1))] for value in values)
        yield Text(f"{'' if options.ascii_only else bars} {format_number(low)} to {format_number(high)}".strip())


def _decides_at(reading: Reading, state: ControllerState) -> datetime | None:
    """When the controller starts nodes again, or gives back those of a gang that is not whole."""
    since = {"starting": state.attempt_started_at, "running": state.incomplete_since}.get(state.phase)
    if state.next_attempt_at is not None or since is None or reading.gang_window is None:
        return state.next_attempt_at
    return since + reading.gang_window


def next_decision(reading: Reading, ahead: Forecast | None) -> str:
    """Say what the controller will decide next, and when; empty where that hangs on what nobody knows."""
    state = reading.state
    if state is None:
        return ""
    if state.next_attempt_at is not None:
        place = f" in {state.next_place.name}" if state.next_place else ""
        return f"start{place} at {utc(state.next_attempt_at)}"
    if state.phase in UP and (until := _decides_at(reading, state)) is not None:
        return f"train once all nodes are in service, or give them back at {utc(until)}"
    if state.phase == "draining":
        return f"{state.after}, once the nodes have saved and left"
    if state.phase != "running" or ahead is None:
        return ""
    if ahead.ceiling_at is not None:
        return f"save and end the nodes at about {utc(ahead.ceiling_at)}, at the ceiling"
    return f"end the nodes at about {utc(ahead.ends_at)}, when training is done"


def changes(before: Reading | None, now: Reading) -> list[str]:
    """Name what happened between two readings: phases, nodes, checkpoints, interruptions, failed launches."""
    events = []
    old, state = before.state if before else None, now.state
    if state is not None and (
        old is None or (old.phase, old.since, old.reason) != (state.phase, state.since, state.reason)
    ):
        events.append(f"{state.phase}: {state.reason}")
    if state is not None and old is not None and state.interruptions > old.interruptions:
        count = state.interruptions - old.interruptions
        events.append(f"{counted(count, 'node')} interrupted")
    earlier = {node.instance_id for node in before.group.nodes} if before and before.group else set()
    present = {node.instance_id for node in now.group.nodes} if now.group else set()
    if before is not None and earlier != present:
        events += [f"node {name} joined the group" for name in sorted(present - earlier)]
        events += [f"node {name} left the group" for name in sorted(earlier - present)]
    told = {failure.message for failure in before.failures} if before else set()
    events += [f"launch failed: {failure.message}" for failure in now.failures if failure.message not in told]
    progress, last = current_progress(now), before and current_progress(before)
    if progress and progress.saved_step is not None and progress.saved_step != (last.saved_step if last else None):
        events.append(f"checkpoint of step {progress.saved_step:,} is complete")
    return events


def follow(
    file: StackFile, names: Names, *, since: datetime, leaves: Callable[[ControllerState], bool] = lambda state: False
) -> Phase:
    """Show a run until a tick after ``since`` finds it ended, or it ``leaves`` the stack; return its phase."""

    def ended(reading: Reading) -> bool:
        state = reading.state
        return state is not None and state.updated_at > since and (state.phase in ENDED or leaves(state))

    last = watch(
        follow_policy(file.plan, file.config),
        file.stack,
        lambda: read_file(file, names),
        POLL_S,
        live=sys.stdout.isatty(),
        ended=ended,
    )
    assert last.state is not None  # ended
    return last.state.phase
