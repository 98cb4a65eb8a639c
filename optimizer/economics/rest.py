"""Hours and dollars of what is left of a run, under the spot policy that its stack carries out."""

from __future__ import annotations

from bootstrap.contract.pool_policy import Mode
from optimizer.contract.plan import FleetPlan, Spread


def forecast_rest(
    plan: FleetPlan,
    share: float,
    *,
    left_hours: float | None = None,
    slower: float | None = None,
    mode: Mode = Mode.IDLE,
) -> tuple[Spread, Spread]:
    """Return hours and USD of the rest of a run.

    Adaptive is simulated from now on, as the deadline comes nearer whatever the run has done. Otherwise the rest is a
    share of the whole.

    Args:
        plan: its ``spot_policy`` is what the stack carries out; without one, its own numbers hold.
        share: of the steps.
        left_hours: until the deadline; the whole deadline by default.
        slower: measured step time over the plan's; without it the estimate's error stays.
        mode: nodes that work now.
    """
    planned = plan.spot_policy or plan
    whole = share == 1 and slower is None and mode is Mode.IDLE and left_hours in (None, plan.job.deadline_hours)
    if plan.spot_policy is None or whole or share <= 0:
        factor = max(share, 0.0) * (slower or 1.0)
        return _scale(planned.hours, factor), _scale(planned.cost_usd, factor)
    from optimizer.economics.policy_outlook import price_rest

    return price_rest(plan, share, left_hours, slower, mode)


def _scale(spread: Spread, factor: float) -> Spread:
    return Spread(**{name: factor * getattr(spread, name) for name in Spread.model_fields})
