"""Pairs of ways to have nodes that could train together, and the least that a mix of each can cost.

Most requests end here: no bound is below the best fleet of one type, and nothing is weighed (``find.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from optimizer.mixed.bounds import Bounds, longest_hours
from optimizer.mixed.physics import Physics, micro_batches
from optimizer.mixed.pricing import Terms
from optimizer.mixed.sources import pairs_of
from optimizer.performance.calibration import Calibration
from optimizer.performance.machines import share_of_gpu
from optimizer.performance.types import Recipe
from optimizer.request import Constraints
from optimizer.search.problem import Amount
from optimizer.search.purchases import Purchase
from optimizer.units import HOURS_PER_MONTH
from optimizer.workload.model import ModelSpec

Ints = NDArray[np.int64]
Places = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of one request.

    Attributes:
        limits: budget, deadline and nodes.
        samples, batch: of the training, and of a step at most.
        exact: whether a step has that many, as the request gives them.
        physics: estimates of the types.
        ways: how nodes can be had.
        kind: of each way, the position of its type in ``physics.types``.
        terms: what the ways cost and risk.
        most: nodes that can be had each way.
        pairs: of ways that could train together, pair x 2.
        bounds: of the pairs.
    """

    limits: Constraints
    samples: int
    batch: int
    exact: bool
    physics: Physics
    ways: tuple[Purchase, ...]
    kind: Places
    terms: Terms
    most: Ints
    pairs: Places
    bounds: Bounds

    @classmethod
    def of(
        cls,
        ways: Sequence[Purchase],
        terms: Terms,
        limits: Constraints,
        amount: Amount,
        recipe: Recipe,
        model: ModelSpec,
        calibration: Calibration,
    ) -> Self | None:
        """Estimate the types of ``ways`` and pair them; None where there is nothing to pair."""
        batch = amount.global_batch or amount.batch_limit
        # Megatron-LM counts the micro-batches of a step once for all data-parallel ranks
        # (https://github.com/NVIDIA/Megatron-LM, megatron/core/num_microbatches_calculator.py).
        if "data" not in limits.parallelism or recipe.framework.startswith("megatron"):
            return None
        had = {way.offer.instance.name: way.offer.instance for way in ways}
        places = {name: place for place, name in enumerate(had)}
        kind = np.array([places[way.offer.instance.name] for way in ways])
        ranks = np.array([instance.ranks for instance in had.values()])
        physics = Physics.of(
            tuple(had.values()),
            [share_of_gpu(instance) for instance in had.values()],
            model,
            recipe,
            micro_batches(batch // int(ranks.min()), free=amount.global_batch is None),
            calibration,
        )
        speed = physics.samples_per_second(np.arange(ranks.size), batch // ranks) * ranks
        pairs = pairs_of(ways, speed[kind] > 0)
        if not pairs.size:
            return None
        most = np.array([way.reservation.count if way.reservation else limits.max_nodes for way in ways])
        most = np.minimum(np.minimum(most, limits.max_nodes - 1), batch // terms.ranks)
        error = terms.log_error[pairs].max(axis=1)
        mean = np.exp(error**2 / 2)
        errors = np.array(sorted(set(error.tolist())))  # np.unique would import numpy.ma, which takes longer than this
        place = np.searchsorted(errors, error)
        shown_s = physics.least_communication_s(batch // ranks)[kind][pairs].max(axis=1)
        bounds = Bounds(
            usd_per_hour=(terms.usd_per_hour + terms.volume_usd_per_month / HOURS_PER_MONTH)[pairs],
            speed=speed[kind][pairs],
            most=most[pairs].astype(float),
            fleet_usd_per_hour=(terms.endpoints_usd_per_hour + terms.storage_usd_per_month / HOURS_PER_MONTH)[
                pairs[:, 0]
            ],
            reclaims=terms.reclaims[pairs].sum(axis=1),
            unit_hours=mean * amount.samples / 3600,
            shown_hours=mean * math.ceil(amount.samples / batch) * shown_s / 3600,
            longest_hours=longest_hours(limits.deadline_hours, errors)[place],
        )
        return cls(
            limits=limits,
            samples=amount.samples,
            batch=batch,
            exact=amount.global_batch is not None,
            physics=physics,
            ways=tuple(ways),
            kind=kind,
            terms=terms,
            most=most,
            pairs=pairs,
            bounds=bounds,
        )

    def could_cost_less(self, below: float) -> bool:
        """Whether the bound of any pair is below so many USD, and within the budget."""
        most = math.inf if self.limits.budget_usd is None else self.limits.budget_usd
        return bool((self.bounds.least_usd() < min(below, most)).any())
