"""A run that is watched: a live page in a terminal, redrawn until Ctrl-C, elsewhere a line an event."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bootstrap.contract.state import UP, ControllerState
from bootstrap.contract.words import counted
from optimizer.commands.output import LEAST_WIDTH, output_width, say
from optimizer.commands.progress import patience
from optimizer.commands.status.forecast import Forecast, current_progress, forecast, notices, utc
from optimizer.commands.status.gpus import gpu_notices, gpu_summary
from optimizer.commands.status.reading import Reading
from optimizer.contract.plan import FleetPlan

if TYPE_CHECKING:
    from rich.console import RenderableType


EVENTS_SHOWN = 8


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
    shown = facts(plan, reading, forecast(plan, reading))
    lines = [f"{part} cannot be read: {reason}" for part, reason in reading.unread.items()]
    if reading.state is None and "state" not in reading.unread:
        lines.append("no word from the controller yet")
    if "controller" in shown:
        lines.append(f"controller {shown['controller']}")
    if reading.state is not None and reading.state.decision is not None:
        lines.append(f"the controller {reading.state.decision.told}")
    if reading.state is not None and _decides_at(reading, reading.state) is not None:
        lines.append(f"next: {shown['next']}")
    if "data" in shown:
        lines.append(f"copying data: {shown['data']}")
    if (progress := current_progress(reading)) is not None:
        rest = [f"{name} {shown[name]}" for name in ("speed", "loss", "spent", "ends") if name in shown]
        lines.append(", ".join([f"step {progress.step:,} of {plan.job.steps:,}", *rest]))
    return lines


def page(plan: FleetPlan, stack: str, reading: Reading, events: list[str], every_s: float) -> RenderableType:
    """Lay out one page: facts of the run, notices, and the last events."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    ahead = forecast(plan, reading)
    for name, value in facts(plan, reading, ahead).items():
        table.add_row(name, Text(value))
    title = f"{stack}: {plan.fleet} in {plan.region}"
    parts: list[RenderableType] = [Panel(table, title=Text(title), title_align="left")]
    told = [*notices(plan, ahead, stack), *gpu_notices(reading, stack)]
    parts += [Text(line, style="yellow") for line in told]
    parts += [Text(f"{part} cannot be read: {reason}", style="red") for part, reason in reading.unread.items()]
    parts.append(Panel(Text("\n".join(events) or "none yet"), title="last events", title_align="left"))
    parts.append(Text(f"read at {utc(reading.at)}, again every {every_s:g} s; Ctrl-C ends the page, not the run"))
    return Group(*parts)


def facts(plan: FleetPlan, reading: Reading, ahead: Forecast | None) -> dict[str, str]:
    """Describe a run: phase, decision, nodes, GPUs, steps, speed, loss, dollars, end."""
    state, group, progress = reading.state, reading.group, current_progress(reading)
    job = plan.job
    shown = {"job": job.model}
    if state is not None:
        after = f", then {state.after}" if state.after else ""
        shown["phase"] = f"{state.phase}{after} since {utc(state.since)}"
        shown["decision"] = state.reason
        if state.decision is not None:
            shown["stays"] = f"{state.decision.told}; {state.decision.spare_hours:.1f} h to spare"
        if decision := _next_decision(reading, state, ahead):
            shown["next"] = decision
        if (until := _decides_at(reading, state)) is not None:
            shown["left"] = f"{max(0.0, (until - reading.at) / timedelta(minutes=1)):.0f} min until then"
        if state.is_silent(reading.at):
            shown["controller"] = (
                f"SILENT for {state.silent_s(reading.at) / 60:.0f} min: nobody meters or ends the nodes"
            )
    if group is not None:
        serving = sum(node.lifecycle_state == "InService" for node in group.nodes)
        shown["nodes"] = f"{serving} of {group.wanted} wanted in service"
        others = Counter(node.lifecycle_state for node in group.nodes if node.lifecycle_state != "InService")
        shown["nodes"] += "".join(f", {count} {name}" for name, count in sorted(others.items()))
        kinds = sorted({f"{node.lifecycle} in {node.zone}" for node in group.nodes if node.lifecycle})
        shown["nodes"] += f" ({', '.join(kinds)})" if kinds else ""
    if copy := reading.slowest_copy():
        shown["data"] = copy
    if summary := gpu_summary(reading):
        shown["GPUs"] = summary
    if progress is not None:
        saved = "no checkpoint yet" if progress.saved_step is None else f"saved up to {progress.saved_step:,}"
        shown["steps"] = f"{_bar(progress.step / job.steps)} {progress.step:,} of {job.steps:,}, {saved}"
        if progress.steps_per_second:
            speed = progress.steps_per_second * job.global_batch * job.seq_len
            unit = "samples/s" if job.seq_len == 1 else "tokens/s"
            shown["speed"] = f"{speed:,.0f} {unit}, planned {plan.tokens_per_second:,.0f}"
        if progress.loss_step is not None:
            loss = "NOT FINITE" if progress.loss is None else f"{progress.loss:.4f}"
            shown["loss"] = f"{loss} at step {progress.loss_step:,}"
    if state is not None:
        ceiling = state.ceiling_usd or job.budget_usd
        spent = f"{state.spent_usd:,.2f} USD, {state.usd_per_hour:,.2f} an hour"
        if ceiling:
            spent = f"{_bar(state.spent_usd / ceiling)} {spent}, ceiling {ceiling:,.2f}"
        shown["spent"] = spent
    if ahead is not None:
        usd = (plan.spot_policy or plan).cost_usd.expected
        cost = "" if ahead.cost_usd is None else f", {ahead.cost_usd:,.2f} USD (planned {usd:,.2f})"
        shown["ends"] = f"{utc(ahead.ends_at)}, in {ahead.hours_left:.1f} h{cost}"
    return shown


def _decides_at(reading: Reading, state: ControllerState) -> datetime | None:
    """When the controller starts nodes again, or gives back those of a gang that is not whole."""
    since = {"starting": state.attempt_started_at, "running": state.incomplete_since}.get(state.phase)
    if state.next_attempt_at is not None or since is None or reading.gang_window is None:
        return state.next_attempt_at
    return since + reading.gang_window


def _next_decision(reading: Reading, state: ControllerState, ahead: Forecast | None) -> str:
    """Say what the controller will decide next, and when; empty where that hangs on what nobody knows."""
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


def _bar(share: float) -> str:
    width = 10 if output_width() < 2 * LEAST_WIDTH else 20
    done = round(width * min(max(share, 0.0), 1.0))
    return f"[{'#' * done}{'.' * (width - done)}] {share:.0%}"
