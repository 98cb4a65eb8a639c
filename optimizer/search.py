"""The search: every instance type, region, purchase option, node count, sharding and micro-batch, in arrays.

For one type and node count, the configuration that trains fastest is best at every price, because a fleet's cost rises
with its hours. So the search first finds the fastest configuration that fits, type by type and node count by node count
(``fastest``), then crosses those with every way to pay for them (``Table``). Budget and deadline bind the 95th
percentile: a plan that is only expected to keep a limit breaks it every other time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from optimizer.catalog import Catalog
from optimizer.economics.checkpoint import checkpoint_gib
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
from optimizer.hardware import InstanceType, Offer, Price
from optimizer.performance.calibration import Calibration
from optimizer.performance.evaluate import evaluate
from optimizer.performance.types import CHECKPOINTINGS, DDP, SHARDINGS, Estimates, Grid, Hardware, Run
from optimizer.plan import INTERFACE_ENDPOINTS, Job, PurchaseOption, Volumes
from optimizer.request import Constraints, FleetRequest, Reservation, Workload
from optimizer.workload.model import ModelSpec

Floats = NDArray[np.float64]
Rejection = dict[str, Any]
Binding = Literal["memory", "precision", "global_batch", "region", "price", "budget", "deadline", "interruptions"]

# Micro-batches the search tries where the global batch is free: powers of two.
_MICRO_BATCHES = 2 ** np.arange(12)
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
class Fastest:
    """The fastest configuration that fits at each feasible node count of one type: arrays over node counts.

    Attributes:
        instance: the type.
        relative_error: of the estimates, standard deviation of the log.
        nodes, sharding, micro_batch, grad_accum, checkpointing: the configurations, as in Grid.
        steps, train_hours: optimizer steps, and hours of useful training.
        estimates: all estimates of the type; row i of this table is estimates' row ``rows[i]``.
        evaluated: configurations that were weighed.
    """

    instance: InstanceType
    relative_error: float
    nodes: NDArray[np.int64]
    sharding: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    grad_accum: NDArray[np.int64]
    checkpointing: NDArray[np.int64]
    steps: NDArray[np.int64]
    train_hours: Floats
    estimates: Estimates
    rows: NDArray[np.intp]
    evaluated: int


def share_of_gpu(instance: InstanceType) -> Hardware:
    """The estimator's view of an instance type; a fractional GPU computes and moves data at its fraction."""
    gpu = instance.gpu
    if instance.gpu_count < 1:
        gpu = replace(
            gpu,
            memory_bandwidth_gb_per_s=gpu.memory_bandwidth_gb_per_s * instance.gpu_count,
            peak_tflop_per_s={name: peak * instance.gpu_count for name, peak in gpu.peak_tflop_per_s.items()},
        )
    return Hardware(
        gpu=gpu,
        gpus_per_node=instance.ranks,
        interconnect=instance.interconnect,
        network_gbit_per_s=instance.network_gbit_per_s,
        efa=instance.efa_cards > 0,
        gpu_memory_gib=instance.gpu_memory_gib,
    )


def fastest(
    instance: InstanceType, run: Run, model: ModelSpec, amount: Amount, max_nodes: int, calibration: Calibration
) -> Fastest | Rejection:
    """The fastest configuration that fits, at each node count up to ``max_nodes``; or why there is none."""
    hardware = share_of_gpu(instance)
    if run.precision not in hardware.gpu.peak_tflop_per_s:
        return _rejection(
            instance.name,
            "precision",
            f"{hardware.gpu.name} does not compute in {run.precision}",
            run.precision,
            ", ".join(sorted(hardware.gpu.peak_tflop_per_s)),
        )
    # A fraction of a GPU shares its network and host with strangers: no gang of them.
    nodes, micro, accum = _batches(amount, hardware.gpus_per_node, max_nodes if instance.gpu_count >= 1 else 1)
    if not nodes.size:
        return _rejection(
            instance.name,
            "global_batch",
            f"a global batch of {amount.global_batch or amount.batch_limit} cannot be split evenly over "
            f"{hardware.gpus_per_node} GPUs a node",
            amount.global_batch or amount.batch_limit,
            hardware.gpus_per_node,
        )
    modes = np.arange(len(SHARDINGS))
    ways = np.array([CHECKPOINTINGS.index(name) for name in model.checkpointings])
    pick = np.indices((nodes.size, modes.size, ways.size)).reshape(3, -1)
    nodes, micro, accum, mode, way = nodes[pick[0]], micro[pick[0]], accum[pick[0]], modes[pick[1]], ways[pick[2]]
    data = nodes * hardware.gpus_per_node
    keep = (data > 1) | (mode == DDP)  # there is nothing to shard over one rank
    nodes, micro, accum, mode, way, data = (array[keep] for array in (nodes, micro, accum, mode, way, data))
    grid = Grid(nodes=nodes, data=data, sharding=mode, micro_batch=micro, grad_accum=accum, checkpointing=way)
    estimates = evaluate(model, run, hardware, grid, calibration)
    if not estimates.fits.any():
        least = int(np.argmin(estimates.peak_memory_gib - estimates.limit_gib))
        return _rejection(
            instance.name,
            "memory",
            f"the smallest step needs {estimates.peak_memory_gib[least]:.1f} GiB a GPU "
            f"({SHARDINGS[mode[least]]} over {data[least]} GPUs, micro-batch {micro[least]}), and "
            f"{hardware.gpu.name} leaves {estimates.limit_gib[least]:.1f} GiB",
            float(estimates.peak_memory_gib[least]),
            float(estimates.limit_gib[least]),
        )
    steps = np.ceil(amount.samples / (data * micro * accum)).astype(np.int64)
    hours = np.where(estimates.fits, steps * estimates.step_time_s / 3600, np.inf)
    # The fastest row of each node count: sort by node count, then hours; the first of each run of equal counts.
    order = np.lexsort((hours, nodes))
    first = order[np.concatenate(([True], np.diff(nodes[order]) > 0))]
    rows = first[np.isfinite(hours[first])]
    return Fastest(
        instance=instance,
        relative_error=calibration.residual(hardware.gpu, run.precision).relative_error,
        nodes=nodes[rows],
        sharding=mode[rows],
        micro_batch=micro[rows],
        grad_accum=accum[rows],
        checkpointing=way[rows],
        steps=steps[rows],
        train_hours=hours[rows],
        estimates=estimates,
        rows=rows,
        evaluated=nodes.size,
    )


def _batches(amount: Amount, gpus_per_node: int, max_nodes: int) -> tuple[NDArray[np.int64], ...]:
    """Every (nodes, micro_batch, grad_accum) that makes a legal global batch, as three flat arrays."""
    nodes = np.arange(1, max_nodes + 1)
    if amount.global_batch is None:
        # As near to the limit as whole micro-batches come, so that every fleet trains with about the same batch.
        pairs = np.array(np.meshgrid(nodes, _MICRO_BATCHES, indexing="ij")).reshape(2, -1)
        accum = amount.batch_limit // (pairs[0] * gpus_per_node * pairs[1])
        # Long sequences: one sequence a GPU of one node may already be more, and is the least there is.
        accum = np.where((pairs[0] == 1) & (pairs[1] == 1), np.maximum(accum, 1), accum)
        found = np.concatenate((pairs, accum[None]))[:, accum >= 1]
    else:
        rows = []
        for count in nodes[amount.global_batch % (nodes * gpus_per_node) == 0]:
            each = amount.global_batch // (int(count) * gpus_per_node)
            rows += [(count, micro, each // micro) for micro in _divisors(each)]
        found = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return found[0], found[1], found[2]


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


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
    """

    option: PurchaseOption
    offer: Offer
    price: Price
    base: int = 0
    hazard: Hazard | None = None
    reservation: Reservation | None = None

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
        found.append(Purchase(option="spot", offer=offer, price=offer.spot, hazard=hazard))
        if offer.on_demand:  # one node that is never reclaimed keeps the rendezvous and the newest checkpoint at hand
            found.append(Purchase(option="spot", offer=offer, price=offer.spot, hazard=hazard, base=1))
    if "reserved" in options and offer.reserved_1yr:
        found.append(Purchase(option="reserved", offer=offer, price=offer.reserved_1yr))
    for owned in constraints.existing_reservations:
        if (owned.instance_type, owned.region) == (offer.instance.name, offer.region):
            as_of = offer.on_demand.as_of if offer.on_demand else offer.instance.as_of
            price = Price(
                usd_per_hour=owned.usd_per_hour or 0.0, source="the request: an existing reservation", as_of=as_of
            )
            found.append(Purchase(option="reserved", offer=offer, price=price, reservation=owned))
    return found


@dataclass(frozen=True, kw_only=True)
class Table:
    """All candidates of one type: each row a configuration of ``fastest`` paid for by one of ``purchases``.

    Attributes:
        fastest: the configurations.
        purchases: the ways to pay.
        config, purchase: of each candidate, its row in ``fastest`` and its place in ``purchases``.
        run, cost: hours and dollars of each candidate.
    """

    fastest: Fastest
    purchases: tuple[Purchase, ...]
    config: NDArray[np.intp]
    purchase: NDArray[np.intp]
    run: Outcome
    cost: FleetCost

    @classmethod
    def of(cls, fastest: Fastest, ways: Sequence[Purchase], model: ModelSpec, run: Run, catalog: Catalog) -> Self:
        """Cross configurations with ways to pay, and work out hours and dollars of each pair."""
        config, purchase = (a.ravel() for a in np.indices((fastest.nodes.size, len(ways))))
        nodes = fastest.nodes[config]
        owned = np.array([way.reservation.count if way.reservation else 1 << 30 for way in ways])[purchase]
        base = np.array([way.base for way in ways])[purchase]
        keep = (nodes <= owned) & ((base == 0) | (nodes > base))
        config, purchase, base = config[keep], purchase[keep], base[keep]
        nodes = fastest.nodes[config].astype(float)

        def of_way(values: Sequence[float]) -> Floats:
            column: Floats = np.array(values, dtype=float)[purchase]
            return column

        spot = of_way([way.option == "spot" for way in ways])
        committed = of_way([way.committed for way in ways])
        size = checkpoint_gib(model.parameters, run.optimizer)
        result = outcome(
            Candidates(
                train_hours=fastest.train_hours[config],
                log_error=np.full(nodes.size, fastest.relative_error),
                nodes=nodes,
                spot_nodes=spot * (nodes - base),
                gpus_per_node=np.full(nodes.size, fastest.instance.ranks),
                spot_rate=of_way([way.hazard.rate_per_node_hour if way.hazard else 0 for way in ways]),
                spot_wait_hours=of_way([way.hazard.wait_hours if way.hazard else 0 for way in ways]),
                checkpoint_gib=np.full(nodes.size, size),
                checkpoint_writers=np.where(fastest.sharding[config] == DDP, 1.0, nodes),
            )
        )
        each = of_way([way.price.usd_per_hour for way in ways])
        on_demand = of_way([way.offer.on_demand.usd_per_hour if way.offer.on_demand else 0 for way in ways])
        regions = [way.offer.region for way in ways]
        bases = np.where(spot > 0, base, nodes * (1 - committed))
        cost = fleet_cost(
            result,
            Rates(
                base_nodes=bases,
                base_usd_per_hour=np.where(spot > 0, on_demand, each),
                spot_nodes=spot * (nodes - base),
                spot_usd_per_hour=each,
                committed_nodes=committed * nodes,
                committed_usd_per_hour=each,
                volume_usd_per_month=of_way([volume_usd_per_month(catalog, r) for r in regions]),
                storage_usd_per_month=of_way([storage_usd_per_month(catalog, r, size) for r in regions]),
                endpoints_usd_per_hour=of_way([endpoints_usd_per_hour(catalog, r) for r in regions]),
            ),
        )
        return cls(fastest=fastest, purchases=tuple(ways), config=config, purchase=purchase, run=result, cost=cost)

    def feasible(self, limits: Constraints) -> NDArray[np.bool_]:
        """Which candidates keep budget and deadline at the 95th percentile."""
        budget = math.inf if limits.budget_usd is None else limits.budget_usd
        deadline = math.inf if limits.deadline_hours is None else limits.deadline_hours
        hours, cost = self.run.hours_p95, self.cost.p95
        return np.asarray(np.isfinite(hours) & (cost <= budget) & (hours <= deadline))

    def rejection(self, limits: Constraints) -> Rejection:
        """Why no candidate keeps the limits: the one that binds, the nearest value to it, and the limit."""
        hours, cost = self.run.hours_p95, self.cost.p95
        name = self.fastest.instance.name
        if not np.isfinite(hours).any():
            worst = float(self.run.rate.min())
            return _rejection(name, "interruptions", "spot nodes are lost faster than the job recovers", worst, None)
        budget, deadline = limits.budget_usd, limits.deadline_hours
        if budget is not None and not (cost <= budget).any():
            return _rejection(
                name,
                "budget",
                f"the cheapest run costs {cost.min():,.2f} USD at the 95th percentile, the budget is {budget:,.2f} USD",
                float(cost.min()),
                budget,
            )
        assert deadline is not None  # without it, the budget alone decided
        if not (hours <= deadline).any():
            return _rejection(
                name,
                "deadline",
                f"the fastest run takes {hours.min():,.1f} h at the 95th percentile, the deadline is {deadline:,.1f} h",
                float(hours.min()),
                deadline,
            )
        assert budget is not None  # both limits can be kept, but not together
        cheapest = float(cost[hours <= deadline].min())
        return _rejection(
            name,
            "budget",
            f"the cheapest run within {deadline:,.1f} h costs {cheapest:,.2f} USD at the 95th percentile, "
            f"the budget is {budget:,.2f} USD",
            cheapest,
            budget,
        )


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

    def matches(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or name.split(".")[0] == pattern

    known = tuple(instance.name for instance in catalog.instance_types)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in known):
            catalog.instance_type(pattern)
    return tuple(name for name in known if not patterns or any(matches(name, pattern) for pattern in patterns))


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


def _rejection(name: str, binding: Binding, reason: str, value: Any, limit: Any) -> Rejection:
    return {"instance_type": name, "reason": reason, "binding_constraint": binding, "value": value, "limit": limit}


def search_type(
    instance: InstanceType,
    request: FleetRequest,
    model: ModelSpec,
    amount: Amount,
    regions: Sequence[str],
    catalog: Catalog,
    calibration: Calibration,
) -> Table | Rejection:
    """All candidates of one instance type, or why it has none whatever the limits on money and time."""
    limits = request.constraints
    offers = [offer for region in regions if (offer := catalog.offer(instance.name, region)) is not None]
    ways = [way for offer in offers for way in purchases(offer, limits)]
    if not offers:
        wanted = ", ".join(limits.regions) or "any region"
        return _rejection(instance.name, "region", f"not offered in {wanted}", wanted, None)
    if not ways:
        asked = ", ".join(limits.purchase_options)
        return _rejection(
            instance.name,
            "price",
            f"the catalog has no {asked} price of it in {', '.join(offer.region for offer in offers[:3])}"
            + (" ..." if len(offers) > 3 else ""),
            asked,
            None,
        )
    run = Run(seq_len=amount.seq_len, precision=request.workload.precision, optimizer=request.workload.optimizer)
    found = fastest(instance, run, model, amount, limits.max_nodes, calibration)
    if isinstance(found, dict):
        return found
    return Table.of(found, ways, model, run, catalog)
