"""Move a run from phase to phase (bootstrap/contract/state.py has their table), one step a call."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from bootstrap.contract.pools import came, left, reclaimed, refused
from bootstrap.contract.state import ENDED, PAUSES, UP, ChosenPlace, ControllerState
from bootstrap.contract.timings import ASK_AGAIN, LEASE, REFUSED_REPLACEMENT, TICK
from bootstrap.contract.words import counted
from bootstrap.controller.ends import is_ceiling_raised, must_end
from bootstrap.controller.meter import hours
from bootstrap.controller.observation import Tick
from bootstrap.controller.places import choose_place, learn, leave_for
from bootstrap.controller.reservations import reserve_first
from bootstrap.controller.runs import rest

# Waits before a gang's second, third... attempt; then the run has failed.
RETRY_WAITS = tuple(timedelta(minutes=minutes) for minutes in (5, 15, 30, 60, 120))
# From AWS's first refusal of a node to the partial gang's end, unless a node comes. Auto Scaling asks again meanwhile:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ts-as-capacity.html
REFUSED_START = timedelta(minutes=3)
# A gang that held this long forgets earlier attempts.
PROVEN = timedelta(minutes=30)


def next_phase(tick: Tick, state: ControllerState) -> ControllerState:
    """Return the state one phase on, or the same object."""
    group, now = tick.seen.group, tick.now
    if state.phase in ENDED:
        return _revive(tick, state)
    end = must_end(tick, state)
    if end and state.phase == "draining" and state.after in PAUSES:
        return replace(state, after=end[0], reason=end[1])
    if end and state.phase in PAUSES:
        return state.with_phase(*end, now)
    if end and state.phase in UP:
        return _leave(tick, state).with_phase("draining", end[1], now, after=end[0])
    if state.phase == "draining":
        # Now, not after the drain: the state keeps only the last tick's ceiling.
        if state.after == "over-budget" and not end and is_ceiling_raised(tick.settings, state):
            return replace(state, after="waiting", reason="the ceiling was raised")
        if group and group.members:
            return state
        assert state.after is not None
        waits = {"next_attempt_at": state.next_attempt_at, "next_place": state.next_place}
        return state.with_phase(state.after, state.reason, now, **waits)
    if state.phase == "waiting":
        return _start(tick, state)
    if state.phase == "paused":
        if not group or group.desired == 0:
            return state
        state = state.with_phase("waiting", "the group's desired size was raised from 0", now)
        end = must_end(tick, state)
        # The group's members are the gang's first.
        return state.with_phase(*end, now) if end else _start(tick, state, adopt=True)
    if tick.settings.mode == "workers":
        # "starting": the nodes were a gang before.
        return state if state.phase == "running" else state.with_phase("running", "workers from now on", now)
    return _check_gang(tick, state)


def _revive(tick: Tick, state: ControllerState) -> ControllerState:
    request = tick.seen.request
    reason = ""
    if state.phase == "stopped" and (request is None or request.want == "run"):
        return state.with_phase("waiting", "the request to stop is gone", tick.now)
    if state.phase == "over-budget" and is_ceiling_raised(tick.settings, state):
        reason = "the ceiling was raised"
    elif state.phase == "block-ended":
        reason = "the plan has another Capacity Block, or needs none"
    return state.with_phase("waiting", reason, tick.now) if reason and not must_end(tick, state) else state


def _start(tick: Tick, state: ControllerState, *, adopt: bool = False) -> ControllerState:
    # ``adopt`` keeps the members that are there.
    settings, group, now, count = tick.settings, tick.seen.group, tick.now, tick.settings.node_count
    if settings.block and now < settings.block.start:
        return _wait(state, f"the Capacity Block begins at {settings.block.start:%Y-%m-%d %H:%M} UTC")
    if group is None:
        return _wait(state, f"there is no group {settings.group}: `pulumi up` makes it")
    if group.members and not adopt:
        return _wait(state, f"{counted(len(group.members), 'node of before is', 'nodes of before are')} still ending")
    if state.next_attempt_at and now < state.next_attempt_at:
        return state
    if settings.mode == "workers":
        return state.with_phase("running", "the scaling policies decide how many workers run", now)
    if group.max_size < count and not settings.scheduled:
        return _wait(state, f"the group's largest size is {group.max_size}, the plan has {count}: run `pulumi up`")
    if settings.places and group.desired and not adopt:
        # A launch may be under way where the group was.
        return state
    goes_on = state.next_place is not None and state.next_place.name in settings.places
    attempt = max(1, state.attempts) if goes_on else state.attempts + 1
    changes = {"attempts": attempt, "attempt_started_at": now, "incomplete_since": None, "refused_since": None}
    changes["reservation"] = None
    reason = f"{counted(count, 'node')} asked for, attempt {attempt}"
    owned, free = settings.owned, tick.seen.owned_free
    if owned and free is not None and free < owned.nodes and not adopt:
        reason += f"; {owned.reservation_id} has room for {free} of its {owned.nodes}, the others are rented"
    if settings.places:
        if not goes_on:
            state = replace(state, round_started_at=now)
        place = state.next_place if goes_on else _first_place(tick, state, adopt=adopt)
        assert place
        reason += f", in {place.name}: {place.why}"
        own, there = (settings.places[name].purchase for name in (settings.own_place, place.name))
        changes |= {"place": place, "on_demand": own == "spot" and there == "on-demand"}
        if state.reservation and state.reservation.place == place.name:
            changes["reservation"] = state.reservation
    return state.with_phase("starting", reason, now, **changes)


def _first_place(tick: Tick, state: ControllerState, *, adopt: bool) -> ChosenPlace:
    """Place of a new attempt; adopted nodes are where the group was left."""
    known = state.place if state.place and state.place.name in tick.settings.places else None
    own = ChosenPlace(name=tick.settings.own_place, why="the plan's own place")
    return (known if adopt else choose_place(tick, state)) or own


def _all_of(count: int) -> str:
    return "the node is" if count == 1 else f"all {count} nodes are"


def _wait(state: ControllerState, reason: str) -> ControllerState:
    return state if state.reason == reason else replace(state, reason=reason)


def _check_gang(tick: Tick, state: ControllerState) -> ControllerState:
    settings, group, now, count = tick.settings, tick.seen.group, tick.now, tick.settings.node_count
    if group is None:
        return state
    if group.desired == 0 and state.desired_seen > 0:
        return _pause(tick, state)
    place = leave_for(tick, state)
    if place and (waits := reserve_first(tick, state, place.name)):
        return waits
    if place:
        reason = f"the nodes are given up: next is {place.name}, {place.why}"
        changes = {"after": "waiting", "next_place": place, "round_started_at": now}
        return _leave(tick, state).with_phase("draining", reason, now, **changes)
    if state.reservation and state.phase == "running":
        # Left behind by the start, or by a wish to leave that has passed.
        state = replace(state, reservation=None)
    in_service = len(group.in_service)
    if in_service >= count:
        if state.phase == "starting":
            reason = f"{_all_of(count)} in service"
            if state.place:
                reason += f" in {state.place.name}: {state.place.why}"
            state = learn(tick, state, came)
            return state.with_phase("running", reason, now, attempt_started_at=None, incomplete_since=None)
        if state.incomplete_since:
            if _took_back(state, state.incomplete_since):
                state = learn(tick, learn(tick, state, reclaimed), came)
            return replace(state, incomplete_since=None, reason=f"{_all_of(count)} in service again")
        if state.attempts and state.complete_since and now - state.complete_since >= PROVEN:
            return replace(state, attempts=0)
        return state
    since = state.attempt_started_at if state.phase == "starting" else state.incomplete_since
    if since is None:
        return replace(state, incomplete_since=now, reason=f"{in_service} of {counted(count, 'node')} in service")
    # The window may be over before the next tick.
    if now - since + TICK > timedelta(seconds=settings.gang_window_s):
        reason = f"{in_service} of {counted(count, 'node')} within {settings.gang_window_s // 60} minutes"
        return _give_back(tick, state, reason, falls_back=True)
    # Without a member nothing is paid, and a block and a reservation are paid anyway: the group may as well ask on.
    if state.refused_since and not settings.block and settings.reserved_nodes < count:
        patience = REFUSED_START if state.phase == "starting" else REFUSED_REPLACEMENT
        staying = len(group.members) - len(group.leaving)
        reason = f"{staying} of {counted(count, 'node')} came, and AWS refuses the others"
        if settings.places and not group.members:
            return _leave_empty_place(tick, state, reason)
        if settings.places and state.phase == "starting" and choose_place(tick, learn(tick, state, refused)):
            patience = TICK
        if group.members and now - state.refused_since >= patience:
            # Spot that lacked for minutes only is asked for once more, before the whole run is bought on demand.
            return _give_back(tick, state, reason, falls_back=state.attempts > 1)
    return state


def _leave_empty_place(tick: Tick, state: ControllerState, reason: str) -> ControllerState:
    """Go to the next place, or ask on, free of charge, until a place may be tried again."""
    if state.next_attempt_at:
        return _give_back(tick, state, reason, falls_back=False) if tick.now >= state.next_attempt_at else state
    learned = _lose(tick, state)
    if choose_place(tick, learned):
        return _give_back(tick, state, reason, falls_back=False)
    again_at = tick.now + _retry_wait(tick, state)
    waits = f"{reason}: all places worth a try have refused, the next attempt is at {again_at:%H:%M} UTC"
    return replace(learned, next_attempt_at=again_at, reason=waits)


def _retry_wait(tick: Tick, state: ControllerState) -> timedelta:
    if tick.settings.adaptive:
        return ASK_AGAIN
    return RETRY_WAITS[min(max(state.attempts, 1), len(RETRY_WAITS)) - 1]


def _lose(tick: Tick, state: ControllerState) -> ControllerState:
    """Record that the place did not give, or did not keep, all nodes; the second call is of a refused replacement."""
    record = state.pools.get(state.place.name) if state.place else None
    return learn(tick, state, reclaimed if record and record.launched_at_s is not None else refused)


def _took_back(state: ControllerState, since: datetime) -> bool:
    ended = [instance.ended_at for instance in state.instances.values() if instance.interrupted and instance.ended_at]
    return any(ended_at >= since - TICK for ended_at in ended)


def _leave(tick: Tick, state: ControllerState) -> ControllerState:
    """Record that the run ends the nodes itself."""
    return learn(tick, state, left) if state.phase == "running" else state


def _pause(tick: Tick, state: ControllerState) -> ControllerState:
    assert tick.seen.group
    if tick.seen.group.created_at > state.updated_at:
        # `pulumi destroy` in the middle of a run, and `pulumi up`.
        return rest(tick, replace(state, desired_seen=0), "the stack was deployed anew")
    reason = "a schedule, or a person, set the group's size to 0"
    silent = tick.now - state.updated_at
    if silent > LEASE:
        reason = (
            f"the controller was silent for {hours(silent) * 60:.0f} minutes, so the nodes saved and ended "
            "themselves: see its log group, then `gpufleet resume`"
        )
    return _leave(tick, state).with_phase("draining", reason, tick.now, after="paused")


def _give_back(tick: Tick, state: ControllerState, reason: str, *, falls_back: bool) -> ControllerState:
    settings, now = tick.settings, tick.now
    if state.last_failure:
        reason += f" (AWS: {state.last_failure})"
    if settings.adaptive and (state.refused_since or state.phase == "running"):
        # Until the deadline, AWS's refusals and reclaims end no run: only nodes that came and never served do.
        state = replace(state, attempts=0)
    if settings.places:
        # A gang that was complete, and a wait, begin another attempt.
        anew, state = state.phase == "running" or state.next_attempt_at is not None, _lose(tick, state)
        attempts = state.attempts + anew
        if anew:
            state = replace(state, round_started_at=now)
        place = choose_place(tick, state, on_demand=falls_back)
        if place and attempts <= len(RETRY_WAITS) + 1:
            reason = f"{reason}: next is {place.name}, {place.why}"
            return state.with_phase("draining", reason, now, after="waiting", next_place=place, attempts=attempts)
    elif settings.fallback_on_demand and not state.on_demand and falls_back:
        reason = f"{reason}: on-demand nodes instead"
        return state.with_phase("draining", reason, now, after="waiting", on_demand=True, attempts=0)
    # A block is paid anyway: only its end ends the attempts.
    if settings.block:
        next_attempt_at = now + RETRY_WAITS[0]
    elif state.attempts > len(RETRY_WAITS):
        reason += f", {state.attempts} times in a row: `gpufleet resume` tries again"
        return state.with_phase("draining", reason, now, after="failed")
    else:
        next_attempt_at = now + _retry_wait(tick, state)
    reason += f": the next attempt is at {next_attempt_at:%H:%M} UTC"
    return state.with_phase("draining", reason, now, after="waiting", next_attempt_at=next_attempt_at)
