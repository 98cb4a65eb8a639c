"""Choose the actions that bring the Auto Scaling groups to what the state wants; ``launches.py`` asks for nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from bootstrap.contract import ending
from bootstrap.contract.ending import EndStaying, GiveBack
from bootstrap.contract.state import UP, ControllerState
from bootstrap.controller.observation import AutoScalingGroup, Tick


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeGroup:
    """Set the group's sizes, or resume processes: suspended by Auto Scaling, and ends of nodes by anyone."""

    operation: Literal["update_auto_scaling_group", "resume_processes"]
    parameters: Mapping[str, Any]


Action = ChangeGroup | ending.EndAction


class GroupAction(NamedTuple):
    """An action on the group with a key (``ControllerSettings.groups``)."""

    group: str
    action: Action


def wanted_places(tick: Tick, state: ControllerState) -> tuple[str, ...]:
    """Return the places whose groups have, or get, nodes."""
    beside = (state.beside.name,) if state.beside and state.beside.name in tick.settings.places else ()
    if state.phase in UP:
        return (tick.place_name(state), *beside)
    return beside if state.phase == "draining" and state.next_place == state.beside else ()


def choose_actions(tick: Tick, state: ControllerState) -> Sequence[GroupAction]:
    """Return the actions of this tick."""
    wanted = {key: place for place in wanted_places(tick, state) for key in tick.settings.keys_of(place)}
    return [
        GroupAction(key, action)
        for key, group in tick.seen.groups.items()
        for action in _of_group(tick, state, group, wanted.get(key))
    ]


def _of_group(tick: Tick, state: ControllerState, group: AutoScalingGroup, place: str | None) -> list[Action]:
    """Return a group's actions; ``place``: what it is wanted for."""
    now, ended, is_wanted, actions = tick.now, tick.seen.ended, place is not None, list[Action]()
    gone = _leaving_now(tick, state, place, group) if place else []
    protected = [] if is_wanted else ending.lift_protection(group.members)
    sizes = _sizes(tick, state, group, place, gone)
    # Workers are replaced: their group may not shrink (https://github.com/buildkite/elastic-ci-stack-for-aws/issues/1261).
    actions += [(GiveBack if tick.settings.mode == "training" else EndStaying)(instance_id=key) for key in gone]
    if protected:
        # Again: the node entered service, protected, after the size was set.
        sizes["DesiredCapacity"] = 0
    if resumed := [name for name in group.suspended if (name != ending.TERMINATE) is is_wanted]:
        actions.append(ChangeGroup(operation="resume_processes", parameters={"ScalingProcesses": resumed}))
    actions += protected
    if sizes:
        actions.append(ChangeGroup(operation="update_auto_scaling_group", parameters=sizes))
    # A hook holds an instance that has ended, too, and a launch is not looked at before it is in service:
    # https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks-overview.html
    actions += ending.abandon_launches(it for it in group.members if not is_wanted or it.instance_id in ended)
    if not is_wanted and group.desired == 0:
        actions += ending.end_staying(group.members, state.since, now)
    leaving_since = {key: since for key, instance in state.instances.items() if (since := instance.leaving_since)}
    limit = timedelta(seconds=tick.settings.drain_s)
    # A node that never served has nothing to save.
    unused = {key for key, instance in state.instances.items() if instance.given_back and not instance.served}
    return [*actions, *ending.end_leaving(group.members, leaving_since, limit, now, ended | unused)]


def _leaving_now(tick: Tick, state: ControllerState, place: str, group: AutoScalingGroup) -> list[str]:
    """Return the nodes that leave a wanted group, which would launch others in their place.

    They are nodes that EC2 has ended, nodes in service whose maintenance begins before the run's end, and nodes beyond
    the gang, the youngest: a person may raise each of a place's two groups.
    """
    ended, known = tick.seen.ended, state.instances
    due = {key: at for key, instance in known.items() if (at := instance.maintenance_at)}
    if tick.settings.mode == "workers":
        return [key for key in group.in_service if key in due and key not in ended]
    left = (1 - state.progress) * timedelta(hours=tick.settings.places[place].hours_p95)
    staying = [key for of in tick.groups(place) for key in of.staying(ended)]
    staying.sort(key=lambda key: known[key].launched_at if key in known else tick.now)
    surplus = set(staying[tick.settings.node_count :]).intersection(group.staying(ended))
    gone = {key for key in group.in_service if key in ended or (key in due and due[key] - tick.now <= left)}
    return sorted(surplus | gone)


def _sizes(
    tick: Tick, state: ControllerState, group: AutoScalingGroup, place: str | None, gone: list[str]
) -> dict[str, int]:
    """Keep a gang's size at its living nodes, so that Auto Scaling launches none by itself; workers move by bounds."""
    settings, is_gang = tick.settings, tick.settings.mode == "training"
    smallest = settings.min_nodes if place else 0
    largest = settings.node_count if place or is_gang else 0
    sizes = {} if (group.min_size, group.max_size) == (smallest, largest) else {"MinSize": smallest, "MaxSize": largest}
    size, desired = group.desired, max(smallest, min(group.desired, largest))
    if is_gang:
        size, desired = size - len(gone), len(group.staying(tick.seen.ended.union(gone))) if place else 0
    # A launch that has no answer yet may have raised the size before its nodes are listed.
    is_open = state.launch is not None and state.launch.place == place
    return sizes if desired == size or is_open else {**sizes, "DesiredCapacity": desired}
