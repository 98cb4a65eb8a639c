"""A reading in words: what the stack does, and predicted against actual, a row a measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bootstrap.contract.measured import MeasuredRow
from bootstrap.contract.state import ENDED
from bootstrap.contract.words import counted
from optimizer.aws.training import TrainingProgress
from optimizer.commands.status.forecast import Forecast, current_progress, utc
from optimizer.commands.status.gpus import gpu_use
from optimizer.commands.status.reading import Reading
from optimizer.contract.plan import FleetPlan

BARS = "▁▂▃▄▅▆▇█"
MEASURES = {"measure": "measure", "unit": "unit", "predicted": "predicted", "actual": "actual", "note": ""}


def compare(plan: FleetPlan, reading: Reading, ahead: Forecast | None) -> list[dict[str, Any]]:
    """Compare predicted and actual; None where a value is unknown."""
    state, job, row, planned = reading.state, plan.job, reading.measured, plan.spot_policy or plan
    progress = current_progress(reading)
    speed, speed_note = _speed(plan, progress, row)
    busy_percent, memory_gib, gpu_note = gpu_use(reading)
    spent_usd, usd_per_hour, interruptions = (
        (state.spent_usd, state.usd_per_hour, state.interruptions) if state else (None, None, None)
    )
    limits = f"p95 of the plan {planned.cost_usd.p95:,.2f}"
    if state and state.ceiling_usd is not None:
        limits = f"ceiling {state.ceiling_usd:,.2f}, {limits}"
    if state and state.shared_usd is not None:
        limits += f", shared ceiling {state.shared_usd:,.2f} less {state.others_usd:,.2f} of other stacks"
    arrival = ""
    if ahead is not None:
        arrival = f"done at {utc(ahead.ends_at)} at this speed"
        if ahead.deadline_at is not None:
            arrival += f"; deadline {utc(ahead.deadline_at)}"
    hours = None
    if state is not None:
        end = state.since if state.phase in ENDED else reading.at
        hours = max(0.0, (end - state.run_started_at).total_seconds() / 3600)
    saved = ""
    if progress is not None:
        saved = "no checkpoint seen" if progress.saved_step is None else f"saved up to {progress.saved_step}"
        saved += f", at {utc(progress.at)}"
    step_time_s = row.measured.step_time_s if row else None
    peak_gib = row.measured.peak_allocated_gib if row else None
    steady = f"; median of {counted(row.measured.steps, 'step')} at {utc(row.at)}" if row else ""
    reserved = f", {row.measured.peak_reserved_gib:.1f} with the allocator's cache" if row else ""
    rows: list[tuple[str, str, float | None, float | None, str]] = [
        ("steps", "steps", job.steps, progress.step if progress else None, saved),
        ("speed", "samples/s" if job.seq_len == 1 else "tokens/s", plan.tokens_per_second, speed, speed_note),
        *_loss(progress),
        ("step time", "s", plan.step_time_s, step_time_s, f"p95 of the plan {plan.step_time_p95_s:.3g}{steady}"),
        ("peak memory", "GiB", plan.memory.peak_gib, peak_gib, f"limit {plan.memory.limit_gib:.1f}{reserved}"),
        ("GPU utilization", "%", None, busy_percent, gpu_note),
        ("GPU memory", "GiB", plan.memory.peak_gib, memory_gib, "fullest GPU"),
        ("cost per hour", "USD/h", planned.cost_usd.expected / planned.hours.expected, usd_per_hour, "now"),
        ("hours", "h", planned.hours.expected, hours, "since the run began"),
        ("hours left", "h", None, ahead.hours_left if ahead else None, arrival),
        ("cost so far", "USD", None, spent_usd, "controller's meter, at the plan's prices"),
        ("cost at the end", "USD", planned.cost_usd.expected, ahead.cost_usd if ahead else None, limits),
        ("interruptions", "", plan.interruption.expected_count, interruptions, ""),
    ]
    return [dict(zip(MEASURES, values, strict=True)) for values in rows]


def sparkline(values: Sequence[float]) -> str:
    """Draw bars between the least and the largest value."""
    low, high = min(values), max(values)
    return "".join(BARS[int(7 * (value - low) / (high - low or 1))] for value in values)


def _loss(progress: TrainingProgress | None) -> list[tuple[str, str, None, float | None, str]]:
    if progress is None or progress.loss_step is None:
        return []
    finite = "" if progress.loss is not None else "NOT FINITE "
    return [("loss", "", None, progress.loss, f"{finite}at step {progress.loss_step:,}")]


def _speed(plan: FleetPlan, progress: TrainingProgress | None, row: MeasuredRow | None) -> tuple[float | None, str]:
    """Pick the present speed: the ledger's, or that of the trainer's first steps."""
    if progress and progress.steps_per_second:
        speed = progress.steps_per_second * plan.job.global_batch * plan.job.seq_len
        return speed, f"ledger, {progress.measured_s / 60:.0f} min"
    return (
        (row.measured.tokens_per_second, f"{counted(row.measured.steps, 'step')} at {utc(row.at)}")
        if row
        else (None, "")
    )


def headline(plan: FleetPlan, reading: Reading) -> list[str]:
    """Write the lines above the tables: phase, nodes, and all that keeps the fleet down."""
    state, group = reading.state, reading.group
    lines = [f"{plan.fleet} in {plan.region} for {plan.job.model}"]
    if state is None:
        lines.append("no word from the controller yet" if "state" not in reading.unread else "phase unknown")
    else:
        after = f", then {state.after}" if state.after else ""
        lines.append(f"{state.phase}{after} since {utc(state.since)}: {state.reason}")
        if state.is_silent(reading.at):
            lines.append(
                f"the controller's last tick was {state.silent_s(reading.at) / 60:.0f} minutes ago: nobody meters or "
                "ends the nodes; look at its log group, and `gpufleet stop` ends the nodes without it"
            )
        if state.next_attempt_at is not None:
            lines.append(f"next start at {utc(state.next_attempt_at)}")
        if state.place is not None and state.place.name not in state.reason:
            lines.append(f"place: {state.place.name}, {state.place.why}")
        if state.on_demand:
            lines.append("on-demand nodes stand in for spot nodes that did not come")
        if state.last_failure:
            lines.append(f"last failed launch: {state.last_failure}")
    if group is not None:
        serving = sum(node.lifecycle_state == "InService" for node in group.nodes)
        lines.append(
            f"{serving} of {group.wanted} wanted nodes in service, {counted(len(group.nodes), 'instance')} in the group"
        )
    elif "group" not in reading.unread:
        lines.append("there is no Auto Scaling group: no node runs")
    if reading.detached:
        lines.append(
            "out of the group, and still paid and metered; nothing but you ends it: "
            f"aws ec2 terminate-instances --region {plan.region} --instance-ids {' '.join(reading.detached)}"
        )
    if copy := reading.slowest_copy():
        lines.append(f"copying data: {copy}")
    if reading.request is not None and reading.request.want == "stop":
        lines.append(f"asked to stop at {utc(reading.request.at)} by {reading.request.by}")
    return lines
