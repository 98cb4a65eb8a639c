"""Say what an adaptive gang does while nothing changes, and why: ``decision`` in the state, which ``status`` shows."""

from __future__ import annotations

from bootstrap.contract.pool_policy import Mode
from bootstrap.contract.state import ControllerState, StandingDecision
from bootstrap.controller.observation import Tick
from bootstrap.controller.places import weigh_leaving
from bootstrap.controller.spot_policy import view_run


def explain_standing(tick: Tick, state: ControllerState, before: StandingDecision | None) -> StandingDecision | None:
    """Return the decision of this tick, which may stand since an earlier one; None where nodes come or go."""
    settings = tick.settings
    asks_on = state.phase == "waiting" and state.next_attempt_at is not None
    if not settings.adaptive or settings.deadline_hours is None or not (state.phase == "running" or asks_on):
        return None
    view = view_run(tick, state)
    if asks_on and settings.places[tick.place_name(state)].purchase == "spot":
        what, why = "waits for spot, without paid nodes", "nodes on demand would cost more than waiting can"
    elif asks_on:
        what, why = "waits for nodes on demand", "AWS refuses them"
    else:
        weighed = state.beside or weigh_leaving(tick, state)
        what = f"keeps its nodes {'on demand' if view.mode is Mode.ON_DEMAND else 'on spot'}"
        why = weighed if isinstance(weighed, str) else f"{weighed.name} is asked for nodes first: {weighed.why}"
    # Spot nodes may lose the work since a checkpoint, which ``must_buy`` counts too.
    lost = view.delays.lost_bound_hours if view.mode is Mode.SPOT else 0.0
    spare = view.left_hours - view.work_hours - view.delays.restart_bound_hours - lost
    since = before.since if before and before.what == what else tick.now
    return StandingDecision(what=what, why=why, since=since, spare_hours=round(max(0.0, spare), 2))
