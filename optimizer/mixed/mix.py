"""A mix that was weighed, with everything the answer says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.economics.fleet_cost import FleetCost
from optimizer.economics.outcome import Outcome
from optimizer.mixed.sources import group_name
from optimizer.search.purchases import Purchase


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Two groups of nodes; tuples are of the groups, ``run`` and ``cost`` hold single numbers.

    Attributes:
        ways, nodes, ranks: how the nodes are had, how many, and their GPUs.
        layout: data, tensor, pipeline, context, expert, sequence_parallel and virtual_stages, as in Grid, of both
            groups together.
        sharding: as in Grid.
        checkpointing, micro_batch, grad_accum: as in Grid, of each group.
        global_batch, steps: samples of a step, and optimizer steps.
        step_time_s: one step; computed_s of it is each group's own computation.
        peak_gib, limit_gib: memory of a rank.
        run, cost: hours and dollars.
        log_error: of the speed, standard deviation of the log.
    """

    ways: tuple[Purchase, Purchase]
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
    run: Outcome
    cost: FleetCost
    log_error: float

    @property
    def usd(self) -> float:
        """Expected cost."""
        return float(self.cost.expected)

    @property
    def name(self) -> frozenset[tuple[str, bool]]:
        """What its groups are: of mixes of one name, an answer lists the best."""
        return frozenset(group_name(way) for way in self.ways)

    @property
    def key(self) -> tuple[object, ...]:
        """Orders mixes: expected cost, expected hours, nodes, what the groups are, region."""
        names = tuple((*group_name(way), way.option) for way in self.ways)
        return self.usd, float(self.run.hours_expected), sum(self.nodes), names, self.ways[0].offer.region
