"""Choose the place of the next start, and learn from launches.

``bootstrap.contract.pools`` orders the spot places. On-demand places come after them, or before: where waiting for spot
would miss the deadline, or where spot has refused in all places before. An adaptive gang also leaves its place, and
``bootstrap.contract.pool_policy`` says when it buys on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from bootstrap.contract.pool_policy import Adaptive, Mode, RunView, may_launch, must_buy
from bootstrap.contract.pools import PoolEvent, PoolRecord
from bootstrap.contract.settings import Lifecycle, Place
from bootstrap.contract.spot_values import Delays
from bootstrap.contract.state import UP, ChosenPlace, ControllerState
from bootstrap.contract.timings import ASK_AGAIN, TICK
from bootstrap.controller.ends import over_budget
from bootstrap.controller.meter import hours
from bootstrap.controller.observation import Tick

# No running nodes are given up for a place that refused less long ago: about a gang's boot.
_EMPTY = timedelta(minutes=30)
_NAMED = ", in a zone that EC2 names"


def count_progress(tick: Tick, state: ControllerState) -> ControllerState:
    """Take the steps that a node reports; until one does, the share that complete gangs have served of hours at p95."""
    settings = tick.settings
    told = [
        (report.modified_at, report.done_steps)
        for report in tick.seen.reports.values()
        if report.run_id == settings.run_id and report.done_steps is not None
    ]
    if told and settings.steps:
        _, steps = max(told)
        state = replace(state, done_steps=steps, progress=min(1.0, max(0, steps) / settings.steps))
    if state.done_steps is not None:
        return state
    place = settings.places.get(state.place.name) if state.place else None
    if place is None or state.phase != "running" or state.complete_since is None:
        return state
    share = hours(tick.now - state.updated_at) / place.hours_p95
    return replace(state, progress=min(1.0, state.progress + share))


def learn(tick: Tick, state: ControllerState, event: PoolEvent, place: str = "") -> ControllerState:
    """Record an event for a place, by default the present one."""
    name = place or tick.place_name(state)
    record = event(state.pools.get(name, PoolRecord()), tick.now.timestamp())
    return replace(state, pools={**state.pools, name: record})


def choose_place(tick: Tick, state: ControllerState, *, on_demand: bool = False) -> ChosenPlace | None:
    """Return the place that is most worth a try in this round, or None: waiting is better.

    ``state`` has the records of all launches so far; with ``on_demand`` spot has been waited for long enough.
    """
    settings, own, places = tick.settings, tick.settings.own_place, tick.open_places(state)
    ready = _ready(tick, state, state.round_started_at)
    spot, demand = buying(places, "spot"), buying(ready, "on-demand")
    view = view_run(tick, replace(state, phase="waiting"))
    if settings.adaptive and demand and not may_launch(view):
        return _cheapest(tick, state, demand, _why_now(view))
    # The user chose the plan's place. Another goes before it only on spot, once launches have shown something.
    if own in ready and not (state.pools.keys() & places and own in spot):
        return ChosenPlace(name=own, why="the plan's own place")
    late = sorted((name for name in spot if name in ready), key=lambda name: spot[name].hours_p95)
    # An adaptive gang leaves spot in time.
    spot = {name: place for name, place in spot.items() if settings.adaptive or not _is_late(tick, state, place)}
    in_time = {name: place for name, place in spot.items() if name in ready}
    if late and not in_time and not buying(settings.places, "on-demand"):
        return ChosenPlace(name=late[0], why="no place is sure to meet the deadline, and this one is the fastest")
    if best := _best_spot(tick, state, view, in_time):
        return best
    why = ""
    if settings.places[own].purchase == "on-demand":
        why = "the cheapest place that is open and has not just refused"
    elif in_time:
        why = "on demand, as no spot place is worth its restarts"
    elif not spot:
        why = f"on demand, as spot would miss the deadline at p95: {max(view.left_hours, 0.0):.1f} h are left"
    elif settings.adaptive and view.left_hours < float("inf"):
        if make_policy(state, spot).keep(view) is Mode.ON_DEMAND:
            why = f"on demand, as waiting longer for spot costs more than it can save: {view.left_hours:.1f} h are left"
    elif on_demand or state.attempts > 1:
        why = "on demand, as no spot place gave all nodes in time"
    return _cheapest(tick, state, demand, why) if demand and why else None


def leave_for(tick: Tick, state: ControllerState) -> ChosenPlace | None:
    """Return the place to launch in while an adaptive gang still runs, or None. The ceiling must pay both gangs."""
    if not tick.settings.adaptive:
        return None
    view, places, place = view_run(tick, state), tick.open_places(state), None
    ready = _ready(tick, state, tick.now - _EMPTY)
    ready.pop(tick.place_name(state), None)
    spot, demand = buying(ready, "spot"), buying(ready, "on-demand")
    # On-demand nodes that AWS has refused in this run may not come back.
    records = [state.pools.get(name) for name in buying(places, "on-demand") if view.mode is Mode.ON_DEMAND]
    if view.mode is Mode.SPOT and must_buy(view):
        place = _cheapest(tick, state, demand, _why_now(view)) if demand else None
    elif not any(record and (record.returns or record.empty_at_s) for record in records):
        place = _best_spot(tick, state, view, spot) if make_policy(state, spot).may_leave(view) else None
    return None if place is None or over_budget(tick, replace(state, beside=place)) else place


def _cheapest(tick: Tick, state: ControllerState, demand: Mapping[str, Place], why: str) -> ChosenPlace:
    """Return the cheapest on-demand place, one that keeps the deadline at p95 before others.

    At equal prices it is one that EC2 names.
    """

    def rank(name: str) -> tuple[bool, float, bool]:
        place = demand[name]
        return _is_late(tick, state, place), place.usd_per_work_hour, not _is_named(tick, state, name)

    return ChosenPlace(name=min(demand, key=rank), why=why)


def _why_now(view: RunView[str]) -> str:
    left = f"{view.left_hours:.1f} h are left, and {view.work_hours:.1f} h of work"
    return f"on demand, as the deadline allows no more risk: {left} and a slow launch must fit"


def _ready(tick: Tick, state: ControllerState, since: datetime | None) -> dict[str, Place]:
    """Return the open places that have not refused since then, and that the ceiling pays."""
    empty_at = {name: record.empty_at_s for name, record in state.pools.items() if record.empty_at_s is not None}
    begin_s = since.timestamp() if since else float("inf")
    return {
        name: place
        for name, place in tick.open_places(state).items()
        if empty_at.get(name, -1.0) < begin_s and _is_payable(tick, state, name)
    }


def _is_named(tick: Tick, state: ControllerState, name: str) -> bool:
    """Return whether EC2, in a refusal that is not yet asked again, names the place's zone as having its type."""
    places, zones = tick.settings.places, {zone for group in tick.groups(name) for zone in group.zones}
    place = places[name]
    return any(
        refused_name in places
        and places[refused_name].purchase == place.purchase
        and tick.now - answer.asked_at < ASK_AGAIN
        and place.instance_type in answer.answer
        # EC2's words: https://github.com/aws/eks-anywhere-build-tooling/pull/772
        and any(zone in answer.answer.partition("or choosing ")[2] for zone in zones)
        for refused_name, answer in state.answers.items()
    )


def _is_payable(tick: Tick, state: ControllerState, name: str) -> bool:
    """Return whether the ceiling pays a start, and of an alternate the rest of the run at p95."""
    ceiling_usd, rest_usd = tick.settings.ceiling_usd, (1 - state.progress) * tick.settings.places[name].usd_p95
    # The user took the plan's own risk.
    if ceiling_usd is not None and name != tick.settings.own_place and state.spent_usd + rest_usd > ceiling_usd:
        return False
    tried = replace(state, phase="waiting", next_place=ChosenPlace(name=name, why=""))
    return over_budget(tick, tried) is None


def _is_late(tick: Tick, state: ControllerState, place: Place) -> bool:
    """Return whether the rest of the run misses the deadline at p95."""
    return (1 - state.progress) * place.hours_p95 > left_hours(tick, state)


def _best_spot(
    tick: Tick, state: ControllerState, view: RunView[str], ready: Mapping[str, Place]
) -> ChosenPlace | None:
    ranked = make_policy(state, ready).worth(view)
    named = [name for name in ready if _is_named(tick, state, name)]
    if ranked:
        best = next((prospect for prospect in ranked if prospect.name in named), ranked[0])
        why = (
            f"the best of {len(ready)} spot places: chance {best.chance:.0%}, stay {best.stay_s / 3600:.1f} h, "
            f"{ready[best.name].usd_per_hour:.2f} USD/h a node{_NAMED if best.name in named else ''}"
        )
        return ChosenPlace(name=best.name, why=why)
    if ready and not buying(tick.settings.places, "on-demand"):
        name = min(named or ready, key=view.prices.__getitem__)
        why = f"the cheapest spot place that has not just refused, of {len(named or ready)}{_NAMED if named else ''}"
        return ChosenPlace(name=name, why=why)
    return None


def view_run(tick: Tick, state: ControllerState) -> RunView[str]:
    """Build the policy's view."""
    settings, now = tick.settings, tick.now
    places = settings.places
    mode = (Mode.ON_DEMAND if state.on_demand else Mode.SPOT) if state.phase in UP else Mode.IDLE
    demand = buying(places, "on-demand")
    # The whole run's hours at p95 in the fastest on-demand place, else in the fastest place.
    whole = min(place.hours_p95 for place in (demand or places).values())
    # Prices are shares of the cheapest on-demand place's, or of the dearest place's.
    usd = {name: place.usd_per_work_hour for name, place in places.items()}
    reference = min((usd[name] for name in demand), default=0.0) or max(usd.values()) or 1.0
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
        elapsed_hours=hours(now - state.run_started_at),
        left_hours=left_hours(tick, state),
        step_hours=hours(TICK),
        work_hours=(1 - state.progress) * whole + unsaved,
        whole_hours=whole,
        prices={name: place_usd / reference for name, place_usd in usd.items()},
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
