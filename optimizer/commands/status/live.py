"""A run that is watched: a line an event, until Ctrl-C or the run's end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from bootstrap.contract.state import ENDED, UP, ControllerState, Phase
from bootstrap.contract.words import counted
from infra.naming import Names
from optimizer.commands.output import format_number, say
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import StackFile, follow_policy
from optimizer.commands.status.forecast import Forecast, current_progress, forecast, utc
from optimizer.commands.status.measures import compare
from optimizer.commands.status.reading import Reading, read_file
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
        lambda: read_file(file, names),
        POLL_S,
        ended=ended,
    )
    assert last.state is not None  # ended
    return last.state.phase
