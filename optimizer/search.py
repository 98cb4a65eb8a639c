"""The search: every instance type, region, purchase option and node count, with the fastest configuration of each.

``optimizer.fastest`` finds the fastest configuration that fits of each type and node count: it is best at every price,
because a fleet's cost rises with its hours. Here it is crossed with every way to pay for it (``Table``). Budget and
deadline bind the 95th percentile: a plan that is only expected to keep a limit breaks it every other time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from optimizer.catalog import Catalog
from optimizer.economics.checkpoint import checkpoint_gib
from optimizer.economics.controller import controller_usd_per_hour, reserve_hours
from optimizer.economics.fleet_cost import (
    GP3_INCLUDED_IOPS,
    GP3_INCLUDED_MIB_PER_S,
    FleetCost,
    Rates,
    fleet_cost,
)
from optimizer.economics.interruption import Hazard, spot_hazard
from optimizer.economics.outcome import Candidates, Outcome, outcome
from optimizer.errors import InvalidInputError
from optimizer.fastest import Fastest, Rejection, fastest, rejection
from optimizer.hardware import InstanceType, Offer, Price
from optimizer.performance.calibration import Calibration
from optimizer.performance.types import DDP, Run
from optimizer.plan import INTERFACE_ENDPOINTS, Job, PurchaseOption, Volumes
from optimizer.request import Constraints, FleetRequest, Reservation, Workload, matches_type
from optimizer.workload.model import ModelSpec

Floats = NDArray[np.float64]
Part = TypeVar("Part", Outcome, FleetCost)

# Types whose candidates are worked out together: fewer pay more for numpy's calls, more miss the cache.
_TYPES = 6
# Global batch where the request gives none, in tokens, by parameters: what GPT-3's models were trained with
# (arXiv:2005.14165, table 2.1, 2020-05). A larger batch may train faster and learn less: that is the user's choice.
_BATCH_TOKENS = ((1e9, 0.5e6), (5e9, 1e6), (50e9, 2e6), (math.inf, 3.2e6))
# For images: the largest batch that kept ResNet-50's accuracy (arXiv:1706.02677, figure 1, 2017-06).
_BATCH_IMAGES = 8192


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The training to do.

    Attributes:
        samples: sequences (or images) to train on; None where it is steps of a batch that is still free.
        seq_len: tokens of one sample; 1 for a CNN and a module.
        global_batch: samples of one step, or None for the search to choose.
        batch_limit: what it then comes as near to as whole micro-batches allow.
    """

    samples: int
    seq_len: int
    global_batch: int | None
    batch_limit: int

    @classmethod
    def of(cls, request: FleetRequest, model: ModelSpec) -> Self:
        """Resolve a request's workload for its model.

        Raises:
            InvalidInputError: no seq_len for a transformer, or one longer than its position table.
        """
        work = request.workload
        if model.architecture == "module":
            _check_module(work, model)
        seq_len = 1 if model.counts_samples else work.seq_len
        if seq_len is None:
            raise InvalidInputError(
                f"{model.name} is a transformer, and seq_len is missing",
                why="time and memory of a step depend on the sequence length",
                next_step=f"--seq-len {model.max_seq_len or 2048}",
            )
        if model.learned_positions and seq_len > model.learned_positions:
            raise InvalidInputError(
                f"seq_len is {seq_len}",
                limit=f"at most {model.learned_positions} for {model.name}",
                why="its position embedding has no more rows",
                next_step=f"--seq-len {model.learned_positions}",
            )
        if work.steps is not None:
            assert work.global_batch is not None  # checked by Workload
            samples = work.steps * work.global_batch
        elif work.samples is not None:
            samples = work.samples
        else:
            assert work.tokens is not None  # checked by Workload
            samples = math.ceil(work.tokens / seq_len)
        if model.counts_samples:
            limit = _BATCH_IMAGES
        else:
            tokens = next(tokens for below, tokens in _BATCH_TOKENS if model.parameters < below)
            limit = max(1, int(tokens) // seq_len)
        return cls(samples=samples, seq_len=seq_len, global_batch=work.global_batch, batch_limit=min(limit, samples))


def _check_module(work: Workload, model: ModelSpec) -> None:
    """A module is trained on samples of the length its profile has, in batches that only its user knows.

    Raises:
        InvalidInputError: the workload is counted in tokens, or has no global batch.
    """
    for name, value in (("tokens", work.tokens), ("seq_len", work.seq_len)):
        if value is not None:
            raise InvalidInputError(
                f"{name} is {value}, and {model.name} is a module",
                limit="samples or steps: what its profile counts",
                why="the function that builds the module chose how long a sample is",
                next_step="--samples 1M",
            )
    if work.global_batch is None:
        raise InvalidInputError(
            f"{model.name} is a module of your own, and global_batch is missing",
            why="no published run says how large a batch it learns from",
            next_step="--global-batch 256, or what you train it with",
        )


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """One way to pay for the nodes of one type in one region.

    Attributes:
        option: the purchase option.
        offer: type and region.
        price: of a node that is not on the on-demand base.
        base: nodes bought on demand first; only with spot.
        hazard: of a spot node; None for other options.
        reservation: capacity the user owns; None where none is used.
        fallback: whether on-demand nodes replace spot nodes that do not come.
        hours: longest the nodes can be had, their end included; that of a Capacity Block ends.
    """

    option: PurchaseOption
    offer: Offer
    price: Price
    base: int = 0
    hazard: Hazard | None = None
    reservation: Reservation | None = None
    fallback: bool = False
    hours: float = math.inf

    @property
    def committed(self) -> bool:
        """Whether this buys a new one-year commitment."""
        return self.option == "reserved" and self.reservation is None


def purchases(offer: Offer, constraints: Constraints) -> list[Purchase]:
    """Every way to pay for one offer that the constraints allow and the catalog has a price for."""
    found = []
    options = constraints.purchase_options
    if "on-demand" in options and offer.on_demand:
        found.append(Purchase(option="on-demand", offer=offer, price=offer.on_demand))
    if "spot" in options and offer.spot:
        hazard = spot_hazard(
            offer.interruption_band, multi_gpu=offer.instance.gpu_count > 1, as_of=offer.spot.as_of.isoformat()
        )
        fallback = constraints.spot_fallback == "on-demand"
        if offer.on_demand or not fallback:
            found.append(Purchase(option="spot", offer=offer, price=offer.spot, hazard=hazard, fallback=fallback))
        if offer.on_demand:  # one node that is never reclaimed keeps the rendezvous and the newest checkpoint at hand
            found.append(
                Purchase(option="spot", offer=offer, price=offer.spot, hazard=hazard, fallback=fallback, base=1)
            )
    if "reserved" in options and offer.reserved_1yr:
        found.append(Purchase(option="reserved", offer=offer, price=offer.reserved_1yr))
    for owned in constraints.usable_reservations:
        if (owned.instance_type, owned.region) == (offer.instance.name, offer.region):
            as_of = offer.on_demand.as_of if offer.on_demand else offer.instance.as_of
            price = Price(
                usd_per_hour=owned.usd_per_hour or 0.0, source="the request: an existing reservation", as_of=as_of
            )
            block = owned.capacity_block
            hours = block.usable_hours(datetime.now(UTC)) if block else math.inf
            found.append(Purchase(option=owned.option, offer=offer, price=price, reservation=owned, hours=hours))
    return found


@dataclass(frozen=True, kw_only=True)
class Table:
    """All candidates of one type: each row a configuration of ``fastest`` paid for by one of ``purchases``.

    Attributes:
        fastest: the configurations.
        purchases: the ways to pay.
        config, purchase: of each candidate, its row in ``fastest`` and its place in ``purchases``.
        run, cost: hours and dollars of each candidate.
        reserve_hours: what the controller keeps to end the nodes of each in.
    """

    fastest: Fastest
    purchases: tuple[Purchase, ...]
    config: NDArray[np.intp]
    purchase: NDArray[np.intp]
    run: Outcome
    cost: FleetCost
    reserve_hours: Floats

    @classmethod
    def of(
        cls,
        types: Sequence[tuple[Fastest, Sequence[Purchase]]],
        model: ModelSpec,
        optimizer: str,
        unit_prices: Callable[[str], tuple[float, float, float, float]],
    ) -> list[Self]:
        """Cross configurations with ways to pay, type by type, and work out hours and dollars of each pair.

        The candidates of all types are worked out together: each has few, and the calls are most of the time.

        Args:
            types: the configurations of each, and the ways to pay for them.
            model, optimizer: decide the size of a checkpoint.
            unit_prices: ``besides_nodes`` of that size.
        """
        if not types:
            return []
        found, ways = [fastest for fastest, _ in types], [way for _, some in types for way in some]
        configs = np.cumsum([0, *(fastest.nodes.size for fastest in found)]).tolist()
        first_way = np.cumsum([0, *(len(some) for _, some in types)]).tolist()
        # Of each candidate, the positions among the configurations and the ways of all types.
        crossed = [np.indices((fastest.nodes.size, len(some))).reshape(2, -1) for fastest, some in types]
        config = np.concatenate([pair[0] + first for pair, first in zip(crossed, configs, strict=False)])
        purchase = np.concatenate([pair[1] + first for pair, first in zip(crossed, first_way, strict=False)])

        def of_config(values: Sequence[NDArray[Any]]) -> Floats:
            column: Floats = np.concatenate(values)[config]
            return column

        def of_way(values: Sequence[float]) -> Floats:
            column: Floats = np.array(values, dtype=float)[purchase]
            return column

        owned = of_way([way.reservation.count if way.reservation else math.inf for way in ways])
        base, nodes = of_way([way.base for way in ways]), of_config([fastest.nodes for fastest in found])
        keep = (nodes <= owned) & ((base == 0) | (nodes > base))
        config, purchase, base, nodes = config[keep], purchase[keep], base[keep], nodes[keep].astype(float)
        spot = of_way([way.option == "spot" for way in ways])
        committed = of_way([way.committed for way in ways])
        size = checkpoint_gib(model.parameters, optimizer)
        result = outcome(
            Candidates(
                train_hours=of_config([fastest.train_hours for fastest in found]),
                log_error=of_config([fastest.relative_error for fastest in found]),
                nodes=nodes,
                spot_nodes=spot * (nodes - base),
                gpus_per_node=of_way([way.offer.instance.ranks for way in ways]),
                spot_rate=of_way([way.hazard.rate_per_node_hour if way.hazard else 0 for way in ways]),
                spot_wait_hours=of_way([way.hazard.wait_hours if way.hazard else 0 for way in ways]),
                checkpoint_gib=np.full(nodes.size, size),
                checkpoint_writers=of_config([fastest.checkpoint_writers for fastest in found]),
            )
        )
        each = of_way([way.price.usd_per_hour for way in ways])
        on_demand = of_way([way.offer.on_demand.usd_per_hour if way.offer.on_demand else 0 for way in ways])
        besides = [unit_prices(way.offer.region) for way in ways]
        volume, storage, endpoints, controller = (of_way([prices[at] for prices in besides]) for at in range(4))
        bases = np.where(spot > 0, base, nodes * (1 - committed))
        reserve = of_config([reserve_hours_of(fastest, size) for fastest in found])
        rates = Rates(
            base_nodes=bases,
            base_usd_per_hour=np.where(spot > 0, on_demand, each),
            spot_nodes=spot * (nodes - base),
            spot_usd_per_hour=each,
            committed_nodes=committed * nodes,
            committed_usd_per_hour=each,
            volume_usd_per_month=volume,
            storage_usd_per_month=storage,
            endpoints_usd_per_hour=endpoints,
            controller_usd_per_hour=controller,
            reserve_hours=reserve,
        )
        cost = fleet_cost(result, rates)
        fallback = of_way([way.fallback for way in ways])
        if fallback.any():
            # How often spot does not come is nobody's to say, so the limits bind a run that never got any.
            without = replace(rates, spot_usd_per_hour=np.where(fallback > 0, on_demand, each))
            dearer = fleet_cost(result, without)
            cost = replace(
                cost,
                p95=np.maximum(cost.p95, dearer.p95),
                reserve=np.maximum(cost.reserve, dearer.reserve),
            )
        tables = []
        ends = np.searchsorted(config, configs).tolist()
        for at, (of_type, some) in enumerate(types):
            mine = slice(ends[at], ends[at + 1])
            tables.append(
                cls(
                    fastest=of_type,
                    purchases=tuple(some),
                    config=config[mine] - configs[at],
                    purchase=purchase[mine] - first_way[at],
                    run=part_of(result, mine),
                    cost=part_of(cost, mine),
                    reserve_hours=reserve[mine],
                )
            )
        return tables

    def feasible(self, limits: Constraints) -> NDArray[np.bool_]:
        """Which candidates keep budget and deadline, and end before their capacity does, at the 95th percentile."""
        return keeps_limits(self.run, self.cost, limits) & (self.run.hours_p95 <= self._hours_had())

    def _hours_had(self) -> Floats:
        had: Floats = np.array([way.hours for way in self.purchases])[self.purchase]
        return np.maximum(had - self.reserve_hours, 0.0)

    def rejection(self, limits: Constraints) -> Rejection:
        """Why no candidate keeps the limits: the one that binds, the nearest value to it, and the limit."""
        hours, cost = self.run.hours_p95, self.cost.p95 + self.cost.reserve
        name = self.fastest.instance.name
        if not np.isfinite(hours).any():
            worst = float(self.run.rate.min())
            return rejection(name, "interruptions", "spot nodes are lost faster than the job recovers", worst, None)
        budget, deadline = limits.budget_usd, limits.deadline_hours
        had = self._hours_had()
        in_time = hours <= had
        if not in_time.any():
            closest = int((hours - had).argmin())
            longest, nearest = float(had[closest]), float(hours[closest])
            return rejection(
                name,
                "capacity-block",
                f"the fastest run takes {nearest:,.1f} h at the 95th percentile, and of the Capacity Block "
                f"{longest:,.1f} h are left to train in",
                nearest,
                longest,
            )
        hours, cost = hours[in_time], cost[in_time]
        if budget is not None and not (cost <= budget).any():
            return rejection(
                name,
                "budget",
                f"the cheapest run needs {cost.min():,.2f} USD at the 95th percentile, with its drain, "
                f"the budget is {budget:,.2f} USD",
                float(cost.min()),
                budget,
            )
        assert deadline is not None  # without it, the budget alone decided
        if not (hours <= deadline).any():
            return rejection(
                name,
                "deadline",
                f"the fastest run takes {hours.min():,.1f} h at the 95th percentile, the deadline is {deadline:,.1f} h",
                float(hours.min()),
                deadline,
            )
        assert budget is not None  # both limits can be kept, but not together
        cheapest = float(cost[hours <= deadline].min())
        return rejection(
            name,
            "budget",
            f"the cheapest run within {deadline:,.1f} h needs {cheapest:,.2f} USD at the 95th percentile, with its "
            f"drain, the budget is {budget:,.2f} USD",
            cheapest,
            budget,
        )


def part_of(table: Part, at: int | slice) -> Part:
    """One row, or some, of a table of arrays."""
    return replace(table, **{field.name: getattr(table, field.name)[at] for field in fields(table)})


def reserve_hours_of(fastest: Fastest, size_gib: float) -> Floats:
    """What the controller keeps to end the nodes in, of each configuration, whose checkpoint has ``size_gib``."""
    # As FleetPlan has it: a state that every rank holds whole is written by one node.
    writers = np.where(fastest.sharding == DDP, 1, fastest.nodes)
    return reserve_hours(fastest.train_hours * 3600 / fastest.steps, size_gib, writers)


def keeps_limits(run: Outcome, cost: FleetCost, limits: Constraints) -> NDArray[np.bool_]:
    """Which fleets keep budget and deadline at the 95th percentile, the budget with what ends the fleet in time."""
    budget = math.inf if limits.budget_usd is None else limits.budget_usd
    deadline = math.inf if limits.deadline_hours is None else limits.deadline_hours
    return np.asarray(np.isfinite(run.hours_p95) & (run.hours_p95 <= deadline) & (cost.p95 + cost.reserve <= budget))


def volume_usd_per_month(catalog: Catalog, region: str, volumes: Volumes | None = None) -> float:
    """The volumes of one node, USD a month."""
    v = volumes or Volumes()
    return (
        v.root_gib * catalog.unit_price("gp3-storage", region).usd
        + (v.iops - GP3_INCLUDED_IOPS) * catalog.unit_price("gp3-iops", region).usd
        + (v.throughput_mib_per_s - GP3_INCLUDED_MIB_PER_S) * catalog.unit_price("gp3-throughput", region).usd
    )


def storage_usd_per_month(catalog: Catalog, region: str, size_gib: float) -> float:
    """The checkpoints a bucket keeps and the key that encrypts them, USD a month."""
    kept = Job.model_fields["checkpoints_kept"].default
    return float(
        size_gib * kept * catalog.unit_price("s3-standard-storage", region).usd
        + catalog.unit_price("kms-key", region).usd
    )


def endpoints_usd_per_hour(catalog: Catalog, region: str) -> float:
    """The interface endpoints of a fleet in one zone, USD an hour."""
    return len(INTERFACE_ENDPOINTS) * catalog.unit_price("vpc-endpoint", region).usd


def besides_nodes(catalog: Catalog, size_gib: float) -> Callable[[str], tuple[float, float, float, float]]:
    """What a fleet pays in a region besides its nodes, USD.

    The volumes of a node and storage a month, endpoints and controller an hour. Each region is looked up once.
    """

    @cache
    def prices(region: str) -> tuple[float, float, float, float]:
        return (
            volume_usd_per_month(catalog, region),
            storage_usd_per_month(catalog, region, size_gib),
            endpoints_usd_per_hour(catalog, region),
            controller_usd_per_hour(catalog, region),
        )

    return prices


def matching_regions(patterns: Sequence[str], catalog: Catalog) -> tuple[str, ...]:
    """Regions of the catalog that match a name or pattern; all of them without patterns.

    Raises:
        InvalidInputError: a pattern matches no region of the catalog.
    """
    known = catalog.regions()
    for pattern in patterns:
        if not any(fnmatchcase(region, pattern) for region in known):
            catalog.check_region(pattern)
    return tuple(r for r in known if not patterns or any(fnmatchcase(r, pattern) for pattern in patterns))


def matching_types(patterns: Sequence[str], catalog: Catalog) -> tuple[str, ...]:
    """Instance types that match a type, family (p5) or pattern (g6*); all of them without patterns.

    Raises:
        InvalidInputError: a pattern matches no instance type of the catalog.
    """
    known = tuple(instance.name for instance in catalog.instance_types)
    for pattern in patterns:
        if not any(matches_type(name, pattern) for name in known):
            catalog.instance_type(pattern)
    return tuple(name for name in known if not patterns or any(matches_type(name, pattern) for pattern in patterns))


def check_reservations(owned: Sequence[Reservation], catalog: Catalog) -> None:
    """Refuse a reservation of a type or region the catalog does not know.

    Raises:
        InvalidInputError: naming what is known.
    """
    for reservation in owned:
        catalog.instance_type(reservation.instance_type)
        catalog.check_region(reservation.region)


def pareto_front(hours: Floats, cost: Floats) -> NDArray[np.intp]:
    """Indices of the candidates no other beats in both hours and cost, cheapest first."""
    order = np.lexsort((hours, cost))
    best = np.minimum.accumulate(np.concatenate(([np.inf], hours[order][:-1])))
    return order[hours[order] < best]


def ways_to_pay(
    instance: InstanceType, limits: Constraints, regions: Sequence[str], catalog: Catalog
) -> list[Purchase] | Rejection:
    """Every way to pay for one type in the regions, or why there is none."""
    offers = [offer for region in regions if (offer := catalog.offer(instance.name, region)) is not None]
    ways = [way for offer in offers for way in purchases(offer, limits)]
    # Capacity that is owned is there, whether the catalog knows of an offer or not.
    offered = {offer.region for offer in offers}
    for region in {owned.region for owned in limits.existing_reservations} & set(regions) - offered:
        unpriced = Offer(
            instance=instance,
            region=region,
            zone_ids=(),
            on_demand=None,
            reserved_1yr=None,
            spot=None,
            interruption_band=None,
        )
        ways += purchases(unpriced, limits)
    if ways:
        return ways
    if not offers:
        wanted = ", ".join(limits.regions) or "any region"
        return rejection(instance.name, "region", f"not offered in {wanted}", wanted, None)
    asked = ", ".join(limits.purchase_options)
    return rejection(
        instance.name,
        "price",
        f"the catalog has no {asked} price of it in {', '.join(offer.region for offer in offers[:3])}"
        + (" ..." if len(offers) > 3 else ""),
        asked,
        None,
    )


def search_types(
    instances: Sequence[InstanceType],
    request: FleetRequest,
    model: ModelSpec,
    amount: Amount,
    regions: Sequence[str],
    catalog: Catalog,
    calibration: Calibration,
) -> list[Table | Rejection]:
    """All candidates of each type, or why it has none whatever the limits on money and time; in the types' order."""
    limits = request.constraints
    ways = [ways_to_pay(instance, limits, regions, catalog) for instance in instances]
    priced = [instance for instance, found in zip(instances, ways, strict=True) if isinstance(found, list)]
    configured = iter(
        fastest(
            priced,
            run_of(request, amount),
            model,
            samples=amount.samples,
            global_batch=amount.global_batch,
            batch_limit=amount.batch_limit,
            max_nodes=limits.max_nodes,
            axes=limits.parallelism,
            calibration=calibration,
        )
    )
    optimizer = request.workload.optimizer
    prices = besides_nodes(catalog, checkpoint_gib(model.parameters, optimizer))
    found = [next(configured) if isinstance(payable, list) else payable for payable in ways]
    types = [
        (of_type, payable)
        for of_type, payable in zip(found, ways, strict=True)
        if isinstance(of_type, Fastest) and isinstance(payable, list)
    ]
    batches = (types[at : at + _TYPES] for at in range(0, len(types), _TYPES))
    tables = chain.from_iterable(Table.of(batch, model, optimizer, prices) for batch in batches)
    return [next(tables) if isinstance(of_type, Fastest) else of_type for of_type in found]


def run_of(request: FleetRequest, amount: Amount) -> Run:
    """What stays the same over all configurations of a request."""
    work = request.workload
    return Run(
        seq_len=amount.seq_len,
        precision=work.precision,
        optimizer=work.optimizer,
        framework=work.framework,
        compiled=work.compiled,
        shardings=request.constraints.sharding,
    )
