"""From a row of the search's tables to a FleetPlan, with every price it used, its source and its date."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from optimizer.catalog import Catalog, UnitItem
from optimizer.economics.controller import ITEMS as CONTROLLER_ITEMS
from optimizer.economics.fleet_cost import GP3_INCLUDED_IOPS, GP3_INCLUDED_MIB_PER_S
from optimizer.economics.interruption import FAILURE_SOURCE
from optimizer.hardware import InstanceType, Offer, Price
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS, Estimates
from optimizer.plan import FleetPlan, Market, Node, NodeItem, PlanPrice, Volumes
from optimizer.request import Constraints
from optimizer.search.candidates import Table
from optimizer.search.confidence import speed_source
from optimizer.search.fastest import Fastest
from optimizer.search.problem import Problem
from optimizer.search.purchases import Purchase

# Fields of a plan's parallelism that are numbers of a search's row.
_LAYOUT = (
    "data",
    "tensor",
    "pipeline",
    "context",
    "expert",
    "sequence_parallel",
    "virtual_stages",
    "micro_batch",
    "grad_accum",
)


def node(instance: InstanceType) -> Node:
    """The facts of one instance that infra and bootstrap need."""
    return Node(
        gpu=instance.gpu.name,
        gpu_count=instance.gpu_count,
        gpu_memory_gib=instance.gpu_memory_gib,
        vcpus=instance.vcpus,
        memory_gib=instance.memory_gib,
        nvme_gb=instance.nvme_gb,
        network_gbit_per_s=instance.network_gbit_per_s,
        network_cards=instance.network_cards,
        efa_cards=instance.efa_cards,
        interconnect=instance.interconnect,
        cpu_architecture=instance.cpu_architecture,
    )


class Facts:
    """What the plans of an answer have in common, each looked up in the catalog once."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._unit_prices: dict[str, list[PlanPrice]] = {}
        self._stand_ins: dict[str, list[InstanceType]] = {}

    def unit_prices(self, region: str) -> list[PlanPrice]:
        """``unit_prices`` of a region."""
        if region not in self._unit_prices:
            self._unit_prices[region] = unit_prices(region, self.catalog)
        return self._unit_prices[region]

    def stand_ins(self, own: InstanceType) -> list[InstanceType]:
        """Types that are ``interchangeable`` with another, which is not among them."""
        if own.name not in self._stand_ins:
            self._stand_ins[own.name] = [
                other for other in self.catalog.instance_types if other.name != own.name and interchangeable(own, other)
            ]
        return self._stand_ins[own.name]


def assemble(problem: Problem, facts: Facts, table: Table, row: int, estimates: Estimates, cell: int) -> FleetPlan:
    """The plan of candidate ``row`` of ``table``; its configuration's estimates are at ``cell`` of ``estimates``."""
    request, model, amount = problem.request, problem.model, problem.amount
    fastest, way = table.fastest, table.purchases[table.purchase[row]]
    config = int(table.config[row])
    instance = fastest.instance
    layout = parallelism(fastest, config)
    nodes = int(fastest.nodes[config])
    run, cost = table.run, table.cost
    rate = float(run.rate[row])
    parts = ("compute", "volumes", "storage", "transfer", "head_node")
    breakdown = {part: cents(getattr(cost, part)[row]) for part in parts}
    # The sum of what is shown, so that the bill adds up to the cent.
    expected_usd = round(sum(breakdown.values()), 2)
    p95_usd = max(float(cost.p95[row]), expected_usd, float(cost.p50[row]))
    compute_p95_usd = breakdown["compute"] * float(run.hours_p95[row] / run.hours_expected[row])
    reserve_usd = float(cost.reserve[row])
    others, p95_usd = _further_spot_types(way, compute_p95_usd, p95_usd, reserve_usd, request.constraints, facts)
    return FleetPlan.model_validate(
        {
            "instance_type": instance.name,
            "region": way.offer.region,
            "zone_ids": way.offer.zone_ids,
            "node_count": nodes,
            "node": node(instance),
            "purchase": {
                "option": way.option,
                "on_demand_base": way.base,
                "fallback": "on-demand" if way.fallback else "none",
                "capacity_reservation_id": way.reservation.capacity_reservation_id if way.reservation else None,
                "capacity_block": way.reservation.capacity_block if way.reservation else None,
                "spot_types": [other.instance.name for other in others],
            },
            "job": {
                "model": model.name,
                "parameters": model.parameters,
                "samples": amount.samples,
                "tokens": amount.samples * amount.seq_len,
                "seq_len": amount.seq_len,
                "global_batch": int(fastest.rows.batch[config]),
                "steps": int(fastest.steps[config]),
                "precision": request.workload.precision,
                "optimizer": request.workload.optimizer,
                "checkpoint_gib": rounded(problem.checkpoint_gib),
                "budget_usd": request.constraints.budget_usd,
                "deadline_hours": request.constraints.deadline_hours,
            },
            "parallelism": layout,
            "memory": {
                "peak_gib": rounded(estimates.peak_memory_gib[cell]),
                "limit_gib": rounded(estimates.limit_gib[cell]),
                "breakdown": {part: rounded(values[cell]) for part, values in estimates.memory_gib.items()},
            },
            "step_time_s": rounded(estimates.step_time_s[cell]),
            "tokens_per_second": rounded(estimates.tokens_per_second[cell]),
            "mfu": rounded(estimates.mfu[cell]),
            "hours": {
                "expected": rounded(run.hours_expected[row]),
                "p50": rounded(run.hours_p50[row]),
                "p95": rounded(run.hours_p95[row]),
            },
            "cost_usd": {
                "expected": expected_usd,
                "p50": cents(cost.p50[row]),
                "p95": max(cents(p95_usd), expected_usd, cents(cost.p50[row])),
                "breakdown": breakdown,
            },
            "interruption": {
                "rate": rounded(rate / nodes),
                "source": f"{way.hazard.source}; {FAILURE_SOURCE}" if way.hazard else FAILURE_SOURCE,
                "expected_count": rounded(run.expected_count[row]),
                "checkpoint_interval_s": rounded(run.checkpoint_interval_s[row]),
                "lost_hours": rounded(run.lost_hours[row]),
            },
            "prices": [*node_prices(way, others), *facts.unit_prices(way.offer.region)],
            "calibration": _calibration(fastest, config, problem),
        }
    )


def _calibration(fastest: Fastest, config: int, problem: Problem) -> dict[str, Any]:
    """Where the speed of one configuration comes from, and how sure it is."""
    gpu, work = fastest.instance.gpu, problem.request.workload
    ranks = parallelism(fastest, config)
    residual, source = speed_source(problem.calibration, gpu, work.precision, work.framework, problem.model, ranks)
    return {"source": source, "relative_error": rounded(residual.relative_error), "rows": residual.rows}


def parallelism(fastest: Fastest, config: int) -> dict[str, Any]:
    """How configuration ``config`` of ``fastest`` lays the model over its GPUs: the fields of a plan's parallelism."""
    return {name: int(getattr(fastest.rows, name)[config]) for name in _LAYOUT} | {
        "sharding": SHARDINGS[fastest.sharding[config]],
        "activation_checkpointing": CHECKPOINTINGS[fastest.checkpointing[config]],
    }


def _further_spot_types(
    way: Purchase,
    compute_p95_usd: float,
    p95_usd: float,
    reserve_usd: float,
    limits: Constraints,
    facts: Facts,
) -> tuple[list[Offer], float]:
    """Offers a spot fleet may take besides ``way``'s without training slower, and the run's p95 with the dearest, USD.

    More pools of spot capacity are fewer interruptions and shorter waits, and nobody says how much, so only the price
    is reckoned with: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-best-practices.html
    """
    if way.option != "spot":
        return [], p95_usd
    own, price = way.offer.instance, way.price.usd_per_hour
    found: list[tuple[float, Offer]] = []
    for instance in facts.stand_ins(own):
        offer = facts.catalog.offer(instance.name, way.offer.region)
        if offer is None or offer.spot is None:
            continue
        if not limits.allows_type(instance.name) or not set(offer.zone_ids) & set(way.offer.zone_ids):
            continue
        dearer = offer.spot.usd_per_hour / price - 1
        more = max(0.0, dearer)
        worst_usd = p95_usd + more * compute_p95_usd
        needed_usd = worst_usd + (1 + more) * reserve_usd
        if dearer <= limits.spot_spread and (limits.budget_usd is None or needed_usd <= limits.budget_usd):
            found.append((worst_usd, offer))
    found.sort(key=lambda pair: (pair[0], pair[1].instance.name))
    return [offer for _, offer in found], max([p95_usd, *(worst for worst, _ in found)])


def interchangeable(own: InstanceType, other: InstanceType) -> bool:
    """Whether a node of type ``other`` may stand in for one of ``own``: the same GPUs and cards, nothing smaller."""
    same = ("gpu", "gpu_count", "gpu_memory_gib", "network_cards", "efa_cards", "interconnect", "cpu_architecture")
    at_least = ("vcpus", "memory_gib", "nvme_gb", "network_gbit_per_s")
    return all(getattr(own, name) == getattr(other, name) for name in same) and all(
        getattr(own, name) <= getattr(other, name) for name in at_least
    )


def node_prices(way: Purchase, others: Sequence[Offer] = ()) -> list[PlanPrice]:
    """Prices of the nodes that ``way`` buys, and of ``others`` it may take, each with its source and date."""
    offer, option = way.offer, way.option
    market: Market = option if option != "reserved" else "owned-reservation" if way.reservation else "reserved-1yr"
    prices = [_node_price(market, offer, way.price)]
    if (way.base or way.fallback) and offer.on_demand:
        prices.append(_node_price("on-demand", offer, offer.on_demand))
    return prices + [_node_price("spot", other, other.spot) for other in others if other.spot]


def _node_price(market: Market, offer: Offer, price: Price) -> PlanPrice:
    item = str(NodeItem(market, offer.instance.name, offer.region))
    return _price(item, price.usd_per_hour, "hour", price.source, price.as_of)


def unit_prices(region: str, catalog: Catalog) -> list[PlanPrice]:
    """Prices of everything else a fleet pays in a region, each with its source and date."""
    items: list[UnitItem] = ["gp3-storage"]
    volumes = Volumes()
    if volumes.iops > GP3_INCLUDED_IOPS:
        items.append("gp3-iops")
    if volumes.throughput_mib_per_s > GP3_INCLUDED_MIB_PER_S:
        items.append("gp3-throughput")
    items += ["s3-standard-storage", "kms-key", "vpc-endpoint", *CONTROLLER_ITEMS]
    found = (catalog.unit_price(item, region) for item in items)
    return [_price(f"{price.item} {region}", price.usd, price.per, price.source, price.as_of) for price in found]


@cache  # a region's prices are in all of its plans
def _price(item: str, usd: float, per: str, source: str, as_of: Any) -> PlanPrice:
    return PlanPrice(item=item, usd=usd, per=per, source=source, as_of=as_of)


def rounded(value: float) -> float:
    """Six significant digits: more than any estimate has, and short to read."""
    return float(f"{float(value):.6g}")


def cents(value: float) -> float:
    """USD to the cent."""
    return round(float(value), 2)
