"""``Mix``: two node groups with the configuration they train with, and their hours and dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.economics.fleet_cost import FleetCost
from optimizer.economics.outcome import Outcome
from optimizer.search.purchases import PricedPurchase


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Two node groups; tuples are over the groups, ``outcome`` and ``cost`` hold single numbers.

    Attributes:
        purchases, nodes, ranks: how the nodes are paid for, how many there are, and their GPUs.
        layout: data, tensor, pipeline, context, expert, sequence_parallel and virtual_stages, as in Grid, of both.
        sharding: as in Grid.
        checkpointing, micro_batch, grad_accum: as in Grid, of each group.
        global_batch, steps: samples of a step, and optimizer steps.
        step_time_s: one step.
        computed_s: computation of each group in a step.
        peak_gib, limit_gib: memory of a rank.
        outcome, cost: hours and dollars.
        relative_error: of the speed.
    """

    purchases: tuple[PricedPurchase, PricedPurchase]
    nodes: tuple[int, int]
    ranks: tuple[int, int]
    layout: Mapping[str, int]
    sharding: int
    checkpointing: tuple[int, int]
    micro_batch: tuple[int, int]
    grad_accum: tuple[int, int]
    global_batch: int
    steps: int
    step_time_s: float
    computed_s: tuple[float, float]
    peak_gib: tuple[float, float]
    limit_gib: tuple[float, float]
    outcome: Outcome
    cost: FleetCost
    relative_error: float

    @property
    def usd(self) -> float:
        """Expected cost."""
        return float(self.cost.expected)

    @property
    def type_names(self) -> frozenset[tuple[str, bool]]:
        """Instance type of each group, and whether it is owned; an answer lists the best mix of each."""
        return frozenset((p.offer.instance.name, p.reservation is not None) for p in self.purchases)

    @property
    def rank(self) -> tuple[object, ...]:
        """Sort key: expected cost, expected hours, nodes, then names."""
        names = tuple((p.offer.instance.name, p.reservation is not None, p.option) for p in self.purchases)
        return self.usd, float(self.outcome.hours_expected), sum(self.nodes), names, self.purchases[0].offer.region
