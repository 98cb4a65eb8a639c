"""Places of a stack's nodes, for its controller: the plan's own, and the alternates that this stack can carry out."""

from __future__ import annotations

from collections.abc import Mapping

from bootstrap.contract.settings import Place
from infra.settings import StackSettings
from optimizer.contract.plan import Alternate, FleetPlan


def alternates(settings: StackSettings) -> tuple[Alternate, ...]:
    """Alternates of the plan that the stack carries out; none for workers and reservations."""
    gang = settings.mode == "training"
    return fitting(settings.plan) if gang and settings.plan.purchase.option in ("on-demand", "spot") else ()


def reserves_starts(settings: StackSettings) -> bool:
    """Return whether nodes of a gang may start on demand, and are reserved first."""
    purchase = settings.plan.purchase
    demand = "on-demand" in (purchase.option, purchase.fallback, *(one.purchase for one in alternates(settings)))
    reservable = (demand and purchase.option in ("on-demand", "spot")) or purchase.on_demand_top_up > 0
    return reservable and settings.gang and not settings.without_reservation


def fitting(plan: FleetPlan) -> tuple[Alternate, ...]:
    """Alternates whose nodes take the plan's launch template: its interfaces and variables (fleet.py, user_data.py)."""
    same = ("gpu", "ranks", "efa_cards", "needs_efa", "interfaces", "cpu_architecture")
    own = [getattr(plan.node, name) for name in same]
    return tuple(one for one in plan.alternates if [getattr(one.node or plan.node, name) for name in same] == own)


def places(
    settings: StackSettings,
    prices: Mapping[str, Mapping[str, float]],
    *,
    own_zones: list[str],
    own_subnets: list[str],
    subnets: Mapping[str, str],
) -> dict[str, Place]:
    """Places by name, the plan's own first; empty where there is no other, but its fallback of an adaptive gang.

    Args:
        settings: the stack's.
        prices: USD per hour by lifecycle and type.
        own_zones, own_subnets: of the plan's own nodes; several for a lone node.
        subnets: subnet id by zone id.
    """
    plan, purchase = settings.plan, settings.plan.purchase
    others = [alternate for alternate in alternates(settings) if alternate.zone_id in subnets]
    if not others and settings.spot_policy == "fallback":
        return {}

    def own(option: str) -> tuple[str, Place]:
        """The plan's own place, or its fallback there: their hours and dollars are the plan's."""
        place = Place(
            subnets=",".join(own_subnets),
            instance_types=",".join((plan.instance_type, *purchase.spot_types)),
            purchase="spot" if option == "spot" else "on-demand",
            usd_per_hour=prices[option][plan.instance_type],
            speed=1.0,
            hours_p95=plan.hours.p95,
            usd_p95=plan.cost_usd.p95,
        )
        return f"{option} {plan.instance_type} {','.join(dict.fromkeys(own_zones))}", place

    found = dict([own(purchase.option)])
    for alternate in others:
        name = f"{alternate.purchase} {alternate.instance_type} {alternate.zone_id}"
        place = Place(
            subnets=subnets[alternate.zone_id],
            instance_types=alternate.instance_type,
            purchase=alternate.purchase,
            usd_per_hour=alternate.price.usd,
            speed=round(alternate.tokens_per_second / plan.tokens_per_second, 4),
            hours_p95=alternate.hours.p95,
            usd_p95=alternate.cost_usd.p95,
        )
        found.setdefault(name, place)
    if purchase.fallback == "on-demand":
        name, place = own("on-demand")
        found.setdefault(name, place)
    return found
