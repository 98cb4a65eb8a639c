"""Begin runs: on the first tick, when the settings name another run, and when a person asks to go on."""

from __future__ import annotations

from dataclasses import replace

from bootstrap.contract.request import merge_spends
from bootstrap.contract.state import ENDED, UP, ControllerState
from bootstrap.controller.observation import Tick


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


def change_run(tick: Tick, state: ControllerState) -> ControllerState:
    """Begin the run of the settings, where it is another."""
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
    if tick.seen.members:
        # Nodes of two versions never train together.
        return state.with_phase("draining", reason, tick.now, after="waiting")
    return state.with_phase("waiting", reason, tick.now)


def add_elsewhere(tick: Tick, state: ControllerState) -> ControllerState:
    """Take in what other stacks spent, before this tick's dollars are counted."""
    told = tick.seen.request.elsewhere if tick.seen.request else {}
    return replace(state, elsewhere=merge_spends(state.elsewhere, told))


def obey(tick: Tick, state: ControllerState) -> ControllerState:
    """Take in a new request to run; ``ends.must_end`` looks at one to stop."""
    request, before = tick.seen.request, state.request
    if request == before:
        return state
    state = replace(state, request=request)
    if request is None or request.want != "run" or request.is_same_ask(before):
        return state
    state = _run(tick, state, f"{request.by} asked to go on")
    if request.begun_at is None:
        return state
    return replace(state, run_started_at=request.begun_at, progress=request.progress)


def _run(tick: Tick, state: ControllerState, reason: str) -> ControllerState:
    desired = sum(group.desired for group in tick.groups(tick.place_name(state)))
    if state.phase in UP and tick.seen.groups and desired == 0 < state.desired_seen:
        # Asked during an outage, after the nodes had ended themselves.
        return replace(state, desired_seen=0).with_phase("waiting", reason, tick.now)
    if state.phase == "paused":
        return state.with_phase("waiting", reason, tick.now)
    if state.phase in ENDED:
        return _begin(tick, state).with_phase("waiting", reason, tick.now)
    if state.phase == "draining" and state.after == "paused":
        return replace(state, after="waiting", reason=reason)
    if state.phase == "draining" and state.after in ENDED:
        return replace(_begin(tick, state), after="waiting", reason=reason)
    return state


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
