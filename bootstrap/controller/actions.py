"""Choose the actions that bring the Auto Scaling group to what the state wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from bootstrap.contract.ending import (
    TERMINATE,
    EndAction,
    abandon_launches,
    end_leaving,
    end_staying,
    lift_protection,
)
from bootstrap.contract.settings import Place
from bootstrap.contract.state import ENDED, UP, ControllerState
from bootstrap.controller.observation import AutoScalingGroup, Target, Tick
from bootstrap.controller.reservations import find_unwanted


@dataclass(frozen=True, kw_only=True, slots=True)
class SetGroup:
    """Set the group's sizes, OnDemandBaseCapacity, subnets, types and reservation; None leaves a value as it is."""

    desired: int | None = None
    min_size: int | None = None
    max_size: int | None = None
    on_demand_base: int | None = None
    subnets: str | None = None  # with commas, as the types
    instance_types: str | None = None
    target: Target | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelReservation:
    """Cancel a start reservation; instances in it run on, on demand."""

    reservation_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeProcesses:
    """Resume processes that Auto Scaling or the controller has suspended, and ends of nodes that a person has."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendLaunches:
    """Keep Auto Scaling from filling the warm pool, whose size it maintains beside a group of none.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-suspend-resume-processes.html
    """


Action = SetGroup | CancelReservation | ResumeProcesses | SuspendLaunches | EndAction

LAUNCH = "Launch"
# The Pulumi program suspends it.
_STAYS_SUSPENDED = "AZRebalance"


def choose_actions(tick: Tick, state: ControllerState) -> Sequence[Action]:
    """Return the actions of this tick; without a group, only those that end reservations."""
    group, now = tick.seen.group, tick.now
    cancelled = [CancelReservation(reservation_id=key) for key in find_unwanted(tick, state)]
    if group is None:
        return cancelled
    up = state.phase in UP
    protected = [] if up else lift_protection(group.members)
    sizes = _workers_sizes(tick, group, up=up) if tick.settings.mode == "workers" else _gang_sizes(tick, state, group)
    if protected:
        # Again: the node entered service, protected, after the size was set.
        sizes = replace(sizes, desired=0)
    actions: list[Action] = []
    own = (LAUNCH,) if group.launches_off and state.launches_off else ()
    if up and (names := (*(name for name in group.suspended if name != _STAYS_SUSPENDED), *own)):
        actions.append(ResumeProcesses(names=names))
    if not up and group.ends_off:
        actions.append(ResumeProcesses(names=(TERMINATE,)))
    if not up and group.warm_pool and not group.launches_off:
        actions.append(SuspendLaunches())
    target = _choose_target(tick, state)
    if not target.only and target != group.target:
        # Apart from the sizes, which must not fail with it; before them, so that nodes fill the owned reservation; and
        # before the reservation of a start ends: nothing could launch.
        actions.append(SetGroup(target=target))
    actions += [*protected, *([sizes] if sizes != SetGroup() else []), *cancelled]
    # A hook holds an instance that has ended, too, and a launch is not looked at before it is in service:
    # https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks-overview.html
    ended = {machine.instance_id for machine in tick.seen.machines if machine.ended}
    actions += abandon_launches(one for one in group.members if not up or one.instance_id in ended)
    if state.phase == "draining" and group.desired == 0:
        actions += end_staying(group.members, state.since, now)
    leaving_since = {key: since for key, instance in state.instances.items() if (since := instance.leaving_since)}
    limit = timedelta(seconds=tick.settings.drain_s)
    return actions + end_leaving(group.members, leaving_since, limit, now, ended)


def _workers_sizes(tick: Tick, group: AutoScalingGroup, *, up: bool) -> SetGroup:
    # Workers start and stop by the bounds of the size, which the Pulumi program does not set back.
    smallest, largest = tick.settings.min_nodes, tick.settings.node_count
    min_size, max_size = (smallest, largest) if up else (0, 0)
    if (group.min_size, group.max_size) == (min_size, max_size) and (up or group.desired == 0):
        return SetGroup()
    desired = max(smallest, min(group.desired, largest)) if up else 0
    return SetGroup(desired=desired, min_size=min_size, max_size=max_size)


def _gang_sizes(tick: Tick, state: ControllerState, group: AutoScalingGroup) -> SetGroup:
    # A gang starts and stops by the desired size, which the Pulumi program does not declare.
    settings, up = tick.settings, state.phase in UP
    desired = settings.node_count if up else 0
    if up and state.reservation and state.reservation.is_asked:
        desired = group.desired
    base = min_size = max_size = None
    # Once a run has ended, no schedule may start nodes.
    largest = 0 if state.phase in ENDED and settings.scheduled else settings.node_count
    # `pulumi up` leaves the bounds of workers or of a schedule before.
    stale = group.min_size > 0 or (not settings.scheduled and group.max_size == 0)
    if stale or (settings.scheduled and group.max_size != largest):
        min_size, max_size = 0, largest
    # A gang of before the settings had places is in the plan's own.
    name = state.place.name if state.place else settings.own_place
    place = settings.places.get(name) if up else None
    if up and group.on_demand_base is not None:
        on_demand = state.on_demand and (settings.fallback_on_demand or settings.places)
        wanted = settings.node_count if on_demand or (place and place.purchase == "on-demand") else 0
        if place is None or name == settings.own_place:
            wanted = max(wanted, settings.on_demand_base)
        base = wanted if wanted != group.on_demand_base else None
    sizes = SetGroup(
        desired=desired if desired != group.desired else None, min_size=min_size, max_size=max_size, on_demand_base=base
    )
    target = _choose_target(tick, state)
    if target.only and target != group.target:
        sizes = replace(sizes, target=target)
    return _with_place(sizes, place, group) if place else sizes


def _choose_target(tick: Tick, state: ControllerState) -> Target:
    """Choose the owned reservation and that of a start: nodes beside an idle start reservation would be paid twice."""
    owned = (tick.settings.owned.reservation_id,) if tick.settings.owned else ()
    asked = state.reservation if state.phase == "starting" else None
    if asked and asked.reservation_id and not asked.over:
        return Target(reservation_ids=tuple(sorted((*owned, asked.reservation_id))), only=True)
    return Target(reservation_ids=owned)


def _with_place(sizes: SetGroup, place: Place, group: AutoScalingGroup) -> SetGroup:
    # Only while the group is empty: a cluster placement group is in one zone:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-groups.html
    if group.subnets != frozenset(place.subnets.split(",")) and not group.members:
        sizes = replace(sizes, subnets=place.subnets)
    if group.instance_types and group.instance_types != tuple(place.instance_types.split(",")):
        sizes = replace(sizes, instance_types=place.instance_types)
    return sizes
