"""Meter dollars from EC2's word on each instance; where a time is unknown, the dearer one counts.

An instance is charged from where its meter stands: a missed tick is made up for, a repeated one charges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from bootstrap.contract.ending import LEAVING
from bootstrap.contract.settings import ControllerSettings, Lifecycle
from bootstrap.contract.state import UP, ControllerState, MeteredInstance, NodeCounts
from bootstrap.contract.timings import LEASE, LEASE_ACTS
from bootstrap.controller.observation import Machine, Tick

# Billed at least: https://aws.amazon.com/ec2/pricing/on-demand/
SHORTEST = timedelta(seconds=60)
# After a day the state keeps only an ended instance's spend.
KEEP_ENDED = timedelta(days=1)


def hours(duration: timedelta) -> float:
    """Convert to hours; 0 for a negative duration."""
    return max(0.0, duration.total_seconds()) / 3600


def begin(
    settings: ControllerSettings, lifecycle: Lifecycle, instance_type: str, subnet: str, launched_at: datetime
) -> MeteredInstance:
    """Begin the meter of an instance."""
    return MeteredInstance(
        instance_type=instance_type,
        zone_id=settings.zones.get(subnet, ""),
        launched_at=launched_at,
        metered_until=launched_at,
        lifecycle=lifecycle,
        usd_per_hour=settings.usd_per_hour(lifecycle, instance_type),
    )


def charge(tick: Tick, state: ControllerState) -> ControllerState:
    """Charge every instance, the stack's own cost and its reservation."""
    settings, now = tick.settings, tick.now
    described = {machine.instance_id: machine for machine in tick.seen.machines}
    begun = {
        key: begin(settings, it.lifecycle, it.instance_type, it.subnet, it.launched_at) for key, it in described.items()
    }
    instances = {
        key: _charge_described(settings, instance, described[key], now)
        if key in described
        else _charge_forgotten(tick, instance)
        for key, instance in {**begun, **state.instances}.items()
    }
    kept = {
        key: known
        for key, known in instances.items()
        # An outage may have had thousands of workers that no tick saw.
        if (key in state.instances or not described[key].forgotten)
        and (not known.ended_at or known.ended_at >= now - KEEP_ENDED)
    }
    ended_usd = state.ended_usd + sum(known.spent_usd for key, known in instances.items() if key not in kept)
    # A stack that was destroyed and deployed again cost nothing in between.
    since = max(state.updated_at, tick.seen.created_at or state.updated_at)
    fixed_usd = state.fixed_usd + hours(now - since) * stack_usd_per_hour(settings, state.instances)
    state = replace(state, instances=kept, ended_usd=ended_usd, fixed_usd=fixed_usd)
    alive_usd = sum(instance.usd_per_hour for instance in kept.values() if instance.ended_at is None)
    elsewhere = state.counted_elsewhere
    return replace(
        state,
        spent_usd=state.total_usd - state.earlier_usd + sum(spend.usd_until(now) for spend in elsewhere),
        usd_per_hour=alive_usd + stack_usd_per_hour(settings, kept) + sum(spend.usd_per_hour for spend in elsewhere),
    )


def stack_usd_per_hour(settings: ControllerSettings, instances: Mapping[str, MeteredInstance]) -> float:
    """Price an hour of the stack itself, with what ``instances`` leave unused of its own reservation."""
    # A reservation is billed at the on-demand price while nothing runs in it:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-pricing-billing.html
    unused = settings.reserved_nodes - sum(instance.ended_at is None for instance in instances.values())
    return settings.fixed_usd_per_hour + max(0, unused) * settings.dearest_usd_per_hour


def _charge_described(
    settings: ControllerSettings, instance: MeteredInstance, machine: Machine, now: datetime
) -> MeteredInstance:
    if instance.ended_at is not None and machine.ended:
        return instance
    price = settings.usd_per_hour(machine.lifecycle, machine.instance_type)
    if machine.instance_type not in settings.prices.get(machine.lifecycle, {}):
        # A node of the plan before may have been dearer.
        price = max(price, instance.usd_per_hour)
    if machine.usd_per_hour is not None:
        price = machine.usd_per_hour + settings.volume_usd_per_node_hour
    until = max(machine.until or now, machine.launched_at + SHORTEST) if machine.ended else now
    return replace(
        _meter(instance, until, price),
        ended_at=until if machine.ended else None,
        lifecycle=machine.lifecycle,
        usd_per_hour=price,
    )


def _charge_forgotten(tick: Tick, instance: MeteredInstance) -> MeteredInstance:
    """Charge an instance whose end no answer tells: until now, or its lease's end."""
    # EC2's answers are eventually consistent: where it describes the instance again, no gap is left.
    if instance.ended_at is not None:
        return instance
    until = min(tick.now, instance.metered_until + LEASE + LEASE_ACTS + timedelta(seconds=tick.settings.drain_s))
    return replace(_meter(instance, until, instance.usd_per_hour), ended_at=until)


def _meter(instance: MeteredInstance, until: datetime, usd_per_hour: float) -> MeteredInstance:
    spent_usd = instance.spent_usd + hours(until - instance.metered_until) * usd_per_hour
    return replace(instance, metered_until=max(instance.metered_until, until), spent_usd=spent_usd)


def update_instances(tick: Tick, state: ControllerState) -> ControllerState:
    """Charge all instances, and count interruptions and unfit nodes."""
    settings, seen, now, before, ended = tick.settings, tick.seen, tick.now, state.instances, tick.seen.ended
    is_after_outage = now - state.updated_at > LEASE
    state = charge(tick, state)
    in_service = {key for group in seen.groups.values() for key in group.in_service}
    leaving = {it.instance_id for group in seen.groups.values() for it in group.members if it.state == LEAVING}
    interrupted = seen.interrupted | {machine.instance_id for machine in seen.machines if machine.reclaimed}
    instances: dict[str, MeteredInstance] = {}
    passed, unfit, interruptions = False, 0, 0
    for key, old in state.instances.items():
        report, new = seen.reports.get(key), old
        if report:
            # One of another run, or read only after the run was begun again, is old. It is not read again.
            is_own = report.run_id == settings.run_id and report.at >= state.run_started_at
            new = replace(new, report=report.state if is_own else None, reported_at=report.modified_at)
        new = replace(
            new,
            # A report proves the service of a node that came and went between two ticks.
            served=old.served or key in in_service or new.report not in (None, "unfit"),
            interrupted=old.interrupted or key in interrupted,
            maintenance_at=seen.maintenance.get(key, old.maintenance_at),
            leaving_since=(old.leaving_since or now) if key in leaving else None,
        )
        passed |= new.served and not old.served
        interruptions += new.interrupted and not old.interrupted
        # A node that EC2 has yet to describe again is no failure:
        # https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
        ended_now = key in ended and (key not in before or before[key].ended_at is None)
        # Nodes end themselves during an outage. A part of a launch ends before its answer is written.
        is_end_of_another = new.served or new.interrupted or new.given_back or is_after_outage or state.launch
        # Beside a complete gang it is a node of the place that the gang would move to.
        if ended_now and not is_end_of_another and state.phase in UP and not state.complete_since:
            unfit += 1
        instances[key] = new
    place = tick.place_name(state)
    return replace(
        state,
        instances=instances,
        # In a row: a bad node now and then is no sign of bad code.
        unfit_nodes=(0 if passed else state.unfit_nodes) + unfit,
        interruptions=state.interruptions + interruptions,
        complete_since=(state.complete_since or now) if tick.in_service(place) >= settings.node_count else None,
        refused_since=None if tick.staying(place) >= settings.node_count else state.refused_since,
    )


def count_nodes(tick: Tick, state: ControllerState) -> NodeCounts:
    """Count the groups' members by state."""
    groups = tick.seen.groups.values()
    wanted = tick.settings.node_count if state.phase in UP and groups else 0
    if tick.settings.mode == "workers" and wanted:
        wanted = sum(group.desired for group in groups)
    in_service, leaving = sum(len(group.in_service) for group in groups), sum(len(group.leaving) for group in groups)
    pending = sum(len(group.members) for group in groups) - in_service - leaving
    return NodeCounts(wanted=wanted, in_service=in_service, pending=pending, terminating=leaving)
