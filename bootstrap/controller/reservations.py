"""Decide on a gang's start reservation: when to ask for one, when it is over, and what to cancel.

A gang on demand comes in one zone, and Auto Scaling launches what EC2 has: some nodes may wait, paid, for others that
never come. A reservation of all nodes is granted or refused as a whole, and a refusal costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from bootstrap.contract.pools import PoolRecord
from bootstrap.contract.pools import refused as record_refusal
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.start_reservation import LASTS
from bootstrap.contract.state import ControllerState, StartReservation
from bootstrap.contract.timings import ENDING, TICK
from bootstrap.controller.ends import over_budget
from bootstrap.controller.observation import Reservation, Tick

# From the request to the last node in the reservation. Auto Scaling takes about a minute; whatever keeps the nodes
# away, the idle reservation is paid no longer.
FILLED_WITHIN = timedelta(minutes=5)


def to_token(settings: ControllerSettings, asked: StartReservation) -> str:
    """Return the ClientToken of a request: a tick that repeats the request gets the same reservation.

    https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html
    """
    return f"{asked.asked_at.timestamp():.0f}-{asked.zone_id}-{settings.stack}"[:64]


def follow_reservation(tick: Tick, state: ControllerState) -> ControllerState:
    """Take in what EC2 answered, and what became of the reservation."""
    asked, refused = state.reservation, tick.seen.reservation_refused
    if asked is None or asked.over:
        return state
    starting = state.phase == "starting"
    if refused and refused.no_capacity and not starting:
        # The spot gang is kept, as after a start there that EC2 refused.
        record = record_refusal(state.pools.get(asked.place, PoolRecord()), tick.now.timestamp())
        return replace(state, reservation=None, pools={**state.pools, asked.place: record})
    if refused and refused.no_capacity:
        # A gang that stays asks on, like Auto Scaling; another place begins another attempt.
        rented = tick.count_rented(tick.settings.node_count)
        over = "" if rented else "the owned reservation has room for all nodes"
        return replace(state, reservation=replace(asked, asked_at=tick.now, node_count=rented, over=over))
    if refused:
        return _give_up(state, asked, f"EC2 refused it ({refused.message[:200]})")
    found = _find(tick, asked)
    if found and found.active:
        if not asked.reservation_id:
            # Refusals of the requests before are of no more interest.
            granted = replace(asked, reservation_id=found.reservation_id)
            return replace(state, reservation=granted, refused_since=None if starting else state.refused_since)
        failures = [one for one in tick.seen.failed_launches if one.no_capacity]
        # Launches may fail beside it, where others took places of the owned reservation.
        if starting and found.unused == 0 and not (tick.settings.owned and failures):
            return replace(state, reservation=replace(asked, over="all nodes run"))
        if starting and failures:
            return _give_up(state, asked, f"a launch into it failed ({failures[-1].message[:200]})")
    elif asked.reservation_id:
        return replace(state, reservation=replace(asked, over="it has ended"))
    # A reservation for which spot nodes are left waits for their end as well.
    drains = bool(asked.reservation_id and not starting)
    began = max(asked.asked_at, state.attempt_started_at or asked.asked_at) if starting else asked.asked_at
    limit = longest_drain(tick.settings) if drains else FILLED_WITHIN
    if tick.now - began >= limit:
        minutes = limit // timedelta(minutes=1)
        return _give_up(state, asked, f"it was not granted, or not filled, within {minutes} minutes")
    return state


def longest_drain(settings: ControllerSettings) -> timedelta:
    """Return the time for which spot nodes that are left and a reservation are paid together, at most."""
    return timedelta(seconds=settings.drain_s) + ENDING + 2 * TICK


def reserve_first(tick: Tick, state: ControllerState, name: str) -> ControllerState | None:
    """Return the state that keeps a working spot gang until EC2 answers for a place on demand; None: leave it now.

    A gang that the ceiling cannot pay beside the reservation, or whose cluster placement group is in another zone until
    its last node has ended, is left first.
    """
    settings, asked, place = tick.settings, state.reservation, tick.settings.places[name]
    if state.phase != "running" or place.purchase != "on-demand":
        return None
    if asked is not None and asked.place == name:
        return state if asked.is_asked else None
    wanted = _request(tick, state, place.purchase, place.instance_types, place.subnets.split(","))
    if wanted is None or settings.reserved_start is None:
        return None
    here = settings.places.get(state.place.name) if state.place else None
    if settings.reserved_start.placement_group_arn and (here is None or here.subnets != place.subnets):
        return None
    # EC2 ends what nobody cancels after LASTS.
    if longest_drain(settings) + FILLED_WITHIN >= LASTS:
        return None
    both = state.usd_per_hour + wanted.node_count * settings.usd_per_hour("on-demand", wanted.instance_type)
    if over_budget(tick, replace(state, usd_per_hour=both)):
        return None
    reason = f"EC2 is asked to reserve all {wanted.node_count} in {name} before the spot nodes are given up"
    return replace(state, reservation=replace(wanted, place=name), reason=reason)


def plan_reservation(tick: Tick, state: ControllerState) -> ControllerState:
    """Ask for a reservation where a start needs one, and drop it where no start is under way."""
    if state.reservation and not _is_awaited(state, state.reservation):
        state = replace(state, reservation=None)
    if state.phase != "starting" or state.reservation is not None or not (wanted := _wanted(tick, state)):
        return state
    reason = f"{state.reason}; EC2 is asked to reserve all {wanted.node_count} at once"
    return replace(state, reservation=wanted, reason=reason)


def _is_awaited(state: ControllerState, asked: StartReservation) -> bool:
    """Return whether the present attempt, or the move from spot to on demand, uses a reservation."""
    if state.phase == "starting":
        return not asked.place or (state.place is not None and state.place.name == asked.place)
    if state.phase == "running":
        return bool(asked.place) and not state.on_demand
    leaves = state.phase == "waiting" or (state.phase == "draining" and state.after == "waiting")
    return leaves and state.next_place is not None and state.next_place.name == asked.place


def find_unwanted(tick: Tick, state: ControllerState) -> list[str]:
    """Return the ids of paid reservations that no start uses, lost ones too."""
    asked = state.reservation if state.reservation and not state.reservation.over else None
    kept = to_token(tick.settings, asked) if asked else ""
    # A pending one cannot be cancelled, and is not billed:
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CancelCapacityReservation.html
    return [one.reservation_id for one in tick.seen.reservations if one.active and one.token != kept]


def _find(tick: Tick, asked: StartReservation) -> Reservation | None:
    token = to_token(tick.settings, asked)
    return next((one for one in tick.seen.reservations if one.token == token), None)


def _give_up(state: ControllerState, asked: StartReservation, why: str) -> ControllerState:
    """Go on without reservations until the run begins anew: each try may cost minutes of idle capacity."""
    reason = f"{state.reason}; without a reservation: {why}"
    return replace(state, reservation=replace(asked, over=why), unreserved=why, reason=reason)


def _wanted(tick: Tick, state: ControllerState) -> StartReservation | None:
    settings, group = tick.settings, tick.seen.group
    # Nodes that were asked for already come with or without it.
    if settings.reserved_start is None or group is None or group.members or group.desired:
        return None
    place = settings.places.get(state.place.name) if state.place else None
    if place:
        return _request(tick, state, place.purchase, place.instance_types, place.subnets.split(","))
    on_demand = "spot" not in settings.prices or (state.on_demand and settings.fallback_on_demand)
    purchase = "on-demand" if on_demand else "spot"
    return _request(tick, state, purchase, settings.reserved_start.instance_type, sorted(group.subnets))


def _request(
    tick: Tick, state: ControllerState, purchase: str, instance_types: str, subnets: Sequence[str]
) -> StartReservation | None:
    """Return the request for a gang in one zone on demand; None where it starts without a reservation."""
    settings = tick.settings
    if settings.reserved_start is None or settings.mode != "training" or settings.node_count < 2 or state.unreserved:
        return None
    zones = {settings.zones.get(subnet) for subnet in subnets}
    zone_id = zones.pop() if len(zones) == 1 else None
    rented = tick.count_rented(settings.node_count)
    if purchase != "on-demand" or not zone_id or not rented:
        return None
    instance_type = instance_types.split(",")[0]
    return StartReservation(asked_at=tick.now, zone_id=zone_id, instance_type=instance_type, node_count=rented)
