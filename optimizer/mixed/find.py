"""The search for mixes that are cheaper than a given cost: bound, then weigh what the bound leaves.

Pairs of groups are bounded first, whatever their nodes; then the node counts of the pairs that are left; then, closely,
those that could still be cheap enough; and what is left then is weighed, in the order of its bounds, until no bound is
below the best found. So the answer is that of weighing every mix, which a test does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.controller import reserve_hours
from optimizer.mixed import shares
from optimizer.mixed.mix import Mix
from optimizer.mixed.pairs import Pairs
from optimizer.mixed.physics import meets_every_micro_batch
from optimizer.performance.types import DDP
from optimizer.search.candidates import keeps_limits, part_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Places = NDArray[np.intp]

# Fleets an answer lists, each the best of its pair of types.
MAX_FLEETS = 3
# Most mixes that are weighed, and most node counts that are bounded closely. It is more than requests need
# (docs/mixed.md), so that one without a solution costs no seconds; what is found until then is sound all the same.
_MOST_WEIGHED = 256
_MOST_BOUNDED = 2048
_DATA_ONLY = {
    "tensor": 1,
    "pipeline": 1,
    "context": 1,
    "expert": 1,
    "sequence_parallel": 0,
    "virtual_stages": 1,
}
# Mixes weighed together at first, node counts bounded closely together at first, and pairs whose node counts are listed
# together.
_MIXES = 24
_COUNTS = 128
_PAIRS = 32


@dataclass(frozen=True, kw_only=True)
class Search(Pairs):
    """One request's search for mixes."""

    @cached_property
    def training(self) -> shares.Training:
        """Samples and global batch."""
        return shares.Training(samples=self.samples, batch=self.batch, exact=self.exact)

    def cheapest(self, below: float, known: Sequence[Mix] = ()) -> list[Mix]:
        """The best mix of each pair of types that costs less than ``below``, at most MAX_FLEETS, cheapest first.

        Args:
            below: USD.
            known: mixes found elsewhere, which those found here are listed with.
        """
        found = cheapest_of_each(known, below)

        def limit() -> float:
            best = sorted(mix.usd for mix in found.values())
            return best[MAX_FLEETS - 1] if len(best) >= MAX_FLEETS else below

        if self.limits.budget_usd is not None:
            below = min(below, self.limits.budget_usd)
        for pair, nodes in self._promising(limit):
            found = cheapest_of_each([*found.values(), *self.weigh(pair, nodes)], below)
        return sorted(found.values(), key=lambda mix: mix.key)[:MAX_FLEETS]

    def _promising(self, limit: Callable[[], float]) -> Iterator[tuple[Places, Ints]]:
        """Mixes (pair, nodes x 2) whose bound is below ``limit()``, some at a time and the least about first."""
        least = self.bounds.least_usd()
        order = np.flatnonzero(least < limit())
        order = order[np.argsort(least[order], kind="stable")]
        bounded = weighed = 0
        for at in range(0, order.size, _PAIRS):
            block = order[at : at + _PAIRS]
            block = block[least[block] < limit()]
            if not block.size:
                return
            pair, nodes = self._node_counts(block, limit())
            for these in _growing(pair.size, _COUNTS):
                near, counts, usd = self._nearer(pair[these], nodes[these], limit())
                bounded += these.stop - these.start
                for some in _growing(near.size, _MIXES):
                    if usd[some.start] >= limit():
                        break
                    yield near[some], counts[some]
                    weighed += some.stop - some.start
                    if weighed >= _MOST_WEIGHED:
                        return
                if bounded >= _MOST_BOUNDED:
                    return

    def node_counts(self, pair: int) -> Ints:
        """Every number of nodes (x 2) that a pair can have."""
        a, b = self.pairs[pair]
        x, y = np.arange(1, self.most[a] + 1)[:, None], np.arange(1, self.most[b] + 1)
        few = (x + y <= self.limits.max_nodes) & (
            x * self.terms.ranks[a] + y * self.terms.ranks[b] <= self.training.batch
        )
        return np.argwhere(few) + 1

    def _node_counts(self, block: Places, below: float) -> tuple[Places, Ints]:
        """Node counts of some pairs that could cost less than ``below``, the least bound first: pair, nodes (x 2)."""
        counts = [self.node_counts(pair) for pair in block.tolist()]
        pair, nodes = np.repeat(block, [len(count) for count in counts]), np.concatenate(counts)
        usd = self.bounds.least_usd_of(pair, nodes)
        order = np.flatnonzero(usd < below)
        order = order[np.argsort(usd[order], kind="stable")]
        return pair[order], nodes[order]

    def _nearer(self, pair: Places, nodes: Ints, below: float) -> tuple[Places, Ints, Floats]:
        """Those that still could, bounded by the cost of the least hours that these very nodes can take."""
        usd = self.least_usd_of(pair, nodes)
        order = np.flatnonzero(usd < below)
        order = order[np.argsort(usd[order], kind="stable")]
        return pair[order], nodes[order], usd[order]

    def least_usd_of(self, pair: Places, nodes: Ints) -> Floats:
        """Least expected USD of mixes of so many nodes (x 2); infinite where they break a limit."""
        kind = self.kind[self.pairs[pair]]
        ranks = nodes * self.terms.ranks[self.pairs[pair]]
        # Each rank of the other group takes at least one sample.
        largest = (self.training.batch - ranks[:, ::-1]) // ranks
        speed = (self.physics.samples_per_second(kind, largest) * ranks).sum(axis=1)
        shown_s = self.physics.least_communication_of_mixes_s(kind, nodes.sum(axis=1), ranks.sum(axis=1), largest)
        with np.errstate(divide="ignore"):
            hours = (
                self.training.samples / speed + math.ceil(self.training.samples / self.training.batch) * shown_s
            ) / 3600
        writers = nodes.sum(axis=1).astype(float)
        soonest = reserve_hours(0.0, self.terms.checkpoint_gib, writers)
        run, cost = self.terms.priced(self.pairs[pair], nodes, hours, writers, soonest)
        return np.where(keeps_limits(run, cost, self.limits), cost.expected, np.inf)

    def weigh(self, pair: Places, nodes: Ints) -> Iterator[Mix]:
        """The best way to train on each mix, ``nodes`` being mix x 2, where it keeps the limits."""
        kind = self.kind[self.pairs[pair]]
        ranks = nodes * self.terms.ranks[self.pairs[pair]]
        together = ranks.sum(axis=1)
        # Axes: mix, group, sharding, checkpointing, size, one or several micro-batches a step.
        fits = self.physics.fits(kind.reshape(-1), np.repeat(together, 2))
        fits = fits.reshape(*kind.shape, *fits.shape[1:])
        # No micro-batch is larger than what the other ranks leave.
        largest = (self.training.batch - ranks[:, ::-1]) // ranks
        fits &= (self.physics.sizes <= largest[..., None, None, None])[..., None]
        computed, shown = self.physics.parts(kind, nodes.sum(axis=1), together, fits[..., 0])
        computed[~fits] = np.inf
        modes = self.physics.shardings
        found = [self._split(at, ranks, computed[:, :, at], shown[:, :, at]) for at in range(modes.size)]
        row, at_mode = np.nonzero(np.stack([np.isfinite(split.seconds) for split in found], axis=1))
        if not row.size:
            return
        split = shares.Split(
            **{f.name: np.stack([getattr(s, f.name) for s in found], axis=1)[row, at_mode] for f in fields(found[0])}
        )
        way, size = np.divmod(split.setting, self.physics.sizes.size)
        sharding, checkpointing, micro = modes[at_mode], self.physics.checkpointings[way], self.physics.sizes[size]
        step_s, estimates = self.physics.steps(
            kind[row], nodes[row].sum(axis=1), together[row], sharding, checkpointing, micro, split.grad_accum
        )
        hours = split.steps * step_s / 3600
        # Of each mix the fastest sharding: at every price the cheapest.
        order = np.lexsort((hours, row))
        best = order[np.concatenate(([True], np.diff(row[order]) > 0))]
        two, count = self.pairs[pair[row[best]]], nodes[row[best]]
        writers = np.where(sharding[best] == DDP, 1.0, count.sum(axis=1))
        reserve = reserve_hours(step_s[best], self.terms.checkpoint_gib, writers)
        run, cost = self.terms.priced(two, count, hours[best], writers, reserve)
        computed = (estimates.step_time_s - estimates.time_s["data_communication"]).reshape(-1, 2)
        peak, limit = estimates.peak_memory_gib.reshape(-1, 2), estimates.limit_gib.reshape(-1, 2)
        for n in np.flatnonzero(keeps_limits(run, cost, self.limits)).tolist():
            at = int(best[n])
            ways = self.ways[two[n, 0]], self.ways[two[n, 1]]
            yield Mix(
                ways=ways,
                nodes=_two(count[n]),
                ranks=_two(ranks[row[at]]),
                layout=_DATA_ONLY | {"data": int(together[row[at]])},
                sharding=int(sharding[at]),
                checkpointing=_two(checkpointing[at]),
                micro_batch=_two(micro[at]),
                grad_accum=_two(split.grad_accum[at]),
                global_batch=int(split.global_batch[at]),
                steps=int(split.steps[at]),
                step_time_s=float(step_s[at]),
                computed_s=_two(computed[at]),
                peak_gib=_two(peak[at]),
                limit_gib=_two(limit[at]),
                run=part_of(run, n),
                cost=part_of(cost, n),
                log_error=float(self.terms.log_error[two[n]].max()),
            )

    def _split(self, mode: int, ranks: Ints, computed: Floats, shown: Floats) -> shares.Split:
        """The best shares of mixes for one sharding (its place); a setting is a checkpointing and a size.

        ``computed`` and ``shown`` are mix x group x checkpointing x size x (one, several micro-batches).
        """
        # With nothing that is infinite in the differences: what does not fit stays out by its computation.
        finite = np.where(np.isfinite(computed), computed, 0.0).reshape(*ranks.shape, -1, 2)
        shown = np.where(np.isfinite(shown), shown, 0.0).reshape(finite.shape)
        computed = computed.reshape(finite.shape)
        each = finite[..., 1] - finite[..., 0]
        several = np.isfinite(computed[..., 1])
        sizes = np.tile(self.physics.sizes, self.physics.checkpointings.size)
        groups: list[shares.Rates] = []
        places = []
        for g in (0, 1):
            looked = np.flatnonzero(np.isfinite(computed[:, g, :, 0]).any(axis=0))
            places.append(looked)
            groups.append(
                shares.Rates(
                    ranks=ranks[:, g],
                    sizes=sizes[looked],
                    once=computed[:, g, looked, 0],
                    each=np.where(several, each, np.inf)[:, g, looked],
                    fixed=(finite[..., 0] - each)[:, g, looked],
                    shown=shown[:, g, looked, 0],
                    more=(shown[..., 1] - shown[..., 0])[:, g, looked],
                )
            )
        share = shares.split_in_step if meets_every_micro_batch(self.physics.shardings[mode]) else shares.split_freely
        split = share(groups[0], groups[1], self.training)
        if not places[0].size or not places[1].size:
            return split
        setting = np.stack([places[g][split.setting[:, g]] for g in (0, 1)], axis=1)
        return replace(split, setting=setting)


def _growing(size: int, first: int) -> Iterator[slice]:
    """Slices of ``size`` things, each twice as long as the last: few where few are looked at, quick where many are."""
    start = 0
    while start < size:
        yield slice(start, min(start + first, size))
        start, first = start + first, 2 * first


def cheapest_of_each(mixes: Iterable[Mix], below: float) -> dict[frozenset[tuple[str, bool]], Mix]:
    """The best mix of each name among those that cost less than ``below``."""
    found: dict[frozenset[tuple[str, bool]], Mix] = {}
    for mix in sorted(mixes, key=lambda mix: mix.key):
        if mix.usd < below:
            found.setdefault(mix.name, mix)
    return found


def _two(values: NDArray[Any]) -> tuple[Any, Any]:
    first, second = values.tolist()
    return first, second
