"""Decide one tick, purely: state before and observation give the state after and the actions.

Actions are computed anew every time, so the next tick repairs one that died halfway. Where the state asks for nodes
(``launch``), AWS's answer is taken in within the same tick, and may ask for those of the next place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from bootstrap.contract.codec import time_text
from bootstrap.contract.ending import GiveBack
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import UP, ControllerState, Phase
from bootstrap.controller.actions import GroupAction, choose_actions
from bootstrap.controller.capacity import count_events
from bootstrap.controller.meter import count_nodes, update_instances
from bootstrap.controller.observation import LaunchAnswer, Observation, Tick
from bootstrap.controller.phases import next_phase, plan_launch, take_in
from bootstrap.controller.places import count_progress
from bootstrap.controller.runs import add_elsewhere, change_run, first_state, obey


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Result of one tick."""

    state: ControllerState  # written before any action
    actions: tuple[GroupAction, ...]  # safe to repeat
    changes: tuple[tuple[Phase, str], ...]  # with reasons, for the log


def decide(settings: ControllerSettings, before: ControllerState | None, seen: Observation, now: datetime) -> Decision:
    """Apply all rules; ``before`` is None on the first tick."""
    tick = Tick(settings=settings, seen=seen, now=now)
    state = add_elsewhere(tick, change_run(tick, count_progress(tick, before or first_state(tick))))
    since = time_text(seen.created_at or now)
    state = replace(state, meter=state.meter or f"{settings.region}/{settings.stack} since {since}")
    counted = update_instances(tick, state)
    state, changes = _settle(tick, obey(tick, replace(counted, capacity=count_events(tick, before, counted))))
    place = tick.place_name(state)
    desired = sum(group.desired for group in tick.groups(place))
    state = replace(
        state,
        updated_at=now,
        ceiling_usd=settings.ceiling_usd,
        shared_usd=settings.shared.usd if settings.shared else None,
        others_usd=tick.others_usd(state),
        # The size that the tick's actions leave.
        desired_seen=min(desired, tick.staying(place)) if state.phase in UP else 0,
        nodes=count_nodes(tick, state),
    )
    return Decision(state=state, actions=tuple(choose_actions(tick, state)), changes=changes)


def take_answer(
    settings: ControllerSettings, seen: Observation, now: datetime, state: ControllerState, answer: LaunchAnswer
) -> Decision:
    """Take in AWS's answer to the launch of ``state``; a part of a gang is given back by the actions."""
    assert state.launch
    place = state.launch.place
    tick = Tick(settings=settings, seen=seen, now=now)
    state, changes = _settle(tick, take_in(tick, state, answer))
    given_back = answer.ids if answer.error else ()
    actions = tuple(GroupAction(place, GiveBack(instance_id=key)) for key in given_back)
    return Decision(state=state, actions=actions, changes=changes)


def _settle(tick: Tick, state: ControllerState) -> tuple[ControllerState, tuple[tuple[Phase, str], ...]]:
    """Move the run on as far as it goes."""
    changes: list[tuple[Phase, str]] = []
    while (following := next_phase(tick, state)) is not state:
        if (following.phase, following.reason) != (state.phase, state.reason):
            changes.append((following.phase, following.reason))
        state = following
    return plan_launch(tick, state), tuple(changes)


def end_all(settings: ControllerSettings, seen: Observation, now: datetime) -> tuple[GroupAction, ...]:
    """Choose the actions that end every node with a checkpoint, where spend is unknown."""
    tick = Tick(settings=settings, seen=seen, now=now)
    return tuple(choose_actions(tick, replace(first_state(tick), phase="failed")))
