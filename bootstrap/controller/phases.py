"""Move a run from phase to phase (bootstrap/contract/state.py has their table), one step a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bootstrap.contract.ending import Member
from bootstrap.contract.pools import came, left, reclaimed, refused
from bootstrap.contract.state import ENDED, PAUSES, UP, ChosenPlace, ControllerState, LaunchRequest, PlaceAnswer
from bootstrap.contract.timings import ASK_AGAIN, LEASE, REFUSED_REPLACEMENT, TICK
from bootstrap.contract.words import counted
from bootstrap.controller.actions import wanted_places
from bootstrap.controller.capacity import count_refusal
from bootstrap.controller.ends import is_ceiling_raised, must_end
from bootstrap.controller.launches import is_refusal
from bootstrap.controller.meter import begin, hours
from bootstrap.controller.observation import LaunchAnswer, Tick
from bootstrap.controller.places import choose_place, learn, leave_for

# Waits before a gang's second, third... attempt, where nodes came and did not make a gang; then the run has failed.
RETRY_WAITS = tuple(timedelta(minutes=minutes) for minutes in (5, 15, 30, 60, 120))
# A gang that held this long forgets earlier attempts.
PROVEN = timedelta(minutes=30)


def next_phase(tick: Tick, state: ControllerState) -> ControllerState:
    """Return the state one phase on, or an equal one."""
    now = tick.now
    if state.phase in ENDED:
        is_raised = state.phase == "over-budget" and is_ceiling_raised(tick.settings, state)
        if not (is_raised or state.phase in ("stopped", "block-ended")) or must_end(tick, state):
            return state
        return state.with_phase("waiting", f"what made the run {state.phase} holds no more", now)
    end = must_end(tick, state)
    if end and state.phase == "draining" and state.after in PAUSES:
        # The nodes that the gang would have moved to end, too.
        return replace(state, after=end[0], reason=end[1], next_place=None, beside=None)
    if end and state.phase != "draining":
        return _drain(tick, state, end[1], after=end[0])
    if state.phase == "draining":
        # Now, not after the drain: the state keeps only the last tick's ceiling.
        if state.after == "over-budget" and not end and is_ceiling_raised(tick.settings, state):
            return replace(state, after="waiting", reason="the ceiling was raised")
        if _members_but_of(tick, wanted_places(tick, state)):
            return state
        return replace(state, phase=state.after or "waiting", after=None, since=now)
    if state.phase == "waiting":
        return _start(tick, state)
    if state.phase == "paused":
        return state
    if tick.settings.mode == "workers":
        # "starting": the nodes were a gang before.
        return state if state.phase == "running" else state.with_phase("running", "workers from now on", now)
    return _check_gang(tick, state)


def plan_launch(tick: Tick, state: ControllerState) -> ControllerState:
    """Ask for the nodes that a place lacks, once its groups count no other; keep a request that has no answer yet."""
    settings, asked, wanted = tick.settings, state.launch, wanted_places(tick, state)
    if asked and asked.place in wanted and tick.now - asked.asked_at < ASK_AGAIN:
        return state
    state = replace(state, launch=None) if asked else state
    for name in wanted if settings.mode == "training" and state.phase in UP else ():
        groups, answered = tick.groups(name), state.answers.get(name)
        if not groups or (answered and answered.asked_at >= tick.now):
            continue
        staying = [len(group.staying(tick.seen.ended)) for group in groups]
        lacking = settings.node_count - sum(staying)
        # With a larger size Auto Scaling may be launching nodes itself: the actions lower it first.
        if lacking > 0 and all(group.desired <= count for group, count in zip(groups, staying, strict=True)):
            before = settings.places[name].first
            first = min(lacking, max(0, before.nodes - staying[0])) if before else 0
            return replace(state, launch=LaunchRequest(place=name, nodes=lacking, first=first, asked_at=tick.now))
    return state


def take_in(tick: Tick, state: ControllerState, answer: LaunchAnswer) -> ControllerState:
    """Take in AWS's answer to the state's request: all nodes came, or the gang lacks them."""
    assert state.launch
    name, now = state.launch.place, tick.now
    place = tick.settings.places[name]
    told = f"{answer.code}: {answer.message}"[:500] if answer.message else f"{counted(state.launch.nodes, 'node')} came"
    answers = {key: known for key, known in state.answers.items() if key in tick.settings.places}
    answers[name] = PlaceAnswer(asked_at=now, answer=told, usd_per_hour=place.usd_per_hour)
    state = replace(state, launch=None, answers=answers)
    if not answer.message:
        return state
    new = begin(tick.settings, place.purchase, place.instance_type, answer.subnet, now)
    # A tick that repeats the request may have metered them already.
    given_back = {key: replace(state.instances.get(key, new), given_back=True) for key in answer.ids}
    state = replace(
        state,
        instances={**state.instances, **given_back},
        capacity=count_refusal(tick, state.capacity, place, answer),
        failed_launches=state.failed_launches + 1,
        last_failure=told,
    )
    if state.beside and state.beside.name == name:
        return _give_up_beside(tick, state)
    staying = tick.staying(tick.place_name(state))
    is_refused = is_refusal(answer.code) or staying
    state = replace(state, refused_since=state.refused_since or (now if is_refused else None))
    # Reserved capacity is paid anyway, and a node that ends holds its slot for a while:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-launch.html
    if tick.settings.is_paid(name) or staying:
        return state
    return _give_back(tick, state, "AWS refuses the nodes")


def _start(tick: Tick, state: ControllerState) -> ControllerState:
    settings, now, count = tick.settings, tick.now, tick.settings.node_count
    places = tick.open_places(state)
    if not places:
        start = min(times.start for times in tick.hours_ahead.values())
        return replace(state, reason=f"the Capacity Block begins at {start:%Y-%m-%d %H:%M} UTC")
    if others := _members_but_of(tick, [state.beside.name] if state.beside else []):
        reason = f"{counted(len(others), 'node of before is', 'nodes of before are')} still ending"
        return replace(state, reason=reason)
    if state.next_attempt_at and now < state.next_attempt_at:
        return state
    goes_on = state.next_place is not None and state.next_place.name in places
    begun = state if goes_on else replace(state, round_started_at=now)
    place = state.next_place if goes_on else choose_place(tick, begun)
    if place is None or settings.mode == "workers":
        place = ChosenPlace(name=next(iter(places)), why="the plan's own place")
    if not tick.groups(place.name):
        names = " or ".join(map(settings.group_of, settings.keys_of(place.name)))
        return replace(state, reason=f"there is no group {names}: `pulumi up` makes it")
    if settings.mode == "workers":
        return state.with_phase("running", "the scaling policies decide how many workers run", now)
    attempt = max(1, state.attempts) if goes_on else state.attempts + 1
    reason = f"{counted(count, 'node')} asked for, attempt {attempt}, in {place.name}: {place.why}"
    on_demand = [settings.places[name].purchase for name in (settings.own_place, place.name)] == ["spot", "on-demand"]
    changes: dict[str, Any] = {"attempts": attempt, "incomplete_since": now, "refused_since": None, "desired_seen": 0}
    changes |= {"place": place, "group": settings.group_of(place.name), "on_demand": on_demand}
    return begun.with_phase("starting", reason, now, **changes)


def _check_gang(tick: Tick, state: ControllerState) -> ControllerState:
    settings, now, count, name = tick.settings, tick.now, tick.settings.node_count, tick.place_name(state)
    groups = tick.groups(name)
    if not groups:
        return state
    # A person does not pause the run where the block's own schedule has set the size to 0 (infra/place_group.py).
    if name not in tick.open_places(state) or state.group not in ("", settings.group_of(name)):
        reason = f"{name} closes, or `pulumi up` changed it: the nodes save, and the run goes on where the plan has it"
        return _drain(tick, state, reason, after="waiting")
    if state.desired_seen > 0 and not any(group.desired for group in groups):
        return _pause(tick, state)
    in_service = tick.in_service(name)
    if in_service >= count and state.phase == "starting":
        reason = f"all nodes are in service in {name}" + (f": {state.place.why}" if state.place else "")
        state = learn(tick, replace(state, incomplete_since=None), came)
        return state.with_phase("running", reason, now, beside=state.beside)
    if state.beside and (moved := _follow_beside(tick, state)) != state:
        return moved
    if not state.beside and (place := leave_for(tick, state)):
        reason = f"nodes are asked for beside these, in {place.name}: {place.why}"
        return replace(state, beside=place, beside_since=now, reason=reason)
    if in_service >= count:
        if state.incomplete_since:
            reclaims = [known.ended_at for known in state.instances.values() if known.interrupted and known.ended_at]
            if reclaims and max(reclaims) >= state.incomplete_since - TICK:
                state = learn(tick, learn(tick, state, reclaimed), came)
            return replace(state, incomplete_since=None, reason="all nodes are in service again")
        if state.attempts and state.complete_since and now - state.complete_since >= PROVEN:
            return replace(state, attempts=0)
        return state
    if state.incomplete_since is None:
        return replace(state, incomplete_since=now, reason=f"{in_service} of {counted(count, 'node')} in service")
    # The window may be over before the next tick.
    if now - state.incomplete_since + TICK > timedelta(seconds=settings.gang_window_s):
        reason = f"{in_service} of {counted(count, 'node')} within {settings.gang_window_s // 60} minutes"
        return _give_back(tick, state, reason, falls_back=True)
    if state.refused_since and now - state.refused_since >= REFUSED_REPLACEMENT and not settings.is_paid(name):
        reason = f"{tick.staying(name)} of {counted(count, 'node')} are there, and AWS refuses the others"
        return _give_back(tick, state, reason)
    return state


def _follow_beside(tick: Tick, state: ControllerState) -> ControllerState:
    """Move the gang once all nodes beside it serve; give them up where they do not come in time."""
    assert state.beside and state.beside_since
    settings, now, place = tick.settings, tick.now, state.beside
    if tick.in_service(place.name) >= settings.node_count:
        reason = f"all nodes are in service in {place.name}, so the gang saves and moves: {place.why}"
        return _drain(tick, state, reason, after="waiting", next_place=place, beside=place, round_started_at=now)
    is_late = now - state.beside_since + TICK > timedelta(seconds=settings.gang_window_s)
    # A node that failed its set-up or tests, or was taken back: the gang works on, so nothing is asked for again.
    answer = state.answers.get(place.name)
    has_come = answer is not None and state.beside_since <= answer.asked_at < now
    is_short = has_come and tick.staying(place.name) < settings.node_count
    return _give_up_beside(tick, state) if is_late or is_short else state


def _give_up_beside(tick: Tick, state: ControllerState) -> ControllerState:
    """Let the nodes beside end, which is no fault of theirs: the gang works on."""
    assert state.beside
    ends = {member.instance_id for group in tick.groups(state.beside.name) for member in group.members}
    instances = {key: replace(it, given_back=it.given_back or key in ends) for key, it in state.instances.items()}
    return replace(learn(tick, state, refused, state.beside.name), beside=None, instances=instances)


def _members_but_of(tick: Tick, places: Iterable[str]) -> list[Member]:
    # An instance that EC2 bills no more may be shutting down, a member, for a quarter of an hour:
    # https://github.com/hashicorp/packer-plugin-amazon/issues/682
    kept, ended = {key for place in places for key in tick.settings.keys_of(place)}, tick.seen.ended
    others = [group for key, group in tick.seen.groups.items() if key not in kept]
    return [member for group in others for member in group.members if member.instance_id not in ended]


def _drain(tick: Tick, state: ControllerState, reason: str, **changes: Any) -> ControllerState:
    """Drain nodes that the run ends itself."""
    state = learn(tick, state, left) if state.phase == "running" else state
    return state.with_phase("draining", reason, tick.now, **changes)


def _pause(tick: Tick, state: ControllerState) -> ControllerState:
    if tick.seen.created_at and tick.seen.created_at > state.updated_at:
        # `pulumi destroy` in the middle of a run, and `pulumi up`.
        return replace(state, desired_seen=0).with_phase("waiting", "the stack was deployed anew", tick.now)
    silent, reason = tick.now - state.updated_at, "a person set the group's size to 0"
    if silent > LEASE:
        reason = f"the controller was silent for {hours(silent) * 60:.0f} minutes, and the nodes ended themselves"
    return _drain(tick, state, f"{reason}: `gpufleet resume` goes on", after="paused")


def _give_back(tick: Tick, state: ControllerState, reason: str, *, falls_back: bool = False) -> ControllerState:
    """End the nodes that are there, and go to the next place, or wait.

    On demand comes next where ``falls_back``, or where spot was refused in two attempts.
    """
    settings, now, is_refused = tick.settings, tick.now, state.refused_since is not None
    is_paid = settings.is_paid(tick.place_name(state))
    if state.last_failure:
        reason += f" (AWS: {state.last_failure})"
    # Refusals and reclaims fail no run: asking again is free.
    attempts = min(state.attempts, 2) if is_refused else state.attempts
    if settings.adaptive and (is_refused or state.phase == "running"):
        attempts = 0
    state, record = replace(state, attempts=attempts), state.pools.get(tick.place_name(state))
    # The second event is of a refused replacement.
    state = learn(tick, state, reclaimed if record and record.launched_at_s is not None else refused)
    if state.phase == "running":
        # A gang that was complete begins another attempt.
        attempts, state = attempts + 1, replace(state, round_started_at=now)
    place = state.beside or choose_place(tick, state, on_demand=falls_back or attempts > 1)
    changes: dict[str, Any] = {"after": "waiting", "attempts": state.attempts, "beside": state.beside}
    if place and attempts <= len(RETRY_WAITS) + 1:
        changes |= {"attempts": attempts, "next_place": place}
        reason = f"{reason}: next is {place.name}, {place.why}"
    elif attempts > len(RETRY_WAITS) and not is_paid:
        changes["after"] = "failed"
        reason += f", {attempts} times in a row: `gpufleet resume` tries again"
    else:
        # Reserved capacity is paid anyway.
        is_soon = is_refused or settings.adaptive or is_paid
        changes["next_attempt_at"] = now + (ASK_AGAIN if is_soon else RETRY_WAITS[max(attempts, 1) - 1])
        reason += f": the next attempt is at {changes['next_attempt_at']:%H:%M} UTC"
    return state.with_phase("draining", reason, now, **changes)
