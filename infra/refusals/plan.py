"""Refusals of a plan alone, whatever the rest of the configuration says."""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.contract.plan import FleetPlan


def plan_refusals(plan: FleetPlan) -> Iterator[str]:
    """Parts of ``plan`` that this version cannot carry out."""
    node, purchase, block = plan.node, plan.purchase, plan.purchase.capacity_block
    if plan.region.startswith("cn-"):
        yield (
            f"region {plan.region} is in the China partition, whose service names and endpoints differ; this version "
            "does not carry plans out there: choose a plan for another region"
        )
    if len({plan.instance_type, *purchase.spot_types}) <= len(purchase.spot_types):
        yield f"purchase.spot_types {', '.join(purchase.spot_types)} has a type twice, or {plan.instance_type}"
    if block:
        if not purchase.capacity_reservation_id:
            yield (
                "purchase.capacity_reservation_id is not set, and option capacity-block runs in a block that is bought "
                "already (`gpufleet blocks buy`): its id belongs into the request's existing_reservations"
            )
        usable_hours = block.usable_hours(block.start) - plan.reserve_s / 3600
        if plan.hours.p95 > usable_hours:
            yield (
                f"hours.p95 is {plan.hours.p95:g} h and the Capacity Block from {block.start:%Y-%m-%d %H:%M} to "
                f"{block.end:%Y-%m-%d %H:%M} UTC has {max(usable_hours, 0):.1f} h to train in: AWS ends its instances "
                "from 30 minutes before the end on, and the last checkpoint is saved before; buy a longer block, or "
                "choose a faster plan with --plan N"
            )
    if node.efa_cards and node.network_cards - node.efa_cards not in (0, 1):
        yield (
            f"node.efa_cards is {node.efa_cards} of {node.network_cards} network cards: which cards have EFA is known "
            "only when all have it, or all but the first"
        )
