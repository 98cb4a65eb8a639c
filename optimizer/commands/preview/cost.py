"""Costs of a stack's resources: a line for everything that AWS bills, from the resources' own arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from bootstrap.contract.words import counted
from infra.offline.preview import Resource
from infra.offline.resource_types import BILLS, FREE, Bill
from optimizer.catalog import Catalog
from optimizer.catalog.model import UNIT_PER, UnitPrice
from optimizer.contract.errors import DataMissingError, InvalidInputError
from optimizer.contract.plan import MARKET_LABELS, FleetPlan, Market, NodeItem, PlanPrice
from optimizer.contract.units import HOURS_PER_MONTH
from optimizer.economics.running_costs import GP3_INCLUDED_IOPS, GP3_INCLUDED_MIB_PER_S, METRICS

# always: from creation to destroy, with or without nodes. nodes: while they run. usage: a unit price only, as nobody
# knows the quantity before. unpriced: AWS bills it, and no price is known.
Basis = Literal["always", "nodes", "usage", "unpriced"]

MINUTES_PER_MONTH = HOURS_PER_MONTH * 60


@dataclass(frozen=True, kw_only=True, slots=True)
class CostLine:
    """One item on a resource's bill: ``quantity`` (None for usage) at ``unit_usd`` ``per`` unit ("node-hour", "GB")."""

    type: str
    name: str
    item: str
    basis: Basis
    quantity: float | None
    per: str
    unit_usd: float | None
    source: str = ""
    as_of: date | None = None
    usd_per_hour: float | None = None
    note: str = ""


def totals(lines: Sequence[CostLine]) -> dict[str, float]:
    """Sum the lines that have dollars, with and without nodes, as the JSON answer has them."""
    always = sum(line.usd_per_hour or 0.0 for line in lines if line.basis == "always")
    with_nodes = always + sum(line.usd_per_hour or 0.0 for line in lines if line.basis == "nodes")
    return {
        "usd_per_hour": with_nodes,
        "usd_per_month": with_nodes * HOURS_PER_MONTH,
        "without_nodes_usd_per_hour": always,
        "without_nodes_usd_per_month": always * HOURS_PER_MONTH,
    }


def cost_lines(resources: Sequence[Resource], catalog: Catalog, plan: FleetPlan) -> list[CostLine]:
    """Return the lines of a plan's resources, in their order; the plan's prices of nodes come before the catalog's."""
    node_prices = {price.node: price for price in plan.prices if price.node}
    biller = _Biller(resources, catalog, node_prices, plan)
    return [line for resource in resources for line in biller.lines(resource)]


@dataclass(frozen=True)
class _Biller:
    """Prices one resource, with the prices at hand and the other resources of the stack."""

    _resources: Sequence[Resource]
    _catalog: Catalog
    _node_prices: Mapping[NodeItem, PlanPrice]
    _plan: FleetPlan

    def lines(self, resource: Resource) -> Iterator[CostLine]:
        """Yield the lines of one resource: a component has none, an unknown type is unpriced."""
        if not resource.parent or resource.kind in FREE:
            return
        if resource.kind in _BY_ARGUMENTS:
            yield from _BY_ARGUMENTS[resource.kind](self, resource)
            return
        for bill in BILLS.get(resource.kind, (Bill(resource.kind, "", "usage"),)):
            quantity = None if bill.every == "usage" else 1
            yield self._unit_line(resource, bill.item, bill.unit, quantity, note=bill.note)

    def _line(
        self,
        resource: Resource,
        item: str,
        basis: Basis,
        price: UnitPrice | PlanPrice | None,
        per: str,
        quantity: float | None,
        *,
        note: str = "",
    ) -> CostLine:
        """Return a line of ``quantity`` units, by the hour where the unit is one, else by the month; None for usage."""
        hours = 1.0 if per.endswith("-hour") else HOURS_PER_MONTH
        return CostLine(
            type=resource.type,
            name=resource.name,
            item=item,
            basis="unpriced" if not price else "usage" if quantity is None else basis,
            quantity=quantity,
            per=per,
            unit_usd=price.usd if price else None,
            source=price.source if price else "",
            as_of=price.as_of if price else None,
            usd_per_hour=quantity * price.usd / hours if price and quantity is not None else None,
            note=note,
        )

    def _unit_line(
        self,
        resource: Resource,
        item: str,
        unit: str,
        quantity: float | None = None,
        *,
        basis: Basis = "always",
        note: str = "",
    ) -> CostLine:
        """Return a line at the catalog's price of a unit."""
        price = None
        with suppress(DataMissingError):
            price = self._catalog.unit_price(unit, self._plan.region)
        return self._line(resource, item, basis, price, UNIT_PER.get(unit, ""), quantity, note=note)

    def _group(self, group: Resource) -> Iterator[CostLine]:
        if group.name != min(each.name for each in self._of_kind("Group")):
            return  # Nodes run in one place at a time: only the first, the plan's own, is counted.
        count = int(group.inputs["maxSize"])
        mixed = group.inputs.get("mixedInstancesPolicy")
        template = self._template(
            mixed["launchTemplate"]["launchTemplateSpecification"] if mixed else group.inputs["launchTemplate"]
        )
        instance_type = str(template["instanceType"])
        market = template.get("instanceMarketOptions", {}).get("marketType", "")
        if mixed:
            # A gang's nodes on demand are another group of the same place.
            base = self._plan.purchase.on_demand_base
            yield from self._nodes(group, ("on-demand",), instance_type, base)
            yield from self._nodes(group, ("spot",), instance_type, count - base)
        elif market == "capacity-block":
            note = "paid when the block was bought, used or not"
            yield from self._nodes(group, ("capacity-block",), instance_type, count, note=note)
        elif any(self._of_kind("CapacityReservation")):
            pass  # the nodes run in the reservation, which is billed for them
        elif "capacityReservationSpecification" in template:
            yield from self._nodes(group, ("owned-reservation", "on-demand"), instance_type, count)
        else:
            owned = self._plan.owned_nodes if self._plan.purchase.on_demand_top_up else 0
            yield from self._nodes(group, ("owned-reservation", "on-demand"), instance_type, owned)
            yield from self._nodes(group, ("on-demand",), instance_type, count - owned)
        yield from self._volumes(group, template, count)
        if any(self._of_kind("Function")):
            item, quantity = "metrics published, once a minute each node", count * MINUTES_PER_MONTH
            yield self._unit_line(group, item, "metric-request", quantity, basis="nodes")

    def _template(self, specification: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = specification.get("launchTemplateId", specification.get("id"))
        return next(found.inputs for found in self._of_kind("LaunchTemplate") if found.physical_id == wanted)

    def _nodes(
        self, resource: Resource, markets: Sequence[Market], instance_type: str, count: int, *, note: str = ""
    ) -> Iterator[CostLine]:
        """Yield ``count`` nodes at the first known price of ``markets``: of the plan, else of the catalog."""
        if not count:
            return
        price = next(filter(None, (self._node_price(market, instance_type) for market in markets)), None)
        item = f"{instance_type}, {MARKET_LABELS[markets[0]]}"
        yield self._line(resource, item, "nodes", price, "node-hour", count, note=note if price else "")

    def _node_price(self, market: Market, instance_type: str) -> PlanPrice | None:
        node = NodeItem(market, instance_type, self._plan.region)
        if node in self._node_prices:
            return self._node_prices[node]
        try:
            offer = self._catalog.offer(instance_type, self._plan.region)
        except InvalidInputError:  # the catalog does not know the type or region
            return None
        price = {"on-demand": offer and offer.on_demand, "spot": offer and offer.spot}.get(market)
        if not price:
            return None
        return PlanPrice(item=str(node), usd=price.usd_per_hour, per="hour", source=price.source, as_of=price.as_of)

    def _volumes(self, resource: Resource, template: Mapping[str, Any], count: int) -> Iterator[CostLine]:
        for mapping in template.get("blockDeviceMappings", []):
            volume = mapping["ebs"]
            for item, unit, amount in (
                ("gp3 volumes", "gp3-storage", volume["volumeSize"]),
                ("gp3 IOPS", "gp3-iops", volume.get("iops", 0) - GP3_INCLUDED_IOPS),
                ("gp3 throughput", "gp3-throughput", volume.get("throughput", 0) - GP3_INCLUDED_MIB_PER_S),
            ):
                if amount > 0:
                    yield self._unit_line(resource, item, unit, count * amount, basis="nodes")

    def _reservation(self, reservation: Resource) -> Iterator[CostLine]:
        count, instance_type = int(reservation.inputs["instanceCount"]), str(reservation.inputs["instanceType"])
        note = "billed used or not; reserved instances or a savings plan you own make it cheaper"
        price, item = self._node_price("on-demand", instance_type), f"reservation of {instance_type}"
        yield self._line(reservation, item, "always", price, "node-hour", count, note=note)

    def _endpoint(self, endpoint: Resource) -> Iterator[CostLine]:
        if endpoint.inputs["vpcEndpointType"] == "Interface":
            zones = len(endpoint.inputs.get("subnetIds", []))
            yield self._unit_line(endpoint, "interface endpoint", "vpc-endpoint", zones)
            yield self._unit_line(endpoint, "data through it", "vpc-endpoint-data")

    def _bucket(self, bucket: Resource) -> Iterator[CostLine]:
        job = self._plan.job
        item, gib = f"{counted(job.checkpoints_kept, 'checkpoint')} kept", job.checkpoint_gib * job.checkpoints_kept
        yield self._unit_line(bucket, item, "s3-standard-storage", gib, note="once they are written")
        yield self._unit_line(bucket, "writes", "s3-write-request")

    def _lustre(self, system: Resource) -> Iterator[CostLine]:
        yield self._unit_line(system, "FSx for Lustre", "lustre-storage", system.inputs["storageCapacity"])

    def _alarm(self, alarm: Resource) -> Iterator[CostLine]:
        # An alarm on an expression is billed for each metric in it.
        metrics = sum("metric" in query for query in alarm.inputs.get("metricQueries", [])) or 1
        yield self._unit_line(alarm, "metric alarm", "alarm", metrics)

    def _function(self, function: Resource) -> Iterator[CostLine]:
        seconds, gib = function.inputs["timeout"], function.inputs["memorySize"] / 1024
        rules = self._of_kind("EventRule")
        if not any(rule.inputs.get("scheduleExpression") == "rate(1 minute)" for rule in rules):
            yield self._unit_line(function, "runs", "lambda-request")
            return
        runs = MINUTES_PER_MONTH
        note = f"at most: as if each run took its {seconds:g} s"
        yield self._unit_line(function, "runs, one a minute", "lambda-request", runs)
        yield self._unit_line(function, "time of its runs", "lambda-compute", runs * seconds * gib, note=note)
        yield self._unit_line(function, "own metrics", "custom-metric", METRICS)
        yield self._unit_line(function, "metrics published, once a minute", "metric-request", runs)

    def _of_kind(self, kind: str) -> Iterator[Resource]:
        return (resource for resource in self._resources if resource.kind == kind)


# Types whose bill depends on their arguments.
_BY_ARGUMENTS: dict[str, Callable[[_Biller, Resource], Iterator[CostLine]]] = {
    "Bucket": _Biller._bucket,
    "CapacityReservation": _Biller._reservation,
    "Function": _Biller._function,
    "Group": _Biller._group,
    "LustreFileSystem": _Biller._lustre,
    "MetricAlarm": _Biller._alarm,
    "VpcEndpoint": _Biller._endpoint,
}
