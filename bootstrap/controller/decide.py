"""All policy, and nothing else: what was known, what is seen and the time give what to do and what is known now.

Pure, so that every rule is tested without AWS. A tick recomputes every action from what it sees, so one that died
halfway is repaired by the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ENDED, PAUSES, UP, ControllerState, MeteredInstance, NodeCounts, Phase
from bootstrap.contract.timings import BLOCK_TAIL, ENDING, LEASE, TICK
from bootstrap.controller import meter
from bootstrap.controller.meter import hours
from bootstrap.controller.observation import AutoScalingGroup, Observation

# A start that could pay for less than booting and testing is money for nothing.
BOOT = timedelta(minutes=30)
# Waits before the second, third... start of a gang that did not come together; then it has failed.
RETRY_WAITS = tuple(timedelta(minutes=minutes) for minutes in (5, 15, 30, 60, 120))
# A gang that held this long forgets the attempts before it.
PROVEN = timedelta(minutes=30)
# One node said that the command ended well: the others' word may be lost, and idle nodes are paid.
DONE_GRACE = timedelta(minutes=5)


def unfit_limit(node_count: int) -> int:
    """Nodes that may fail their set-up or tests in a row: a bad one happens, a bad image or code fails them all."""
    return 3 + node_count // 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SetGroup:
    """Give the group these sizes, and OnDemandBaseCapacity; what is None stays."""

    desired: int | None = None
    min_size: int | None = None
    max_size: int | None = None
    on_demand_base: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LiftProtection:
    """Let scale-in take these instances."""

    instance_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AbandonLaunch:
    """End an instance that its launch hook holds."""

    instance_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndLeaving:
    """Complete the terminate hook of an instance that had its time for a checkpoint."""

    instance_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndStaying:
    """End an instance that Auto Scaling does not: its terminate hook still gives it time to save."""

    instance_id: str


Action = SetGroup | LiftProtection | AbandonLaunch | EndLeaving | EndStaying


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What follows from one tick.

    Attributes:
        state: to be written before anything is done.
        actions: to be done then; all are safe to repeat.
        changes: the phases gone through, each with its reason, for the log.
    """

    state: ControllerState
    actions: tuple[Action, ...]
    changes: tuple[tuple[Phase, str], ...]


def decide(settings: ControllerSettings, before: ControllerState | None, facts: Observation, now: datetime) -> Decision:
    """What to do, given what was known (None on the first tick) and what is seen."""
    state = before or _first(settings, facts.group, now)
    state = _new_run(settings, state, facts, now)
    state = _observe(settings, state, facts, now)
    state = _obey(state, facts, now)
    changes: list[tuple[Phase, str]] = []
    while (following := _next(settings, state, facts, now)) is not state:
        if (following.phase, following.reason) != (state.phase, state.reason):
            changes.append((following.phase, following.reason))
        state = following
    group = facts.group
    state = replace(
        state,
        updated_at=now,
        ceiling_usd=settings.ceiling_usd,
        desired_seen=group.desired if group and state.phase in UP else 0,
        nodes=_nodes(settings, state, group),
    )
    return Decision(state=state, actions=tuple(_actions(settings, state, facts, now)), changes=tuple(changes))


def end_all(settings: ControllerSettings, facts: Observation, now: datetime) -> tuple[Action, ...]:
    """What ends every node with a checkpoint, where nothing is known of the dollars spent."""
    unknown = replace(_first(settings, facts.group, now), phase="failed")
    return tuple(_actions(settings, unknown, facts, now))


def _first(settings: ControllerSettings, group: AutoScalingGroup | None, now: datetime) -> ControllerState:
    born = min(group.created_at, now) if group else now
    state = ControllerState(
        run_id=settings.run_id,
        job=settings.job,
        phase="waiting",
        reason="the first tick",
        since=now,
        run_started_at=born,
        updated_at=born,
    )
    return _rest(settings, state, "the first tick", now)


def _rest(settings: ControllerSettings, state: ControllerState, reason: str, now: datetime) -> ControllerState:
    """No nodes, and the next start when it is due; a scheduled gang waits for its schedule."""
    if settings.scheduled and settings.mode == "training":
        return state.with_phase("paused", f"{reason}; a schedule starts the nodes", now)
    return state.with_phase("waiting", reason, now)


def _new_run(
    settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime
) -> ControllerState:
    if state.job != settings.job:
        # The meter itself never goes back: instances of the old job are charged to their end.
        state = replace(state, job=settings.job, earlier_usd=state.earlier_usd + state.spent_usd, spent_usd=0.0)
    if state.run_id == settings.run_id:
        return state
    reason = f"run {settings.run_id} follows run {state.run_id}"
    state = _begin(replace(state, run_id=settings.run_id), now)
    if settings.mode == "workers" and state.phase not in ENDED:
        # They train alone: the group replaces them one after another.
        return state
    if facts.group and facts.group.members:
        # Nodes of two versions never train together, so those of the old one save their state and go.
        return state.with_phase("draining", reason, now, after="paused" if settings.scheduled else "waiting")
    return _rest(settings, state, reason, now)


def _begin(state: ControllerState, now: datetime) -> ControllerState:
    """Counts of a run that begins, or begins anew."""
    return replace(
        state,
        # What was said of the run before does not count; reported_at stays, so that it is not read again.
        instances={key: replace(instance, report=None) for key, instance in state.instances.items()},
        run_started_at=now,
        attempts=0,
        on_demand=False,
        unfit_nodes=0,
        failed_launches=0,
        interruptions=0,
        rebalance_notices=0,
        last_failure="",
    )


def _observe(
    settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime
) -> ControllerState:
    """Dollars charged, and what is new of each instance."""
    before = state.instances
    state = meter.charge(settings, state, (*facts.machines, *facts.missed), facts.group, now)
    in_service = set(facts.group.in_state("InService")) if facts.group else set()
    leaving = set(facts.group.in_state("Terminating:Wait")) if facts.group else set()
    reclaimed = {machine.instance_id for machine in facts.machines if machine.reclaimed}
    missed = {machine.instance_id for machine in facts.missed}
    instances: dict[str, MeteredInstance] = {}
    passed = False
    unfit = interruptions = rebalances = 0
    for key, found in state.instances.items():
        said = facts.reports.get(key)
        # A report of another run is an old one: the node was there before the plan changed.
        if said and said.run_id == settings.run_id:
            found = replace(found, report=said.state, reported_at=said.modified_at)
        was_served, was_interrupted, was_rebalanced = found.served, found.interrupted, found.rebalanced
        found = replace(
            found,
            # The word of a node that came and went between two ticks proves it too.
            served=found.served or key in in_service or found.report not in (None, "unfit"),
            interrupted=was_interrupted or key in facts.interrupted or key in reclaimed,
            rebalanced=was_rebalanced or key in facts.rebalanced,
            leaving_since=(found.leaving_since or now) if key in leaving else None,
        )
        passed |= found.served and not was_served
        interruptions += found.interrupted and not was_interrupted
        rebalances += found.rebalanced and not was_rebalanced
        ended_now = found.ended_at is not None and (key not in before or before[key].ended_at is None)
        # What nobody saw says nothing of the nodes: they end themselves where nobody counts them.
        if ended_now and not found.served and not found.interrupted and state.phase in UP and key not in missed:
            unfit += 1
        instances[key] = found
    complete = len(in_service) >= settings.node_count
    return replace(
        state,
        instances=instances,
        # In a row: over weeks of replaced nodes, a bad one now and then is no sign of bad code.
        unfit_nodes=(0 if passed else state.unfit_nodes) + unfit,
        interruptions=state.interruptions + interruptions,
        rebalance_notices=state.rebalance_notices + rebalances,
        failed_launches=state.failed_launches + len(facts.failed_launches),
        last_failure=facts.failed_launches[-1].message[:300] if facts.failed_launches else state.last_failure,
        complete_since=(state.complete_since or now) if complete else None,
    )


def _obey(state: ControllerState, facts: Observation, now: datetime) -> ControllerState:
    """Take in a new request to run; one to stop is looked at in every tick (``_must_end``)."""
    request = facts.request
    if request == state.request:
        return state
    state = replace(state, request=request)
    if request is None or request.want != "run":
        return state
    reason = f"{request.by} asked to go on"
    if state.phase in UP and facts.group and facts.group.desired == 0 < state.desired_seen:
        # Asked while the controller was silent, of nodes that had ended themselves: it is not to pause now.
        return replace(state, desired_seen=0).with_phase("waiting", reason, now)
    if state.phase == "paused":
        return state.with_phase("waiting", reason, now)
    if state.phase == "draining" and state.after == "paused":
        return replace(state, after="waiting", reason=reason)
    if state.phase in ENDED:
        return _begin(state, now).with_phase("waiting", reason, now)
    if state.phase == "draining" and state.after in ENDED:
        return replace(_begin(state, now), after="waiting", reason=reason)
    return state


def _next(settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime) -> ControllerState:
    """The state one phase on; the same object where nothing changes."""
    if state.phase in ENDED:
        return _revived(settings, state, facts, now)
    end = _must_end(settings, state, facts, now)
    if end and state.phase == "draining" and state.after in PAUSES:
        return replace(state, after=end[0], reason=end[1])
    if end and state.phase in PAUSES:
        return state.with_phase(*end, now)
    if end and state.phase in UP:
        return state.with_phase("draining", end[1], now, after=end[0])
    if state.phase == "draining":
        # Now, as the state keeps no ceiling but the last tick's.
        if state.after == "over-budget" and not end and _is_raised(settings, state):
            return replace(state, after="waiting", reason="the ceiling was raised")
        if facts.group and facts.group.members:
            return state
        assert state.after is not None
        return state.with_phase(state.after, state.reason, now, next_attempt_at=state.next_attempt_at)
    if state.phase == "waiting":
        return _waiting(settings, state, facts, now)
    if state.phase == "paused":
        if facts.group and facts.group.desired > 0:
            asked = state.with_phase("waiting", "the group's desired size was raised from 0", now)
            end = _must_end(settings, asked, facts, now)
            # A pause has no nodes, so those that are there are the gang's first.
            return asked.with_phase(*end, now) if end else _waiting(settings, asked, facts, now, adopt=True)
        return state
    if settings.mode == "workers":
        # Of a stack whose nodes were a gang before.
        return state if state.phase == "running" else state.with_phase("running", "workers from now on", now)
    return _gang(settings, state, facts, now)


def _revived(
    settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime
) -> ControllerState:
    if state.phase == "stopped" and (facts.request is None or facts.request.want == "run"):
        return state.with_phase("waiting", "the request to stop is gone", now)
    if state.phase == "over-budget" and _is_raised(settings, state) and not _must_end(settings, state, facts, now):
        return state.with_phase("waiting", "the ceiling was raised", now)
    # What is trained stays the same run, and a block that was bought for it is paid from its start.
    if state.phase == "block-ended" and not _must_end(settings, state, facts, now):
        return state.with_phase("waiting", "the plan has another Capacity Block, or needs none", now)
    return state


def _is_raised(settings: ControllerSettings, state: ControllerState) -> bool:
    return settings.ceiling_usd is None or settings.ceiling_usd > (state.ceiling_usd or 0.0)


def _must_end(
    settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime
) -> tuple[Phase, str] | None:
    """Why the nodes have to go for good, whatever else happens; None where they need not."""
    if facts.request and facts.request.want == "stop":
        return "stopped", f"{facts.request.by} asked to stop; `gpufleet resume` goes on"
    if settings.mode == "training":
        reported = _reported(settings, state, now)
        if reported:
            return reported
    limit = unfit_limit(settings.node_count)
    if state.unfit_nodes > limit:
        return "unfit", (
            f"{state.unfit_nodes} nodes in a row failed their set-up or tests, and {limit} may: see the log streams "
            "node-init/ of the stack's log group, then `gpufleet resume`"
        )
    over = _over_budget(settings, state, facts, now)
    if over:
        return "over-budget", over
    if settings.block and now >= _block_drain_at(settings):
        return "block-ended", f"the Capacity Block ends at {settings.block.end:%Y-%m-%d %H:%M} UTC"
    return None


def _reported(settings: ControllerSettings, state: ControllerState, now: datetime) -> tuple[Phase, str] | None:
    for key, found in sorted(state.instances.items()):
        if found.report == "gave-up":
            return "failed", (
                f"{key} gave up: the training command failed again and again; see the log stream train/{key} of the "
                "stack's log group, then `gpufleet resume`"
            )
    done = [found.reported_at for found in state.instances.values() if found.report == "done" and found.reported_at]
    if len(done) >= settings.node_count:
        return "done", f"the training command ended well on all {settings.node_count} nodes"
    if done and now - min(done) >= DONE_GRACE:
        return "done", f"the training command ended well on {len(done)} of {settings.node_count} nodes"
    return None


def _block_drain_at(settings: ControllerSettings) -> datetime:
    """When a Capacity Block's nodes must begin to save, so that all is saved before EC2 ends them."""
    assert settings.block
    return settings.block.end - BLOCK_TAIL - timedelta(seconds=settings.drain_s) - ENDING - TICK


def _over_budget(settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime) -> str | None:
    """Why the nodes can no longer be paid until they would have ended; None where they can."""
    if settings.ceiling_usd is None:
        return None
    # Nodes still to come may all come before the next tick.
    rate = state.usd_per_hour + _missing_usd_per_hour(settings, state, facts)
    reserve = timedelta(seconds=settings.drain_s) + ENDING + TICK
    # The first start is the plan's own, which reckoned with the budget; another has to be worth its booting.
    if state.phase in ("waiting", "over-budget") and (state.instances or state.ended_usd):
        reserve += BOOT
    if state.spent_usd + rate * hours(reserve) < settings.ceiling_usd:
        return None
    return (
        f"{state.spent_usd:.2f} USD are spent, and ending the nodes takes up to {hours(reserve) * 60:.0f} minutes at "
        f"{rate:.2f} USD/h: the ceiling is {settings.ceiling_usd:.2f} USD (gpufleet:ceilingUsd)"
        + ("; the stack's reservation is billed until `pulumi destroy`" if settings.reserved_nodes else "")
    )


def _missing_usd_per_hour(settings: ControllerSettings, state: ControllerState, facts: Observation) -> float:
    if state.phase in ("paused", "draining"):
        return 0.0
    leaving = set(facts.group.leaving) if facts.group else set()
    staying = sum(found.ended_at is None and key not in leaving for key, found in state.instances.items())
    price = settings.dearest_usd_per_hour
    if settings.reserved_nodes:
        # Billed already, unused.
        price = 0.0
    elif not state.on_demand and not settings.on_demand_base and "spot" in settings.prices:
        price = max(settings.prices["spot"].values())
    return max(0, settings.node_count - staying) * (price + settings.volume_usd_per_node_hour)


def _waiting(
    settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime, *, adopt: bool = False
) -> ControllerState:
    group, count = facts.group, settings.node_count
    if settings.block and now < settings.block.start:
        return _because(state, f"the Capacity Block begins at {settings.block.start:%Y-%m-%d %H:%M} UTC")
    if group is None:
        return _because(state, f"there is no group {settings.group}: `pulumi up` makes it")
    if group.members and not adopt:
        return _because(state, f"{len(group.members)} nodes of before are still ending")
    if state.next_attempt_at and now < state.next_attempt_at:
        return state
    if settings.mode == "workers":
        return state.with_phase("running", "the scaling policies decide how many workers run", now)
    if group.max_size < count and not settings.scheduled:
        return _because(state, f"the group's largest size is {group.max_size}, the plan has {count}: run `pulumi up`")
    attempt = state.attempts + 1
    return state.with_phase(
        "starting",
        f"{count} nodes asked for, attempt {attempt}",
        now,
        attempts=attempt,
        attempt_started_at=now,
        incomplete_since=None,
    )


def _because(state: ControllerState, reason: str) -> ControllerState:
    return state if state.reason == reason else replace(state, reason=reason)


def _gang(settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime) -> ControllerState:
    """A gang that starts or trains: all nodes, or within the window none."""
    group, count = facts.group, settings.node_count
    if group is None:
        return state
    if group.desired == 0 and state.desired_seen > 0:
        if group.created_at > state.updated_at:
            # `pulumi destroy` in the middle of a run, and `pulumi up`: nobody wants a pause.
            return _rest(settings, replace(state, desired_seen=0), "the stack was deployed anew", now)
        reason = "a schedule, or a person, set the group's size to 0"
        silent = now - state.updated_at
        if silent > LEASE:
            reason = (
                f"the controller was silent for {hours(silent) * 60:.0f} minutes, so the nodes saved and ended "
                "themselves: see its log group, then `gpufleet resume`"
            )
        return state.with_phase("draining", reason, now, after="paused")
    in_service = len(group.in_state("InService"))
    if in_service >= count:
        if state.phase == "starting":
            return state.with_phase(
                "running", f"all {count} nodes are in service", now, attempt_started_at=None, incomplete_since=None
            )
        if state.incomplete_since:
            return replace(state, incomplete_since=None, reason=f"all {count} nodes are in service again")
        if state.attempts and state.complete_since and now - state.complete_since >= PROVEN:
            return replace(state, attempts=0)
        return state
    since = state.attempt_started_at if state.phase == "starting" else state.incomplete_since
    if since is None:
        return replace(state, incomplete_since=now, reason=f"{in_service} of {count} nodes are in service")
    # A tick early: the window is over before the next one.
    if now - since + TICK > timedelta(seconds=settings.gang_window_s):
        return _give_back(settings, state, in_service, now)
    return state


def _give_back(settings: ControllerSettings, state: ControllerState, in_service: int, now: datetime) -> ControllerState:
    """End an incomplete gang: those who wait for the others are paid. Then try again, later or with other nodes."""
    reason = f"{in_service} of {settings.node_count} nodes within {settings.gang_window_s // 60} minutes"
    if state.last_failure:
        reason += f" (AWS: {state.last_failure})"
    if settings.fallback_on_demand and not state.on_demand:
        return state.with_phase(
            "draining", f"{reason}: on-demand nodes instead", now, after="waiting", on_demand=True, attempts=0
        )
    # A block is paid whether it is used or not: only its end ends the attempts.
    if settings.block:
        next_attempt_at = now + RETRY_WAITS[0]
    elif state.attempts > len(RETRY_WAITS):
        reason += f", {state.attempts} times in a row: `gpufleet resume` tries again"
        return state.with_phase("draining", reason, now, after="failed")
    else:
        next_attempt_at = now + RETRY_WAITS[max(0, state.attempts - 1)]
    reason += f": the next attempt is at {next_attempt_at:%H:%M} UTC"
    return state.with_phase("draining", reason, now, after="waiting", next_attempt_at=next_attempt_at)


def _nodes(settings: ControllerSettings, state: ControllerState, group: AutoScalingGroup | None) -> NodeCounts:
    if group is None:
        return NodeCounts()
    wanted = settings.node_count if state.phase in UP else 0
    if settings.mode == "workers" and wanted:
        wanted = group.desired
    in_service, leaving = len(group.in_state("InService")), len(group.leaving)
    return NodeCounts(
        wanted=wanted,
        in_service=in_service,
        pending=len(group.members) - in_service - leaving,
        terminating=leaving,
    )


def _actions(settings: ControllerSettings, state: ControllerState, facts: Observation, now: datetime) -> list[Action]:
    group = facts.group
    if group is None:
        return []
    up = state.phase in UP
    found: list[Action] = []
    protected = tuple(
        member.instance_id for member in group.members if member.protected and member.state == "InService"
    )
    sizes = _sizes(settings, state, group, up=up)
    if protected and not up:
        found.append(LiftProtection(instance_ids=protected))
        # Again, though it may be 0 already: the node entered service, protected, after it was set.
        sizes = replace(sizes, desired=0)
    if sizes != SetGroup():
        found.append(sizes)
    if not up:
        found += [AbandonLaunch(instance_id=key) for key in sorted(group.in_state("Pending:Wait"))]
    # A worker may protect itself, and hostile code in one does so again each time it is let go. Not before the size is
    # 0: a node that is ended would be replaced.
    if state.phase == "draining" and group.desired == 0 and now - state.since >= ENDING:
        found += [EndStaying(instance_id=key) for key in sorted(group.in_state("InService"))]
    limit = timedelta(seconds=settings.drain_s)
    for key in sorted(group.in_state("Terminating:Wait")):
        instance = state.instances.get(key)
        if instance and instance.leaving_since and now - instance.leaving_since >= limit:
            found.append(EndLeaving(instance_id=key))
    return found


def _sizes(settings: ControllerSettings, state: ControllerState, group: AutoScalingGroup, *, up: bool) -> SetGroup:
    """What the group's sizes have to change to.

    A gang: only the desired size, which the Pulumi program does not declare. Workers: the desired size is the scaling
    policies', so it is the bounds they work in that stop and start them; the program ignores changes of these. So it
    does of a scheduled gang's: a schedule must not start nodes for a run that has ended, every day for some minutes.
    """
    if settings.mode == "workers":
        bounds = (settings.min_nodes, settings.node_count) if up else (0, 0)
        if (group.min_size, group.max_size) == bounds and (up or group.desired == 0):
            return SetGroup()
        desired = max(settings.min_nodes, min(group.desired, settings.node_count)) if up else 0
        return SetGroup(desired=desired, min_size=bounds[0], max_size=bounds[1])
    desired = settings.node_count if up else 0
    base = min_size = max_size = None
    most = 0 if state.phase in ENDED else settings.node_count
    # Of a group that was workers' or scheduled before, no `up` sets the bounds back: it ignored how they moved.
    stale = group.min_size > 0 or (not settings.scheduled and group.max_size == 0)
    if stale or (settings.scheduled and group.max_size != most):
        min_size, max_size = 0, most if settings.scheduled else settings.node_count
    if up and group.on_demand_base is not None:
        instead = state.on_demand and settings.fallback_on_demand
        wanted = settings.node_count if instead else settings.on_demand_base
        base = wanted if wanted != group.on_demand_base else None
    wanted_size = desired if desired != group.desired else None
    return SetGroup(desired=wanted_size, min_size=min_size, max_size=max_size, on_demand_base=base)
