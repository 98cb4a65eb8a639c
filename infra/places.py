"""Places of a stack's nodes: the plan's own, the alternates that this stack can carry out, and the own on demand.

Each is a group of its own (place_group.py), between which the controller chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from bootstrap.contract import settings as contract
from bootstrap.contract.settings import MAX_PLACES
from infra.settings import ConfigError, StackSettings
from optimizer.contract.plan import Alternate, CapacityBlock, FleetPlan, Market


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredPlace(contract.Place):
    """A place as the program declares it: the controller's view, whose subnets the network adds, and more of AWS's."""

    subnets: str = ""
    zone_ids: tuple[str, ...]  # one; several for a lone node
    block: CapacityBlock | None = None
    reservation_id: str | None = None  # an existing one that its nodes, or first ones, are in

    @property
    def groups(self) -> list[DeclaredPlace]:
        """The place by group: the first one's, if any, and its own."""
        if self.first is None:
            return [self]
        taken = replace(
            self,
            number=self.first.number,
            purchase=self.first.purchase,
            reservation_id=self.first.reservation_id or None,
        )
        return [taken, replace(self, reservation_id=None)]

    def for_controller(self, subnets: Mapping[str, str]) -> contract.Place:
        """Return the controller's view; ``subnets``: ids by zone id."""
        own = {item.name: getattr(self, item.name) for item in fields(contract.Place)}
        return contract.Place(**own | {"subnets": ",".join(subnets[zone_id] for zone_id in self.zone_ids)})


def alternates(settings: StackSettings) -> tuple[Alternate, ...]:
    """Alternates of the plan that the stack carries out; none for workers and reservations."""
    gang = settings.mode == "training"
    return fitting(settings.plan) if gang and settings.plan.purchase.option in ("on-demand", "spot") else ()


def fitting(plan: FleetPlan) -> tuple[Alternate, ...]:
    """Alternates whose nodes take the plan's launch template: its interfaces and variables (fleet.py, user_data.py)."""
    same = ("gpu", "ranks", "efa_cards", "needs_efa", "interfaces", "cpu_architecture")
    own = [getattr(plan.node, name) for name in same]
    return tuple(
        alternate
        for alternate in plan.alternates
        if [getattr(alternate.node or plan.node, name) for name in same] == own
    )


def node_prices(plan: FleetPlan) -> dict[str, dict[str, float]]:
    """Prices of a node by lifecycle and instance type, USD per hour, from the plan's prices.

    Raises:
        ConfigError: the plan lacks a price of its nodes: they could not be metered.
    """
    purchase = plan.purchase
    if purchase.option == "reserved":
        # An instance in a reservation has no lifecycle and reads as on-demand:
        # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_Instance.html
        by_lifecycle = {"on-demand": _reserved_prices(plan)}
    else:
        by_lifecycle = {str(purchase.option): _first_priced(plan, purchase.option)}
    if purchase.needs_on_demand_price:
        by_lifecycle["on-demand"] = _first_priced(plan, "on-demand")
    for lifecycle, by_type in by_lifecycle.items():
        if plan.instance_type not in by_type:
            raise ConfigError(
                f"the plan has no hourly price of {lifecycle} {plan.instance_type} in {plan.region}, so nobody could "
                "meter these nodes: make it anew with `gpufleet recommend`"
            )
    return dict(sorted(by_lifecycle.items()))


def _reserved_prices(plan: FleetPlan) -> dict[str, float]:
    """Prices by instance type; a reservation without a price of its own is billed at the on-demand price."""
    return _first_priced(plan, "owned-reservation", "reserved-1yr", "on-demand")


def _first_priced(plan: FleetPlan, *markets: Market) -> dict[str, float]:
    """Prices by instance type, USD per hour, of the first of ``markets`` that the plan has prices of."""
    prices = plan.node_prices_usd_per_hour.items()
    by_market = ({node.instance_type: usd for node, usd in prices if node.market == market} for market in markets)
    return next(filter(None, by_market), {})


def declare_places(settings: StackSettings, *, own_zones: list[str], zones: set[str]) -> dict[str, DeclaredPlace]:
    """Return the places by name, the plan's own first, at most MAX_PLACES; workers have that alone.

    Args:
        settings: the stack's.
        own_zones: of the plan's own nodes; several for a lone node.
        zones: those that the stack has a subnet in.

    Raises:
        ConfigError: a Capacity Block is in a zone without a subnet.
    """
    plan, purchase, found = settings.plan, settings.plan.purchase, dict[str, DeclaredPlace]()
    prices, first = node_prices(plan), None
    if settings.mode == "training" and (purchase.on_demand_base or purchase.on_demand_top_up):
        is_topped_up = purchase.on_demand_top_up > 0
        usd = _reserved_prices(plan) if is_topped_up else prices["on-demand"]
        first = contract.FirstGroup(
            number=2,
            nodes=plan.owned_nodes if is_topped_up else purchase.on_demand_base,
            purchase="on-demand",
            usd_per_hour=usd[plan.instance_type],
            reservation_id=purchase.capacity_reservation_id or "",
        )

    def next_number() -> int:
        """Return the number of the next group; a first one follows the plan's own."""
        return len(found) + 1 + bool(found and first)

    def add_own(
        option: str, zone_ids: list[str], block: CapacityBlock | None = None, reservation_id: str | None = None
    ) -> None:
        """Add the plan's own place, a later block, or the fallback: their hours and dollars are the plan's."""
        lifecycle, number = "on-demand" if option == "reserved" else option, next_number()
        name = f"{option} {plan.instance_type} {','.join(zone_ids)}"
        own = DeclaredPlace(
            number=number,
            zone_ids=tuple(zone_ids),
            instance_type=plan.instance_type,
            purchase="spot" if option == "spot" else "on-demand",
            usd_per_hour=prices[lifecycle][plan.instance_type],
            speed=1.0,
            hours_p95=plan.hours.p95,
            usd_p95=plan.cost_usd.p95,
            block=block,
            reservation_id=reservation_id,
            first=first if number == 1 else None,
        )
        found.setdefault(f"{name} {reservation_id}" if block and name in found else name, own)

    reserved = [(purchase.capacity_reservation_id, purchase.capacity_block)]
    reserved += [(block.capacity_reservation_id, block) for block in purchase.next_blocks]
    for reservation_id, block in reserved if settings.mode == "training" else reserved[:1]:
        # A paid block is of no use in another zone, which gpufleet:zoneId or the subnets may name.
        zone_id = block.zone_id if block else None
        if zone_id and zone_id not in zones:
            raise ConfigError(
                f"the Capacity Block {reservation_id} is in {zone_id}, and the stack's subnets are in "
                f"{', '.join(sorted(zones))}: leave the block out, or use a VPC that the stack creates"
            )
        add_own(purchase.option, [zone_id] if zone_id else own_zones, block, reservation_id)
    is_replaced = settings.mode == "training" and purchase.fallback == "on-demand"
    for alternate in alternates(settings):
        name = f"{alternate.purchase} {alternate.instance_type} {alternate.zone_id}"
        if alternate.zone_id not in zones or name in found or next_number() + is_replaced > MAX_PLACES:
            continue
        found[name] = DeclaredPlace(
            number=next_number(),
            zone_ids=(alternate.zone_id,),
            instance_type=alternate.instance_type,
            purchase=alternate.purchase,
            usd_per_hour=alternate.price.usd,
            speed=round(alternate.tokens_per_second / plan.tokens_per_second, 4),
            hours_p95=alternate.hours.p95,
            usd_p95=alternate.cost_usd.p95,
        )
    if is_replaced:
        add_own("on-demand", own_zones)
    return found
