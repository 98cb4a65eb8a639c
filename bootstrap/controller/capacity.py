"""Count the capacity events of the stack's pools (``bootstrap.contract.capacity``), as far as their zones are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from bootstrap.contract.capacity import PoolEvents, PoolName
from bootstrap.contract.settings import Place
from bootstrap.contract.state import ControllerState
from bootstrap.controller.launches import is_pool_empty
from bootstrap.controller.meter import hours
from bootstrap.controller.observation import LaunchAnswer, Machine, Tick

# Reclaims of one pool that come together come within three minutes (arXiv:2604.16457: more than 92% of them).
TOGETHER = timedelta(minutes=3)
# A drought that the stack has not asked after for longer has an unknown end: the longest wait between two attempts.
UNWATCHED = timedelta(hours=2)


def count_events(tick: Tick, before: ControllerState | None, after: ControllerState) -> dict[str, PoolEvents]:
    """Return the events of all pools, with this tick's; ``after`` has its instances."""
    known = before.instances if before else {}
    found = dict(after.capacity)
    by_pool: dict[str, list[Machine]] = {}
    for machine in tick.seen.machines:
        if pool := _pool(tick, machine.subnet, machine.instance_type, machine.lifecycle):
            by_pool.setdefault(pool, []).append(machine)
    for pool, machines in by_pool.items():
        lived = {machine.instance_id: _lived_hours(tick, machine, before) for machine in machines}
        came = [machine for machine in machines if machine.instance_id not in known]
        taken = [key for key in lived if _is_taken_now(key, before, after)]
        if any(lived.values()) or came or taken:
            events = _launch(_events(tick, found, pool), came)
            events = replace(
                events, node_hours=events.node_hours + sum(lived.values()), hours=events.hours + max(lived.values())
            )
            found[pool] = _reclaim(events, len(taken), tick.now)
    return found


def count_refusal(
    tick: Tick, found: Mapping[str, PoolEvents], place: Place, answer: LaunchAnswer
) -> dict[str, PoolEvents]:
    """Return the events with a place's refusal; without a type in the answer it is of all of its types."""
    error, pools = answer.error, dict(found)
    assert error
    for instance_type in (error.instance_type or place.instance_types).split(","):
        if is_pool_empty(error.code) and (pool := _pool(tick, error.subnet, instance_type, place.purchase)):
            events = _events(tick, pools, pool)
            pools[pool] = replace(_empty(events, tick.now), refused=events.refused + 1)
    # A part of the gang came, and is given back.
    for instance_type in answer.instance_types.values():
        if pool := _pool(tick, error.subnet, instance_type, place.purchase):
            events = _events(tick, pools, pool)
            pools[pool] = replace(events, launched=events.launched + 1)
    return pools


def _pool(tick: Tick, subnet: str, instance_type: str, purchase: str) -> str:
    """Return the key of a pool; empty where the zone is unknown."""
    zone_id = tick.settings.zones.get(subnet)
    return str(PoolName(tick.settings.region, zone_id, instance_type, purchase)) if zone_id and instance_type else ""


def _events(tick: Tick, found: Mapping[str, PoolEvents], pool: str) -> PoolEvents:
    asked = tick.settings.node_count if tick.settings.mode == "training" else 1
    known = found.get(pool) or PoolEvents(first_at=tick.now, last_at=tick.now, asked=asked)
    return replace(known, last_at=tick.now, asked=asked)


def _lived_hours(tick: Tick, machine: Machine, before: ControllerState | None) -> float:
    """Hours that a node has run since the last tick."""
    since = max(machine.launched_at, before.updated_at) if before else machine.launched_at
    until = tick.now if machine.running else machine.until
    # The end of a reclaimed node is not told: it ended since the last tick.
    if until is None:
        known = before.instances.get(machine.instance_id) if before else None
        until = since if known is None or known.ended_at else tick.now
    return hours(until - since)


def _is_taken_now(key: str, before: ControllerState | None, after: ControllerState) -> bool:
    known, instance = before.instances.get(key) if before else None, after.instances.get(key)
    return bool(instance and instance.interrupted and not (known and known.interrupted))


def _launch(events: PoolEvents, came: list[Machine]) -> PoolEvents:
    if not came:
        return events
    if events.empty_at is not None:
        first = min(machine.launched_at for machine in came)
        # Capacity came back at an unknown moment since the pool was last seen empty: halfway.
        gap = max(first - events.empty_at, timedelta(0))
        events = _end_drought(events, gap / 2 if gap <= UNWATCHED else None)
    return replace(events, launched=events.launched + len(came))


def _reclaim(events: PoolEvents, nodes: int, now: datetime) -> PoolEvents:
    if not nodes:
        return events
    apart = events.reclaimed_at is None or now - events.reclaimed_at > TOGETHER
    return replace(
        _empty(events, now), reclaimed=events.reclaimed + nodes, reclaims=events.reclaims + apart, reclaimed_at=now
    )


def _empty(events: PoolEvents, now: datetime) -> PoolEvents:
    if events.empty_at is not None and now - events.empty_at > UNWATCHED:
        events = _end_drought(events, None)
    return replace(events, empty_since=events.empty_since or now, empty_at=now)


def _end_drought(events: PoolEvents, after: timedelta | None) -> PoolEvents:
    """End the drought so long after it was last seen; None: at an unknown time, so its end does not count."""
    assert events.empty_since
    assert events.empty_at
    seen = events.empty_at + (after or timedelta(0)) - events.empty_since
    return replace(
        events,
        returns=events.returns + (after is not None),
        empty_hours=events.empty_hours + hours(seen),
        empty_since=None,
        empty_at=None,
    )
