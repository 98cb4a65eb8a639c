"""Decide on a gang's start reservation: when to ask for one, when it is over, and what to cancel.

A gang on demand comes in one zone, and Auto Scaling launches what EC2 has: some nodes may wait, paid, for others that
never come. A reservation of all nodes is granted or refused as a whole, and a refusal costs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState, StartReservation
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
    if refused and refused.no_capacity:
        # A gang that stays asks on, like Auto Scaling; another place begins another attempt.
        return replace(state, reservation=replace(asked, asked_at=tick.now))
    if refused:
        return _give_up(state, asked, f"EC2 refused it ({refused.message[:200]})")
    found = _find(tick, asked)
    if found and found.active:
        if not asked.reservation_id:
            # Refusals of the requests before are of no more interest.
            granted = replace(asked, reservation_id=found.reservation_id)
            return replace(state, reservation=granted, refused_since=None)
        if found.unused == 0:
            return replace(state, reservation=replace(asked, over="all nodes run"))
        failures = [one for one in tick.seen.failed_launches if one.no_capacity]
        if failures:
            return _give_up(state, asked, f"a launch into it failed ({failures[-1].message[:200]})")
    elif asked.reservation_id:
        return replace(state, reservation=replace(asked, over="it has ended"))
    if tick.now - asked.asked_at >= FILLED_WITHIN:
        minutes = FILLED_WITHIN // timedelta(minutes=1)
        return _give_up(state, asked, f"it was not granted, or not filled, within {minutes} minutes")
    return state


def plan_reservation(tick: Tick, state: ControllerState) -> ControllerState:
    """Ask for a reservation where a start needs one, and drop it where no start is under way."""
    if state.phase != "starting":
        return replace(state, reservation=None) if state.reservation else state
    if state.reservation is not None or not (wanted := _wanted(tick, state)):
        return state
    reason = f"{state.reason}; EC2 is asked to reserve all {tick.settings.node_count} at once"
    return replace(state, reservation=wanted, reason=reason)


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
    if settings.reserved_start is None or settings.mode != "training" or settings.node_count < 2 or state.unreserved:
        return None
    # Nodes that were asked for already come with or without it.
    if group is None or group.members or group.desired:
        return None
    place = settings.places.get(state.place.name) if state.place else None
    if place:
        purchase, instance_type, subnets = place.purchase, place.instance_types.split(",")[0], place.subnets.split(",")
    else:
        on_demand = "spot" not in settings.prices or (state.on_demand and settings.fallback_on_demand)
        purchase = "on-demand" if on_demand else "spot"
        instance_type, subnets = settings.reserved_start.instance_type, sorted(group.subnets)
    zones = {settings.zones.get(subnet) for subnet in subnets}
    zone_id = zones.pop() if len(zones) == 1 else None
    if purchase != "on-demand" or not zone_id:
        return None
    return StartReservation(asked_at=tick.now, zone_id=zone_id, instance_type=instance_type)
