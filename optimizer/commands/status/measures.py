"""Predicted against actual: a row a measure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from bootstrap.contract.measured import MeasuredRow
from bootstrap.contract.state import ENDED, ControllerState
from bootstrap.contract.words import counted
from optimizer.aws.training import TrainingProgress
from optimizer.commands.status.forecast import Forecast, current_progress, utc
from optimizer.commands.status.reading import Reading
from optimizer.contract.plan import FleetPlan

MEASURES = {"measure": "measure", "unit": "unit", "predicted": "predicted", "actual": "actual", "note": ""}


def compare(plan: FleetPlan, reading: Reading, ahead: Forecast | None) -> list[dict[str, Any]]:
    """Compare predicted and actual; None where a value is unknown."""
    state, job, row, planned = reading.state, plan.job, reading.measured, plan.spot_policy or plan
    progress = current_progress(reading)
    metrics = {name: metric.value for name, metric in reading.metrics.items()}
    speed, speed_note = _speed(plan, progress, row, metrics.get("TokensPerSecond"))
    spent_usd, usd_per_hour, interruptions = (
        (state.spent_usd, state.usd_per_hour, state.interruptions) if state else (None, None, None)
    )
    limits = f"p95 of the plan {planned.cost_usd.p95:,.2f}"
    if state and state.ceiling_usd is not None:
        limits = f"ceiling {state.ceiling_usd:,.2f}, {limits}"
    arrival = ""
    if ahead is not None:
        arrival = f"done at {utc(ahead.ends_at)} at this speed"
        if ahead.deadline_at is not None:
            arrival += f"; deadline {utc(ahead.deadline_at)}"
    step_time_s = row.measured.step_time_s if row else None
    peak_gib = row.measured.peak_allocated_gib if row else None
    steady = f"; median of {counted(row.measured.steps, 'step')} at {utc(row.at)}" if row else ""
    reserved = f", {row.measured.peak_reserved_gib:.1f} with the allocator's cache" if row else ""
    rows: list[tuple[str, str, float | None, float | None, str]] = [
        ("steps", "steps", job.steps, progress.step if progress else None, _saved_note(progress)),
        ("speed", "samples/s" if job.seq_len == 1 else "tokens/s", plan.tokens_per_second, speed, speed_note),
        *_loss(progress),
        ("step time", "s", plan.step_time_s, step_time_s, f"p95 of the plan {plan.step_time_p95_s:.3g}{steady}"),
        ("peak memory", "GiB", plan.memory.peak_gib, peak_gib, f"limit {plan.memory.limit_gib:.1f}{reserved}"),
        ("GPU utilization", "%", None, metrics.get("GpuUtilizationPercent"), "mean of the GPUs"),
        ("GPU memory", "GiB", plan.memory.peak_gib, metrics.get("GpuMemoryUsedGiB"), "fullest GPU"),
        ("cost per hour", "USD/h", planned.cost_usd.expected / planned.hours.expected, usd_per_hour, "now"),
        ("hours", "h", planned.hours.expected, _hours_so_far(state, reading.at), "since the run began"),
        ("hours left", "h", None, ahead.hours_left if ahead else None, arrival),
        ("cost so far", "USD", None, spent_usd, "controller's meter, at the plan's prices"),
        ("cost at the end", "USD", planned.cost_usd.expected, ahead.cost_usd if ahead else None, limits),
        ("interruptions", "", plan.interruption.expected_count, interruptions, ""),
    ]
    return [dict(zip(MEASURES, values, strict=True)) for values in rows]


def _loss(progress: TrainingProgress | None) -> list[tuple[str, str, None, float | None, str]]:
    if progress is None or progress.loss_step is None:
        return []
    finite = "" if progress.loss is not None else "NOT FINITE "
    return [("loss", "", None, progress.loss, f"{finite}at step {progress.loss_step:,}")]


def _speed(
    plan: FleetPlan, progress: TrainingProgress | None, row: MeasuredRow | None, published: float | None
) -> tuple[float | None, str]:
    """Pick the present speed: the ledger's, CloudWatch's, or the trainer's first steps."""
    if progress and progress.steps_per_second:
        speed = progress.steps_per_second * plan.job.global_batch * plan.job.seq_len
        return speed, f"ledger, {progress.measured_s / 60:.0f} min"
    if published:
        return published, "CloudWatch"
    return (
        (row.measured.tokens_per_second, f"{counted(row.measured.steps, 'step')} at {utc(row.at)}")
        if row
        else (None, "")
    )


def _hours_so_far(state: ControllerState | None, now: datetime) -> float | None:
    if state is None:
        return None
    end = state.since if state.phase in ENDED else now
    return max(0.0, (end - state.run_started_at).total_seconds() / 3600)


def _saved_note(progress: TrainingProgress | None) -> str:
    if progress is None:
        return ""
    saved = "no checkpoint seen" if progress.saved_step is None else f"saved up to {progress.saved_step}"
    return f"{saved}, at {utc(progress.at)}"
