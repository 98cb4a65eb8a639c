"""Count the capacity events of the stack's pools (``bootstrap.contract.capacity``), as far as their zones are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from bootstrap.contract.capacity import PoolEvents, PoolName
from bootstrap.contract.settings import Place
from bootstrap.contract.state import ControllerState, MeteredInstance
from bootstrap.controller.launches import POOL_EMPTY
from bootstrap.controller.meter import hours
from bootstrap.controller.observation import LaunchAnswer, Tick

# Reclaims of one pool that come together come within three minutes (arXiv:2604.16457: more than 92% of them).
TOGETHER = timedelta(minutes=3)
# A drought that the stack has not asked after for longer has an unknown end: the longest wait between two attempts.
UNWATCHED = timedelta(hours=2)


def count_events(tick: Tick, before: ControllerState | None, after: ControllerState) -> dict[str, PoolEvents]:
    """Return the events of all pools, with this tick's; ``after`` has its instances, metered."""
    known, found = before.instances if before else {}, dict(after.capacity)
    by_pool: dict[str, list[tuple[MeteredInstance | None, MeteredInstance]]] = defaultdict(list)
    for key, instance in after.instances.items():
        if pool := _pool(tick, instance.zone_id, instance.instance_type, instance.lifecycle):
            by_pool[pool].append((known.get(key), instance))
    for pool, pairs in by_pool.items():
        lived = [hours(new.metered_until - (old.metered_until if old else new.launched_at)) for old, new in pairs]
        came = [new.launched_at for old, new in pairs if old is None]
        taken = sum(new.interrupted and not (old and old.interrupted) for old, new in pairs)
        if any(lived) or came or taken:
            events = _events(tick, found, pool)
            if came and events.empty_at and events.empty_since:
                # Capacity came back at an unknown moment since the pool was last seen empty: halfway.
                events = _end_drought(events, max(min(came) - events.empty_at, timedelta(0)))
            events = replace(
                events,
                launched=events.launched + len(came),
                node_hours=events.node_hours + sum(lived),
                hours=events.hours + max(lived),
            )
            if taken:
                apart = events.reclaimed_at is None or tick.now - events.reclaimed_at > TOGETHER
                taken, reclaims = events.reclaimed + taken, events.reclaims + apart
                events = replace(_empty(events, tick.now), reclaimed=taken, reclaims=reclaims, reclaimed_at=tick.now)
            found[pool] = events
    return found


def count_refusal(
    tick: Tick, found: Mapping[str, PoolEvents], place: Place, answer: LaunchAnswer
) -> dict[str, PoolEvents]:
    """Return the events with a place's refusal."""
    is_empty = answer.code in POOL_EMPTY
    pool = _pool(tick, tick.settings.zones.get(answer.subnet, ""), place.instance_type, place.purchase)
    if not pool or not (is_empty or answer.ids):
        return dict(found)
    events = _events(tick, found, pool)
    events = replace(_empty(events, tick.now), refused=events.refused + 1) if is_empty else events
    # A part of the gang may have come, and is given back.
    return {**found, pool: replace(events, launched=events.launched + len(answer.ids))}


def _pool(tick: Tick, zone_id: str, instance_type: str, purchase: str) -> str:
    """Return the key of a pool; empty where the zone is unknown."""
    return str(PoolName(tick.settings.region, zone_id, instance_type, purchase)) if zone_id else ""


def _events(tick: Tick, found: Mapping[str, PoolEvents], pool: str) -> PoolEvents:
    asked = tick.settings.node_count if tick.settings.mode == "training" else 1
    known = found.get(pool) or PoolEvents(first_at=tick.now, last_at=tick.now, asked=asked)
    return replace(known, last_at=tick.now, asked=asked)


def _empty(events: PoolEvents, now: datetime) -> PoolEvents:
    if events.empty_at is not None and now - events.empty_at > UNWATCHED:
        events = _end_drought(events, now - events.empty_at)
    return replace(events, empty_since=events.empty_since or now, empty_at=now)


def _end_drought(events: PoolEvents, unseen: timedelta) -> PoolEvents:
    """End the drought halfway in the time since it was last seen; after a long time its end does not count."""
    assert events.empty_since and events.empty_at
    is_watched = unseen <= UNWATCHED
    lasted = events.empty_at - events.empty_since + (unseen / 2 if is_watched else timedelta(0))
    return replace(
        events,
        returns=events.returns + is_watched,
        empty_hours=events.empty_hours + hours(lasted),
        empty_since=None,
        empty_at=None,
    )
