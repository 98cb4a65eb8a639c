"""End and cost of a run at its present speed, against deadline, ceiling and the plan's p95."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from bootstrap.contract.pool_policy import Mode
from bootstrap.contract.state import UP
from bootstrap.contract.words import counted
from optimizer.aws.training import TrainingProgress
from optimizer.commands.status.reading import Reading
from optimizer.contract.plan import FleetPlan
from optimizer.economics.policy_outlook import forecast_rest


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a run that trains; money is USD."""

    step_time_s: float  # present
    step_time_p95_s: float  # of the plan
    speed_source: str
    hours_left: float
    ends_at: datetime
    planned_end: datetime | None  # run's beginning and the expected hours of its spot policy
    deadline_at: datetime | None
    cost_usd: float | None  # whole run; None without the controller's meter
    ceiling_usd: float | None
    ceiling_at: datetime | None  # the controller ends the nodes before the run's end

    @property
    def slow(self) -> bool:
        """Tell if the run is slower than the plan's 95th percentile."""
        return self.step_time_s > self.step_time_p95_s

    @property
    def late(self) -> bool:
        """Tell if the run ends after its deadline."""
        return self.deadline_at is not None and self.ends_at > self.deadline_at


def current_progress(reading: Reading) -> TrainingProgress | None:
    """Return the training's progress, unless an earlier run made it."""
    progress, state = reading.progress, reading.state
    return None if progress and state and progress.at < state.run_started_at else progress


def forecast(plan: FleetPlan, reading: Reading) -> Forecast | None:
    """Extrapolate the ledger's speed, else the trainer's first steps; None without either or after the end.

    An adaptive gang of the plan (``follow_policy``) is simulated on from now, since its nodes change their price.
    """
    progress, row, state, job = current_progress(reading), reading.measured, reading.state, plan.job
    if progress is None or progress.finished or (state is not None and state.phase not in UP):
        return None
    left = max(0, job.steps - progress.step)
    if progress.steps_per_second:
        step_time_s, source = 1 / progress.steps_per_second, f"ledger, {progress.measured_s / 60:.0f} min"
    elif row is not None:
        step_time_s, source = row.measured.step_time_s, f"{counted(row.measured.steps, 'step')} at {utc(row.at)}"
    else:
        return None
    started = state.run_started_at if state else None
    deadline_at = started + timedelta(hours=job.deadline_hours) if started and job.deadline_hours else None
    left_hours = (deadline_at - reading.at) / timedelta(hours=1) if deadline_at else None
    mode = Mode.IDLE
    if state and state.complete_since:
        mode = Mode.ON_DEMAND if state.on_demand else Mode.SPOT
    # With the plan's share of checkpoints, interruptions and restarts.
    hours_left, usd_left = forecast_rest(
        plan, left / job.steps, left_hours=left_hours, slower=step_time_s / plan.step_time_s, mode=mode
    )
    hours, usd_per_hour = hours_left.expected, state.usd_per_hour if state else 0.0
    if plan.spot_policy and hours:
        usd_per_hour = usd_left.expected / hours
    elif progress.steps_per_second:
        hours = left * step_time_s / 3600
    ends_at = reading.at + timedelta(hours=hours)
    ceiling = (state.ceiling_usd if state else None) or job.budget_usd
    cost = state.spent_usd + usd_per_hour * hours if state else None
    ceiling_at = None
    if state and cost is not None and ceiling is not None and cost > ceiling and usd_per_hour > 0:
        ceiling_at = reading.at + timedelta(hours=max(0.0, ceiling - state.spent_usd) / usd_per_hour)
    return Forecast(
        step_time_s=step_time_s,
        step_time_p95_s=plan.step_time_p95_s,
        speed_source=source,
        hours_left=hours,
        ends_at=ends_at,
        planned_end=started and started + timedelta(hours=(plan.spot_policy or plan).hours.expected),
        deadline_at=deadline_at,
        cost_usd=cost,
        ceiling_usd=ceiling,
        ceiling_at=ceiling_at,
    )


def notices(plan: FleetPlan, ahead: Forecast | None, stack: str) -> list[str]:
    """Say what a run that is slow, late or too dear will cost and when it ends; nothing where all is well."""
    if ahead is None or not (ahead.slow or ahead.late or ahead.ceiling_at):
        return []
    lines = []
    if ahead.slow:
        lines.append(
            f"SLOW: a step takes {ahead.step_time_s:.3g} s ({ahead.speed_source}), and the plan's p95 is "
            f"{ahead.step_time_p95_s:.3g} s ({plan.step_time_s:.3g} s expected)"
        )
    end = f"at this speed training ends at {utc(ahead.ends_at)}"
    if ahead.planned_end is not None:
        end += f", planned for {utc(ahead.planned_end)}"
    if ahead.deadline_at is not None:
        hours = (ahead.deadline_at - ahead.ends_at) / timedelta(hours=1)
        end += f", {abs(hours):.1f} h {'AFTER' if ahead.late else 'before'} its deadline"
    lines.append(end)
    if ahead.cost_usd is not None:
        cost = (
            f"it will cost {ahead.cost_usd:,.2f} USD, planned for {(plan.spot_policy or plan).cost_usd.expected:,.2f}"
        )
        if ahead.ceiling_at is not None:
            cost += (
                f", ABOVE its ceiling of {ahead.ceiling_usd:,.2f}: the controller saves a checkpoint and ends the "
                f"nodes at about {utc(ahead.ceiling_at)}"
            )
        lines.append(cost)
    lines.append(
        f"next: gpufleet calibrate --from-stack --stack {stack} --out FILE, then recommend --calibration FILE plans "
        f"with the measured speed; gpufleet stop --stack {stack} saves and ends the nodes"
    )
    return lines


def utc(moment: datetime | None) -> str:
    """Format a time in UTC."""
    return "-" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
