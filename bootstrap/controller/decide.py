"""Decide one tick, purely: state before and observation give the state after and the actions.

Actions are computed anew every time, so the next tick repairs one that died halfway. Where the state asks for nodes
(``launch``), AWS's answer is taken in within the same tick, and may ask for those of the next place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bootstrap.contract.codec import time_text
from bootstrap.contract.ending import GiveBack
from bootstrap.contract.request import merge_spends
from bootstrap.contract.state import ENDED, UP, ControllerState
from bootstrap.controller.actions import GroupAction, choose_actions
from bootstrap.controller.capacity import count_events
from bootstrap.controller.meter import count_nodes, update_instances
from bootstrap.controller.observation import LaunchAnswer, Tick
from bootstrap.controller.phases import next_phase, plan_launch, take_in
from bootstrap.controller.places import count_progress


class Decision(NamedTuple):
    """Result of one tick."""

    state: ControllerState  # written before any action
    actions: tuple[GroupAction, ...]  # safe to repeat


def decide(tick: Tick, before: ControllerState | None) -> Decision:
    """Apply all rules; ``before`` is None on the first tick."""
    settings, seen, now = tick.settings, tick.seen, tick.now
    state = _change_run(tick, count_progress(tick, before or first_state(tick)))
    state = replace(
        state,
        meter=state.meter or f"{settings.region}/{settings.stack} since {time_text(seen.created_at or now)}",
        elsewhere=merge_spends(state.elsewhere, seen.request.elsewhere if seen.request else {}),
    )
    counted = update_instances(tick, state)
    state = _settle(tick, _obey(tick, replace(counted, capacity=count_events(tick, before, counted))))
    state = replace(
        state,
        updated_at=now,
        ceiling_usd=settings.ceiling_usd,
        shared_usd=settings.shared.usd if settings.shared else None,
        others_usd=tick.others_usd(state),
        # The size that the tick's actions leave.
        desired_seen=min(_desired(tick, state), tick.staying(tick.place_name(state))) if state.phase in UP else 0,
        nodes=count_nodes(tick, state),
    )
    return Decision(state=state, actions=tuple(choose_actions(tick, state)))


def take_answer(tick: Tick, state: ControllerState, answer: LaunchAnswer) -> Decision:
    """Take in AWS's answer to the launch of ``state``; a part of a gang is given back by the actions."""
    assert state.launch
    given_back = answer.ids if answer.message else ()
    actions = tuple(GroupAction(state.launch.place, GiveBack(instance_id=key)) for key in given_back)
    return Decision(state=_settle(tick, take_in(tick, state, answer)), actions=actions)


def _settle(tick: Tick, state: ControllerState) -> ControllerState:
    """Move the run on as far as it goes."""
    while (following := next_phase(tick, state)) != state:
        state = following
    return plan_launch(tick, state)


def first_state(tick: Tick) -> ControllerState:
    """Return the state before the first tick, metered from when the group was made."""
    born = min(tick.seen.created_at or tick.now, tick.now)
    return ControllerState(
        run_id=tick.settings.run_id,
        job=tick.settings.job,
        phase="waiting",
        reason="the first tick",
        since=tick.now,
        run_started_at=born,
        updated_at=born,
    )


def _change_run(tick: Tick, state: ControllerState) -> ControllerState:
    """Begin the settings' run where it is not the state's."""
    settings = tick.settings
    if state.job != settings.job:
        # Instances of the old job are charged to their end.
        state = replace(state, job=settings.job, earlier_usd=state.total_usd, spent_usd=0.0)
    if state.run_id == settings.run_id:
        return state
    reason = f"run {settings.run_id} follows run {state.run_id}"
    state = _begin(tick, replace(state, run_id=settings.run_id, place=None))
    if settings.mode == "workers" and state.phase not in ENDED:
        # The group replaces workers one after another.
        return state
    # Nodes of two versions never train together.
    return state.with_phase("draining", reason, tick.now, after="waiting")


def _obey(tick: Tick, state: ControllerState) -> ControllerState:
    """Apply a new request to run; ``ends.must_end`` handles requests to stop."""
    request, before = tick.seen.request, state.request
    state = replace(state, request=request)
    if request is None or request.want != "run" or request.is_same_ask(before):
        return state
    state = _run(tick, state, f"{request.by} asked to go on")
    if request.begun_at is None:
        return state
    return replace(state, run_started_at=request.begun_at, progress=request.progress)


def _desired(tick: Tick, state: ControllerState) -> int:
    return sum(group.desired for group in tick.groups(tick.place_name(state)))


def _run(tick: Tick, state: ControllerState, reason: str) -> ControllerState:
    if state.phase in UP and tick.seen.groups and _desired(tick, state) == 0 < state.desired_seen:
        # A person asked during an outage, after the nodes had ended themselves.
        return replace(state, desired_seen=0).with_phase("waiting", reason, tick.now)
    paused = state.after if state.phase == "draining" else state.phase
    if paused in ENDED:
        state = _begin(tick, state)
    elif paused != "paused":
        return state
    return state.with_phase("draining", reason, tick.now, after="waiting")


def _begin(tick: Tick, state: ControllerState) -> ControllerState:
    return replace(
        state,
        # Old reports do not count; reported_at stays, so that they are not read again.
        instances={key: replace(instance, report=None) for key, instance in state.instances.items()},
        run_started_at=tick.now,
        attempts=0,
        on_demand=False,
        next_place=None,
        progress=0.0,
        done_steps=None,
        unfit_nodes=0,
        failed_launches=0,
        interruptions=0,
        last_failure="",
    )
