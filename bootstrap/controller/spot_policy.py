"""A run as ``bootstrap.contract.pool_policy`` sees it: the view and the policy of one tick."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bootstrap.contract.pool_policy import Adaptive, Delays, Mode, RunView
from bootstrap.contract.pools import PoolRecord
from bootstrap.contract.settings import Lifecycle, Place
from bootstrap.contract.state import UP, ControllerState
from bootstrap.contract.timings import TICK
from bootstrap.controller.meter import hours
from bootstrap.controller.observation import Tick


def view_run(tick: Tick, state: ControllerState) -> RunView[str]:
    """Build the policy's view."""
    settings, now = tick.settings, tick.now
    places = settings.places
    elapsed = hours(now - state.run_started_at)
    mode = Mode.IDLE
    if state.phase in UP:
        mode = Mode.ON_DEMAND if state.on_demand else Mode.SPOT
    # The whole run's hours at p95 in the fastest on-demand place, else in the fastest place.
    whole = min(place.hours_p95 for place in (buying(places, "on-demand") or places).values())
    delays = Delays.of_run(
        drain_s=settings.drain_s,
        gang_window_s=settings.gang_window_s,
        lost_bound_hours=settings.checkpoint_interval_s / 3600,
    )
    # The policy itself counts what spot nodes may lose. Work of nodes that are gone may be lost without a report.
    saved = mode is Mode.SPOT or state.complete_since or not settings.adaptive
    unsaved = 0.0 if saved else min(delays.lost_bound_hours, state.progress * whole)
    return RunView(
        delays=delays,
        now_s=now.timestamp(),
        elapsed_hours=elapsed,
        left_hours=left_hours(tick, state),
        step_hours=hours(TICK),
        work_hours=(1 - state.progress) * whole + unsaved,
        whole_hours=whole,
        prices=_work_prices(places),
        mode=mode,
        pool=state.place.name if state.place and state.place.name in places else settings.own_place,
        # Until all nodes are in service nothing is worked.
        loading_hours=0.0 if state.complete_since else hours(TICK),
    )


def make_policy(state: ControllerState, names: Iterable[str]) -> Adaptive[str]:
    """Return the policy over these spot places, with what the run has learned from its launches."""
    return Adaptive({name: state.pools.get(name, PoolRecord()) for name in names})


def left_hours(tick: Tick, state: ControllerState) -> float:
    """Return the time to the deadline, which may be over; without one, infinity."""
    deadline = tick.settings.deadline_hours
    return float("inf") if deadline is None else deadline - hours(tick.now - state.run_started_at)


def buying(places: Mapping[str, Place], purchase: Lifecycle) -> dict[str, Place]:
    """Return the places whose nodes are bought so."""
    return {name: place for name, place in places.items() if place.purchase == purchase}


def _work_prices(places: Mapping[str, Place]) -> dict[str, float]:
    """Return each place's price as a share of the cheapest on-demand place's, or of the dearest place's."""
    usd = {name: place.usd_per_work_hour for name, place in places.items()}
    reference = min((usd[name] for name in buying(places, "on-demand")), default=0.0) or max(usd.values()) or 1.0
    return {name: place_usd / reference for name, place_usd in usd.items()}
