"""The search for mixes that are cheaper than a given cost: bound, then weigh what the bound leaves.

Pairs of types are bounded first (``bounds.Pair.least_usd``), then the node counts of the pairs that are left; those are
weighed in the order of their bounds until no bound is below the best found. So the answer is that of weighing them all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from optimizer.catalog import Catalog
from optimizer.economics.checkpoint import checkpoint_gib
from optimizer.economics.fleet_cost import FleetCost, Rates, fleet_cost
from optimizer.economics.outcome import Candidates, Outcome, outcome
from optimizer.hardware import InstanceType, Offer
from optimizer.mixed import shares
from optimizer.mixed.bounds import Pair, longest_hours
from optimizer.mixed.physics import Physics, meets_every_micro_batch
from optimizer.performance.calibration import Calibration
from optimizer.performance.types import DDP, SHARDINGS, ZERO1, Estimates, Run
from optimizer.request import Constraints, FleetRequest
from optimizer.search import (
    Amount,
    Purchase,
    endpoints_usd_per_hour,
    matching_types,
    purchases,
    share_of_gpu,
    storage_usd_per_month,
    volume_usd_per_month,
)
from optimizer.units import HOURS_PER_MONTH
from optimizer.workload.model import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Row = TypeVar("Row", Outcome, FleetCost)

# Fleets an answer lists, each the best of its pair of types.
MAX_FLEETS = 3
# Node counts weighed together, and pairs whose node counts are bounded together.
_CHUNK = 24
_PAIRS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Nodes of one type in one region: rented in any of several ways, or owned.

    Attributes:
        offer: the type, region and zones.
        ways: the ways to pay; owned capacity has one.
        most_nodes: nodes there are at most.
        usd_per_hour: the cheapest way.
    """

    offer: Offer
    ways: tuple[Purchase, ...]
    most_nodes: int
    usd_per_hour: float

    @property
    def name(self) -> tuple[str, bool]:
        """The type, and whether it is owned."""
        return self.offer.instance.name, self.ways[0].reservation is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """One mix that was weighed: the best way to pay for its nodes, and everything the answer says of it.

    ``key`` orders mixes: expected cost, expected hours, nodes, names.
    """

    key: tuple[object, ...]
    sources: tuple[Source, Source]
    ways: tuple[Purchase, Purchase]
    nodes: tuple[int, int]
    sharding: int
    checkpointing: tuple[int, int]
    micro_batch: tuple[int, int]
    split: shares.Split
    step_time_s: float
    computed_s: tuple[float, float]
    peak_gib: tuple[float, float]
    limit_gib: tuple[float, float]
    run: Outcome
    cost: FleetCost
    log_error: float

    @property
    def usd(self) -> float:
        """Expected cost."""
        return float(self.cost.expected)


@dataclass(frozen=True, kw_only=True)
class Search:
    """One request's search for mixes.

    Attributes:
        limits: budget, deadline and nodes.
        samples, batch, exact: the training; batch is the global batch, or the largest one allowed if not ``exact``.
        physics: estimates of the types.
        sources: what nodes can be had.
        kind: of each source, the position of its type in ``physics.types``.
        pairs: sources x 2, each a pair that could train together.
        bound: of the pairs.
        volume, storage, endpoints: USD a month of a node's volumes and of the bucket, and an hour of the endpoints, by
            region.
        size_gib: of a checkpoint.
    """

    limits: Constraints
    samples: int
    batch: int
    exact: bool
    physics: Physics
    sources: tuple[Source, ...]
    kind: NDArray[np.intp]
    pairs: NDArray[np.intp]
    bound: Pair
    volume: dict[str, float]
    storage: dict[str, float]
    endpoints: dict[str, float]
    size_gib: float

    @classmethod
    def of(
        cls,
        request: FleetRequest,
        model: ModelSpec,
        amount: Amount,
        regions: Sequence[str],
        catalog: Catalog,
        calibration: Calibration,
    ) -> Search | None:
        """Estimate the types and pair them; None where there is nothing to pair."""
        limits = request.constraints
        batch = amount.global_batch or amount.batch_limit
        run = Run(seq_len=amount.seq_len, precision=request.workload.precision, optimizer=request.workload.optimizer)
        types = [
            instance
            for name in matching_types(limits.instance_types, catalog)
            # A fraction of a GPU shares its network and host with strangers: no gang of them.
            if (instance := catalog.instance_type(name)).gpu_count >= 1
            and run.precision in instance.gpu.peak_tflop_per_s
            and instance.ranks < batch
        ]
        sources = tuple(_sources(types, regions, limits, catalog))
        if len(sources) < 2 or limits.max_nodes < 2:
            return None
        offered = {source.offer.instance.name: source.offer.instance for source in sources}
        types, names = list(offered.values()), list(offered)
        kind = np.array([names.index(source.offer.instance.name) for source in sources])
        ranks = np.array([instance.ranks for instance in types])
        physics = Physics.of(
            types, [share_of_gpu(i) for i in types], model, run, batch // int(ranks.min()), calibration
        )
        size = checkpoint_gib(model.parameters, run.optimizer)
        used_regions = {source.offer.region for source in sources}
        volume = {region: volume_usd_per_month(catalog, region) for region in used_regions}
        storage = {region: storage_usd_per_month(catalog, region, size) for region in used_regions}
        endpoints = {region: endpoints_usd_per_hour(catalog, region) for region in used_regions}
        largest = batch // ranks
        speed = physics.samples_per_second(largest) * ranks
        pairs = _pairs(sources, speed[kind] > 0)
        if not pairs.size:
            return None
        fixed = {region: endpoints[region] + storage[region] / HOURS_PER_MONTH for region in used_regions}
        shown_s = physics.least_communication_s(largest)
        two = kind[pairs]
        error = physics.log_error[two].max(axis=1)
        mean = np.exp(error**2 / 2)
        errors, which = np.unique(physics.log_error, return_inverse=True)
        keeps = longest_hours(limits.deadline_hours, errors)
        usd = np.array([s.usd_per_hour + volume[s.offer.region] / HOURS_PER_MONTH for s in sources])[pairs]
        most = np.array([float(min(s.most_nodes, limits.max_nodes - 1)) for s in sources])[pairs]
        bound = Pair(
            usd_per_hour=(usd[:, 0], usd[:, 1]),
            speed=(speed[two[:, 0]], speed[two[:, 1]]),
            most=(most[:, 0], most[:, 1]),
            fleet_usd_per_hour=np.array([fixed[s.offer.region] for s in sources])[pairs[:, 0]],
            unit_hours=mean * amount.samples / 3600,
            shown_hours=mean * math.ceil(amount.samples / batch) * shown_s[two].max(axis=1) / 3600,
            longest_hours=keeps[which[two]].min(axis=1),
        )
        return cls(
            limits=limits,
            samples=amount.samples,
            batch=batch,
            exact=amount.global_batch is not None,
            physics=physics,
            sources=sources,
            kind=kind,
            pairs=pairs,
            bound=bound,
            volume=volume,
            storage=storage,
            endpoints=endpoints,
            size_gib=size,
        )

    def cheapest(self, below: float) -> list[Mix]:
        """The best mix of each pair of types that costs less than ``below``, at most MAX_FLEETS, cheapest first."""
        found: dict[frozenset[tuple[str, bool]], Mix] = {}
        if self.limits.budget_usd is not None:
            below = min(below, self.limits.budget_usd)

        def limit() -> float:
            best = sorted(mix.usd for mix in found.values())
            return best[MAX_FLEETS - 1] if len(best) >= MAX_FLEETS else below

        least = self.bound.least_usd()
        order = np.flatnonzero(least < below)
        order = order[np.argsort(least[order], kind="stable")]
        for at in range(0, order.size, _PAIRS):
            block = order[at : at + _PAIRS]
            block = block[least[block] < limit()]
            if not block.size:
                break
            pair, nodes, usd = self._node_counts(block, limit())
            for start in range(0, pair.size, _CHUNK):
                chunk = slice(start, start + _CHUNK)
                if usd[start] >= limit():
                    break
                for mix in self.weigh(pair[chunk], nodes[chunk]):
                    key = frozenset(source.name for source in mix.sources)
                    if mix.usd < below and (key not in found or mix.key < found[key].key):
                        found[key] = mix
        return sorted(found.values(), key=lambda mix: mix.key)[:MAX_FLEETS]

    def _node_counts(self, block: NDArray[np.intp], below: float) -> tuple[NDArray[np.intp], Ints, Floats]:
        """Node counts of some pairs that could cost less than ``below``: pair, nodes (x 2), and bound, by the bound."""
        pairs, counts = [], []
        for pair in block:
            sources = [self.sources[at] for at in self.pairs[pair]]
            ranks = [source.offer.instance.ranks for source in sources]
            x, y = (
                np.arange(1, min(source.most_nodes, self.limits.max_nodes - 1, self.batch // r) + 1)
                for source, r in zip(sources, ranks, strict=True)
            )
            keep = (x[:, None] + y <= self.limits.max_nodes) & (x[:, None] * ranks[0] + y * ranks[1] <= self.batch)
            at = np.argwhere(keep) + 1
            pairs.append(np.full(len(at), pair))
            counts.append(at)
        pair, nodes = np.concatenate(pairs), np.concatenate(counts)
        usd = self.bound.take(pair).least_usd_of(nodes[:, 0].astype(float), nodes[:, 1].astype(float))
        order = np.flatnonzero(usd < below)
        order = order[np.argsort(usd[order], kind="stable")]
        return pair[order], nodes[order], usd[order]

    def weigh(self, pair: NDArray[np.intp], nodes: Ints) -> Iterator[Mix]:
        """The best way to train and to pay for each mix that keeps the limits; ``nodes`` is mix x 2."""
        sources = [tuple(self.sources[at] for at in self.pairs[p]) for p in pair]
        kind = self.kind[self.pairs[pair]]
        ranks = nodes * np.array([instance.ranks for instance in self.physics.types])[kind]
        together = ranks.sum(axis=1)
        fits = self.physics.fits(kind.reshape(-1), np.repeat(together, 2))
        options = [
            (row, mode, split, ways)
            for row in range(len(pair))
            for mode, split, ways in self._splits(kind[row], ranks[row], fits[2 * row : 2 * row + 2])
        ]
        if not options:
            return
        rows = np.array([option[0] for option in options])
        splits = [option[2] for option in options]
        sharding = np.array([option[1] for option in options])
        checkpointing = np.array([option[3] for option in options])
        micro = self.physics.sizes[np.array([split.size for split in splits])]
        step_s, estimates = self.physics.steps(
            kind[rows],
            nodes[rows].sum(axis=1),
            together[rows],
            sharding,
            checkpointing,
            micro,
            np.array([split.grad_accum for split in splits]),
        )
        hours = np.array([split.steps for split in splits]) * step_s / 3600
        # Of each mix the fastest sharding: at every price the cheapest.
        order = np.lexsort((hours, rows))
        fastest = order[np.concatenate(([True], np.diff(rows[order]) > 0))]
        yield from self._priced(
            [sources[rows[at]] for at in fastest],
            nodes[rows[fastest]],
            kind[rows[fastest]],
            hours[fastest],
            sharding[fastest],
            [
                (splits[at], checkpointing[at], micro[at], float(step_s[at]), _groups(estimates, int(at)))
                for at in fastest
            ],
        )

    def _splits(
        self, kind: NDArray[np.intp], ranks: Ints, fits: NDArray[np.bool_]
    ) -> Iterator[tuple[int, shares.Split, tuple[int, int]]]:
        """The best shares of one mix for each sharding, and each group's checkpointing."""
        seconds = self.physics.seconds[self.physics.chip[kind]]
        every = np.where(fits, seconds[..., None], np.inf)
        way = every.argmin(axis=2)  # group x sharding x size x (one, several micro-batches)
        time = every.min(axis=2)
        last: tuple[NDArray[np.float64], shares.Split | None] | None = None
        for mode in range(len(SHARDINGS)):
            a, b = (
                shares.Rates(ranks=int(ranks[g]), once=time[g, mode, :, 0], each=time[g, mode, :, 1]) for g in (0, 1)
            )
            if last is not None and mode == ZERO1 and np.array_equal(time[:, mode], last[0]):
                split = last[1]
            else:
                share = shares.split_in_step if meets_every_micro_batch(mode) else shares.split_freely
                split = share(self.physics.sizes, a, b, self.samples, self.batch, self.exact)
            last = (time[:, mode], split)
            if split is not None:
                first, second = (int(way[g, mode, split.size[g], int(split.grad_accum[g] > 1)]) for g in (0, 1))
                yield mode, split, (first, second)

    def _priced(
        self,
        sources: Sequence[tuple[Source, ...]],
        nodes: Ints,
        kind: NDArray[np.intp],
        hours: Floats,
        sharding: Ints,
        trained: Sequence[tuple[shares.Split, Ints, Ints, float, tuple[tuple[float, float], ...]]],
    ) -> Iterator[Mix]:
        """Cross mixes with ways to pay; the cheapest of each that keeps the limits."""
        choices = [
            (at, ways)
            for at, two in enumerate(sources)
            for ways in itertools.product(*(source.ways for source in two))
            if zones(ways)
        ]
        if not choices:
            return
        at = np.array([choice[0] for choice in choices])
        count = nodes[at].astype(float)
        price = np.array([[way.price.usd_per_hour for way in ways] for _, ways in choices])
        spot = np.array([[way.hazard is not None for way in ways] for _, ways in choices]) * count
        rate = np.array([[way.hazard.rate_per_node_hour if way.hazard else 0.0 for way in ways] for _, ways in choices])
        wait = np.array([[way.hazard.wait_hours if way.hazard else 0.0 for way in ways] for _, ways in choices])
        reclaims = (spot * rate).sum(axis=1)
        # Of the node that a reclaim takes, by how often it is which group's.
        weight = np.divide(spot * rate, reclaims[:, None], out=np.zeros_like(spot), where=reclaims[:, None] > 0)
        all_nodes = count.sum(axis=1)
        spot_nodes = spot.sum(axis=1)
        gpus = (count * np.array([i.ranks for i in self.physics.types])[kind[at]]).sum(axis=1)
        error = self.physics.log_error[kind[at]].max(axis=1)
        region = [sources[a][0].offer.region for a in at]
        run = outcome(
            Candidates(
                train_hours=hours[at],
                log_error=error,
                nodes=all_nodes,
                spot_nodes=spot_nodes,
                gpus_per_node=gpus / all_nodes,
                spot_rate=reclaims / np.maximum(spot_nodes, 1.0),
                spot_wait_hours=(weight * wait).sum(axis=1),
                checkpoint_gib=np.full(at.size, self.size_gib),
                checkpoint_writers=np.where(sharding[at] == DDP, 1.0, all_nodes),
            )
        )
        nothing = np.zeros(at.size)
        cost = fleet_cost(
            run,
            Rates(
                # All nodes by their mean price; of a spot node only the price that stops while the job waits for it.
                base_nodes=all_nodes,
                base_usd_per_hour=(price * count).sum(axis=1) / all_nodes,
                spot_nodes=nothing,
                spot_usd_per_hour=(weight * price).sum(axis=1),
                committed_nodes=nothing,
                committed_usd_per_hour=nothing,
                volume_usd_per_month=np.array([self.volume[r] for r in region]),
                storage_usd_per_month=np.array([self.storage[r] for r in region]),
                endpoints_usd_per_hour=np.array([self.endpoints[r] for r in region]),
            ),
        )
        budget = math.inf if self.limits.budget_usd is None else self.limits.budget_usd
        deadline = math.inf if self.limits.deadline_hours is None else self.limits.deadline_hours
        keeps = np.isfinite(run.hours_p95) & (run.hours_p95 <= deadline) & (cost.p95 <= budget)
        for mix in range(len(sources)):
            rows = np.flatnonzero(keeps & (at == mix))
            if not rows.size:
                continue
            row = int(rows[np.lexsort((run.hours_expected[rows], cost.expected[rows]))[0]])
            split, checkpointing, micro, step_s, groups = trained[mix]
            two, ways = sources[mix], choices[row][1]
            names = tuple((source.name, way.option) for source, way in zip(two, ways, strict=True))
            yield Mix(
                key=(
                    float(cost.expected[row]),
                    float(run.hours_expected[row]),
                    int(all_nodes[row]),
                    names,
                    region[row],
                ),
                sources=(two[0], two[1]),
                ways=(ways[0], ways[1]),
                nodes=(int(nodes[mix, 0]), int(nodes[mix, 1])),
                sharding=int(sharding[mix]),
                checkpointing=(int(checkpointing[0]), int(checkpointing[1])),
                micro_batch=(int(micro[0]), int(micro[1])),
                split=split,
                step_time_s=step_s,
                computed_s=(groups[0][0], groups[0][1]),
                peak_gib=(groups[1][0], groups[1][1]),
                limit_gib=(groups[2][0], groups[2][1]),
                run=_row_of(run, row),
                cost=_row_of(cost, row),
                log_error=float(error[row]),
            )


def zones(ways: Sequence[Purchase]) -> tuple[str, ...]:
    """Zones where all of ``ways`` can be bought at their prices, sorted; empty where there is none, or none is known.

    One zone holds a mix: EFA does not leave it (https://docs.aws.amazon.com/parallelcluster/latest/ug/efa-v3.html), and
    gradients that do are billed by the GB (https://aws.amazon.com/ec2/pricing/on-demand/#Data_Transfer).
    """
    each = [{way.price.zone_id} if way.price.zone_id else set(way.offer.zone_ids) for way in ways]
    return tuple(sorted(set.intersection(*each)))


def _sources(
    types: Sequence[InstanceType], regions: Sequence[str], limits: Constraints, catalog: Catalog
) -> Iterator[Source]:
    """What can be rented and what is owned. A new one-year commitment, and an on-demand base under spot, are left out:
    the first costs its whole year whatever joins it, the second is a mix already."""
    names, places = {instance.name for instance in types}, set(regions)
    for offer in catalog.offers:
        if offer.instance.name not in names or offer.region not in places or not offer.zone_ids:
            continue
        ways = [way for way in purchases(offer, limits) if not way.committed and not way.base]
        rented = tuple(way for way in ways if way.reservation is None)
        if rented:
            least = min(way.price.usd_per_hour for way in rented)
            yield Source(offer=offer, ways=rented, most_nodes=limits.max_nodes, usd_per_hour=least)
        for way in ways:
            if way.reservation is not None:
                yield Source(
                    offer=offer, ways=(way,), most_nodes=way.reservation.count, usd_per_hour=way.price.usd_per_hour
                )


def _pairs(sources: Sequence[Source], trains: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Pairs of sources that could train together: of one region, a zone of which offers both, and of one processor
    architecture, as all nodes run one image."""
    region = np.array([source.offer.region for source in sources])
    architecture = np.array([source.offer.instance.cpu_architecture for source in sources])
    found = [np.empty((0, 2), dtype=np.intp)]
    for name in np.unique(region):
        at = np.flatnonzero((region == name) & trains)
        # Zones as bits of a number: few of them are in one region.
        zone_ids = [sources[i].offer.zone_ids for i in at.tolist()]
        bit = {zone: 1 << place for place, zone in enumerate({zone for zones in zone_ids for zone in zones})}
        offered = np.array([sum(bit[zone] for zone in zones) for zones in zone_ids], dtype=np.int64)
        a, b = np.triu_indices(at.size, 1)
        keep = (architecture[at[a]] == architecture[at[b]]) & (offered[a] & offered[b] != 0)
        found.append(np.stack([at[a[keep]], at[b[keep]]], axis=1))
    return np.concatenate(found)


def _groups(estimates: Estimates, mix: int) -> tuple[tuple[float, float], ...]:
    """Of the two groups of a mix: seconds of computation, peak and limit of memory."""
    own = slice(2 * mix, 2 * mix + 2)
    computed = estimates.step_time_s[own] - estimates.time_s["data_communication"][own]
    first, second, third = (
        (float(a), float(b)) for a, b in (computed, estimates.peak_memory_gib[own], estimates.limit_gib[own])
    )
    return first, second, third


def _row_of(table: Row, row: int) -> Row:
    """One row of a table of arrays, as a table of single numbers."""
    return replace(table, **{f.name: getattr(table, f.name)[row] for f in fields(table)})
