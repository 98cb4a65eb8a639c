"""Choose the place of the next start, and learn from launches.

``bootstrap.contract.pools`` orders the spot places. On-demand places come after them, or before: where waiting for spot
would miss the deadline, or where spot has refused in all places before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bootstrap.contract.pools import PoolRecord, expected_spot_s, rank_pools
from bootstrap.contract.settings import Place
from bootstrap.contract.state import ChosenPlace, ControllerState
from bootstrap.controller.ends import BOOT, over_budget
from bootstrap.controller.meter import hours
from bootstrap.controller.observation import Tick

# From a launch to a refusal that gives the place up: a tick sees the refusal, and the next starts elsewhere.
_TRY_S = 120.0
# Costs that differ by less are equal: a refusal's two minutes are more of any run below three hours.
_EQUAL_COST = 1.01


def count_progress(tick: Tick, state: ControllerState) -> ControllerState:
    """Add the time since the last tick, where all nodes were in service, as a share of the place's hours at p95.

    It is an estimate: the controller does not read the training's own progress.
    """
    place = tick.settings.places.get(state.place.name) if state.place else None
    if place is None or state.phase != "running" or state.complete_since is None:
        return state
    share = hours(tick.now - state.updated_at) / place.hours_p95
    return replace(state, progress=min(1.0, state.progress + share))


def learn(tick: Tick, state: ControllerState, event: Callable[[PoolRecord, float], PoolRecord]) -> ControllerState:
    """Record an event of ``bootstrap.contract.pools`` for the present place."""
    if state.place is None or state.place.name not in tick.settings.places:
        return state
    name = state.place.name
    record = event(state.pools.get(name, PoolRecord()), tick.now.timestamp())
    # Places of an earlier plan are forgotten.
    kept = {key: known for key, known in state.pools.items() if key in tick.settings.places}
    return replace(state, pools={**kept, name: record})


def choose_place(tick: Tick, state: ControllerState, *, on_demand: bool = False) -> ChosenPlace | None:
    """Return the place that is most worth a try in this round, or None: waiting is better.

    ``state`` has the records of all launches so far; with ``on_demand`` spot has been waited for long enough.
    """
    places = tick.settings.places
    ready = {
        name: place
        for name, place in places.items()
        if not _has_just_refused(state, name) and _is_payable(tick, state, name)
    }
    own = tick.settings.own_place
    spot = {name: place for name, place in places.items() if place.purchase == "spot"}
    in_time = {name: place for name, place in spot.items() if not _is_late(tick, state, place)}
    # The user took the plan; only a spot place has rivals once launches have told something.
    if own in ready and not (state.pools and own in spot):
        equal = [name for name in in_time if name in ready and _usd(places[name]) <= _EQUAL_COST * _usd(places[own])]
        name = _best_scored(tick, state, [own, *equal]) if own in spot else own
        return ChosenPlace(name=name, why="the plan's own place" if name == own else _why_scored(tick, state, name))
    demand = {name: place for name, place in ready.items() if place.purchase == "on-demand"}
    if best := _best_spot(tick, state, {name: place for name, place in in_time.items() if name in ready}):
        return best
    worthless = any(name in ready for name in in_time)
    reason = _why_on_demand(tick, state, in_time, worthless=worthless, on_demand=on_demand or state.attempts > 1)
    if demand and reason:
        name = min(demand, key=lambda one: (_is_late(tick, state, demand[one]), _usd(demand[one])))
        return ChosenPlace(name=name, why=reason)
    if not any(place.purchase == "on-demand" for place in places.values()):
        late = sorted((name for name in spot if name in ready), key=lambda name: spot[name].hours_p95)
        if late:
            return ChosenPlace(name=late[0], why="no place is sure to meet the deadline, and this one is the fastest")
    return None


def _score(tick: Tick, state: ControllerState, name: str) -> int:
    """Best spot placement score of a place's zones; 0 without one."""
    subnets = tick.settings.places[name].subnets.split(",")
    return max(state.scores.get(tick.settings.zones.get(subnet, ""), 0) for subnet in subnets)


def _best_scored(tick: Tick, state: ControllerState, names: Sequence[str]) -> str:
    """Return the place with the best score, the first of equal ones."""
    return max(names, key=lambda name: _score(tick, state, name))


def _why_scored(tick: Tick, state: ControllerState, name: str) -> str:
    return f"at equal cost its spot placement score is the best: {_score(tick, state, name)} of 10"


def _has_just_refused(state: ControllerState, name: str) -> bool:
    record, since = state.pools.get(name), state.round_started_at
    return bool(record and record.empty_at_s is not None and since and record.empty_at_s >= since.timestamp())


def _is_payable(tick: Tick, state: ControllerState, name: str) -> bool:
    """Return whether the ceiling pays a start, and of an alternate the rest of the run at p95."""
    settings, place = tick.settings, tick.settings.places[name]
    rest_usd = (1 - state.progress) * place.usd_p95
    # The user took the plan's own risk.
    most_usd = float("inf") if settings.ceiling_usd is None or name == settings.own_place else settings.ceiling_usd
    if state.spent_usd + rest_usd > most_usd:
        return False
    tried = replace(state, phase="waiting", next_place=ChosenPlace(name=name, why=""))
    return over_budget(tick, tried) is None


def _is_late(tick: Tick, state: ControllerState, place: Place) -> bool:
    """Return whether the rest of the run misses the deadline at p95."""
    left = _left_hours(tick, state)
    return left is not None and (1 - state.progress) * place.hours_p95 > left


def _left_hours(tick: Tick, state: ControllerState) -> float | None:
    deadline = tick.settings.deadline_hours
    return None if deadline is None else deadline - hours(tick.now - state.run_started_at)


def _usd(place: Place) -> float:
    """Price of the plan's own place for an hour of its work."""
    return place.usd_per_hour / place.speed


def _best_spot(tick: Tick, state: ControllerState, ready: dict[str, Place]) -> ChosenPlace | None:
    places = tick.settings.places
    demand = [_usd(place) for place in places.values() if place.purchase == "on-demand"]
    # Without on-demand places, spot is compared with the dearest.
    reference = min(demand) if demand else max(map(_usd, places.values()))
    ranked = rank_pools(
        {name: state.pools.get(name, PoolRecord()) for name in ready},
        tick.now.timestamp(),
        prices={name: _usd(place) for name, place in ready.items()},
        on_demand_price=reference,
        running_price=None,
        restart_s=BOOT.total_seconds(),
        try_s=_TRY_S,
    )
    if ranked:
        best = ranked[0]
        # Places that the run knows as little of, and as cheap.
        equal = {
            one.name: one
            for one in ranked
            if (one.chance, one.stay_s) == (best.chance, best.stay_s)
            and _usd(ready[one.name]) <= _EQUAL_COST * _usd(ready[best.name])
        }
        best = equal[_best_scored(tick, state, list(equal))]
        why = (
            f"the best of {len(ready)} spot places: chance {best.chance:.0%}, stay {best.stay_s / 3600:.1f} h, "
            f"{ready[best.name].usd_per_hour:.2f} USD/h a node"
        )
        if len(equal) > 1 and state.scores:
            why += f"; {_why_scored(tick, state, best.name)}"
        return ChosenPlace(name=best.name, why=why)
    if ready and not demand:
        name = min(ready, key=lambda one: _usd(ready[one]))
        return ChosenPlace(name=name, why=f"the cheapest spot place that has not just refused, of {len(ready)}")
    return None


def _why_on_demand(
    tick: Tick, state: ControllerState, in_time: dict[str, Place], *, worthless: bool, on_demand: bool
) -> str:
    """Return why on-demand nodes are bought now; empty where waiting for spot is allowed."""
    settings = tick.settings
    demand = [place for place in settings.places.values() if place.purchase == "on-demand"]
    if not demand or settings.places[settings.own_place].purchase == "on-demand":
        return "the cheapest on-demand place that has not just refused"
    if worthless:
        return "on demand, as no spot place is worth its restarts"
    left = _left_hours(tick, state)
    if left is not None and not in_time:
        return f"on demand, as spot would miss the deadline at p95: {max(left, 0.0):.1f} h are left"
    if left is not None:
        records = {name: state.pools.get(name, PoolRecord()) for name in in_time}
        work = (1 - state.progress) * min(place.hours_p95 for place in demand)
        elapsed_s = max(0.0, (tick.now - state.run_started_at).total_seconds())
        spot = expected_spot_s(
            records,
            tick.now.timestamp(),
            left_s=max(left, 0.0) * 3600,
            elapsed_s=elapsed_s,
            spot_s=min(elapsed_s, state.progress * settings.places[settings.own_place].hours_p95 * 3600),
        )
        # A late launch, and a second one on demand.
        if spot / 3600 < work + 2 * hours(BOOT):
            return f"on demand: {spot / 3600:.1f} h of spot can be expected until the deadline, {work:.1f} h are needed"
    if on_demand:
        return "on demand, as no spot place gave all nodes in time"
    return ""
