"""Check that the plan's capacity reservation or Capacity Block exists, fits the plan and lasts.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-view.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-view.html
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from bootstrap.contract.words import counted
from optimizer.aws import blocks, quotas
from optimizer.commands.preflight.model import Context, Finding, Unknown, failure, find, named, passed
from optimizer.contract.plan import CapacityBlock, usable_hours

_TIME = "%Y-%m-%d %H:%M UTC"


def check_reservation(context: Context) -> Iterator[Finding]:
    """Check state, type, zone, free instances and dates of the plan's existing reservation or blocks."""
    purchase = context.plan.purchase
    owned = [(purchase.capacity_reservation_id, purchase.capacity_block)]
    for id_, block in (*owned, *((later.capacity_reservation_id, later) for later in purchase.next_blocks)):
        if id_:
            yield from named(f"reservation {id_}", _check_existing(context, id_, block))


def _check_existing(context: Context, reservation_id: str, block: CapacityBlock | None) -> Iterator[Finding]:
    answer = find(lambda: context.ec2.describe_capacity_reservations(CapacityReservationIds=[reservation_id]))
    if isinstance(answer, Unknown):
        yield failure(
            f"there is none of that id in {context.region}: {answer.reason}",
            value=reservation_id,
            why="every launch into it is refused",
            next_step=f"aws ec2 describe-capacity-reservations --region {context.region}",
        )
        return
    (reservation,) = answer["CapacityReservations"]
    has_problems = False
    for find_problems in (_kind, _room, _dates):
        for problem in find_problems(context, reservation, block):
            has_problems = True
            yield problem
    if has_problems:
        return
    end = reservation.get("EndDate")
    yield passed(
        f"{reservation['State']}, {quotas.unused(reservation)} of {reservation['TotalInstanceCount']} "
        f"{reservation['InstanceType']} free in {reservation['AvailabilityZoneId']}, "
        + (f"until {end.strftime(_TIME)}" if end else "without an end"),
        value=quotas.unused(reservation),
        limit=context.plan.owned_nodes,
    )


def _kind(context: Context, reservation: Any, block: CapacityBlock | None) -> Iterator[Finding]:
    """Compare the reservation with the plan: hours of one that AWS refuses to launch into are paid all the same."""
    plan = context.plan
    option = "capacity-block" if quotas.is_block(reservation) else "reserved"
    zone = reservation["AvailabilityZoneId"]
    zones = (block.zone_id,) if block and block.zone_id else context.zone_ids
    differences = (
        ("option", option, plan.purchase.option, "give the reservation of the plan's kind to gpufleet recommend"),
        ("type", reservation["InstanceType"], plan.instance_type, "gpufleet recommend with the reservation's own type"),
        ("platform", reservation["InstancePlatform"], blocks.PLATFORM, "make one for Linux/UNIX"),
        ("tenancy", reservation.get("Tenancy", "default"), "default", "make one of default tenancy"),
        # The stack's nodes in it have no placement group: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-groups.html
        ("placement group", reservation.get("PlacementGroupArn", "none"), "none", "make one outside of any"),
        ("zone", zone, zones[0] if zones and zone not in zones else zone, f"pulumi config set gpufleet:zoneId {zone}"),
    )
    for field, value, limit, next_step in differences:
        if value != limit:
            yield failure(
                f"its {field} is {value}, and the plan's {limit}",
                value=value,
                limit=limit,
                why="every launch into it is refused",
                next_step=next_step,
            )


def _room(context: Context, reservation: Any, block: CapacityBlock | None) -> Iterator[Finding]:
    plan, state = context.plan, reservation["State"]
    states = ("active", "scheduled") if quotas.is_block(reservation) else ("active",)
    if state not in states:
        yield failure(
            f"its state is {state}",
            value=state,
            limit=" or ".join(states),
            why="no instance can be launched into it",
            next_step=f"aws ec2 describe-capacity-reservations --region {context.region} --capacity-reservation-ids "
            f"{reservation['CapacityReservationId']}",
        )
    free, total = quotas.unused(reservation), reservation["TotalInstanceCount"]
    owned, topped_up = plan.owned_nodes, plan.purchase.on_demand_top_up > 0
    taken = "more nodes would be rented than the plan pays for" if topped_up else "a gang starts with all or none"
    if free < owned <= total:
        stack = context.stack
        yield Finding(
            f"{free} of its {total} instances are free, and the plan runs {owned} in it",
            level="warning" if stack else "error",
            value=free,
            limit=owned,
            why="the others are taken" + (", perhaps by this stack's own nodes" if stack else f"; {taken}"),
            next_step=f"aws ec2 describe-instances --region {context.region} --filters Name=capacity-reservation-id,"
            f"Values={reservation['CapacityReservationId']}",
        )
    elif free < owned:
        yield failure(
            f"it is for {counted(total, 'instance')}, and the plan runs {owned} in it",
            value=total,
            limit=owned,
            why=taken,
            next_step=f"gpufleet recommend with count {total} in existing_reservations"
            if topped_up
            else f"gpufleet recommend --max-nodes {total}",
        )


def _dates(context: Context, reservation: Any, block: CapacityBlock | None) -> Iterator[Finding]:
    plan, end = context.plan, reservation.get("EndDate")
    if end is None:
        return
    begin = max(context.now, reservation.get("StartDate") or context.now)
    hours = (end - begin) / timedelta(hours=1)
    if block:
        hours = usable_hours(plan.purchase.blocks, context.now, plan.reserve_s)
    if block and (_minute(block.start), _minute(block.end)) != (_minute(reservation["StartDate"]), _minute(end)):
        yield failure(
            f"it runs from {reservation['StartDate'].strftime(_TIME)} to {end.strftime(_TIME)}, and the plan has "
            f"{block.start.strftime(_TIME)} to {block.end.strftime(_TIME)}",
            value=end.isoformat(),
            limit=block.end.isoformat(),
            why="the fleet is drained by the plan's end, not the block's",
            next_step="gpufleet recommend with the block's own times",
        )
    if hours < plan.hours.p95 and plan.purchase.fallback == "none":
        below_expected = hours < plan.hours.expected
        yield Finding(
            f"it leaves {max(hours, 0):.1f} h until {end.strftime(_TIME)}, and the run takes "
            f"{plan.hours.expected:.1f} h expected, {plan.hours.p95:.1f} h at the 95th percentile",
            level="error" if below_expected else "warning",
            value=round(hours, 1),
            limit=plan.hours.expected if below_expected else plan.hours.p95,
            why=f"AWS ends a block's instances 30 minutes before its end, and the controller begins to save "
            f"{plan.reserve_s / 60:.0f} minutes before that"
            if block
            else "afterwards the capacity is gone",
            next_step="buy a longer block, or the next one"
            if block
            else "aws ec2 modify-capacity-reservation --end-date-type unlimited "
            f"--capacity-reservation-id {reservation['CapacityReservationId']}",
        )


def _minute(time: datetime) -> datetime:
    return time.astimezone(UTC).replace(second=0, microsecond=0)
