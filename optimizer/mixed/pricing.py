"""Hours and dollars of mixes: the economics of a pure fleet, with the groups' prices, hazards and errors joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from optimizer.catalog import Catalog
from optimizer.economics.fleet_cost import FleetCost, Rates, fleet_cost
from optimizer.economics.outcome import Candidates, Outcome, outcome
from optimizer.economics.running_costs import endpoints_usd_per_hour, storage_usd_per_month, volume_usd_per_month
from optimizer.performance.calibration import Calibration
from optimizer.performance.types import Recipe
from optimizer.search.purchases import Purchase

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What each way to have nodes costs and risks; arrays over the ways.

    Attributes:
        usd_per_hour: of a node.
        reclaims: per node-hour; 0 where nodes are not reclaimed.
        wait_hours: for a reclaimed node's replacement.
        ranks: of a node.
        log_error: of the type's estimates.
        volume_usd_per_month: of a node.
        storage_usd_per_month, endpoints_usd_per_hour: of a fleet in the way's region.
        checkpoint_gib: size of a checkpoint.
    """

    usd_per_hour: Floats
    reclaims: Floats
    wait_hours: Floats
    ranks: Ints
    log_error: Floats
    volume_usd_per_month: Floats
    storage_usd_per_month: Floats
    endpoints_usd_per_hour: Floats
    checkpoint_gib: float

    @classmethod
    def of(
        cls,
        ways: Sequence[Purchase],
        recipe: Recipe,
        size_gib: float,
        catalog: Catalog,
        calibration: Calibration,
        *,
        kind: str | None,
    ) -> Self:
        """Look up the terms of ``ways``.

        Raises:
            DataMissingError: a price the cost needs is in no region of the catalog.
        """
        gpus = {way.offer.instance.gpu.key: way.offer.instance.gpu for way in ways}
        errors = {
            key: calibration.residual(gpu, recipe.precision, recipe.framework, kind=kind).relative_error
            for key, gpu in gpus.items()
        }
        regions = [way.offer.region for way in ways]
        volume = {region: volume_usd_per_month(catalog, region) for region in set(regions)}
        storage = {region: storage_usd_per_month(catalog, region, size_gib) for region in volume}
        endpoints = {region: endpoints_usd_per_hour(catalog, region) for region in volume}
        return cls(
            usd_per_hour=np.array([way.price.usd_per_hour for way in ways]),
            reclaims=np.array([way.hazard.rate_per_node_hour if way.hazard else 0.0 for way in ways]),
            wait_hours=np.array([way.hazard.wait_hours if way.hazard else 0.0 for way in ways]),
            ranks=np.array([way.offer.instance.ranks for way in ways]),
            log_error=np.array([errors[way.offer.instance.gpu.key] for way in ways]),
            volume_usd_per_month=np.array([volume[region] for region in regions]),
            storage_usd_per_month=np.array([storage[region] for region in regions]),
            endpoints_usd_per_hour=np.array([endpoints[region] for region in regions]),
            checkpoint_gib=size_gib,
        )

    def priced(
        self,
        pair: NDArray[np.intp],
        nodes: Ints,
        train_hours: Floats,
        writers: Floats,
        reserve_hours: Floats,
        log_error: Floats | None = None,
    ) -> tuple[Outcome, FleetCost]:
        """Hours and dollars of mixes, one an element.

        Losing a node of either group stops both. The speed of a mix is as uncertain as that of its less certain group.

        Args:
            pair: ways of the groups, mix x 2.
            nodes: of the groups, mix x 2.
            train_hours: useful hours of training.
            writers: nodes that write a checkpoint together.
            reserve_hours: to end the nodes in, within the budget.
            log_error: of the speed, where it is not that of the less certain group.
        """
        spot = nodes * (self.reclaims[pair] > 0)
        each = nodes * self.reclaims[pair]
        reclaims = each.sum(axis=1)
        # Which group's node a reclaim takes.
        weight = np.divide(each, reclaims[:, None], out=np.zeros(each.shape), where=reclaims[:, None] > 0)
        all_nodes = nodes.sum(axis=1).astype(float)
        price, region = self.usd_per_hour[pair], pair[:, 0]
        run = outcome(
            Candidates(
                train_hours=train_hours,
                log_error=self.log_error[pair].max(axis=1) if log_error is None else log_error,
                nodes=all_nodes,
                spot_nodes=spot.sum(axis=1),
                gpus_per_node=(nodes * self.ranks[pair]).sum(axis=1) / all_nodes,
                spot_rate=reclaims / np.maximum(spot.sum(axis=1), 1),
                spot_wait_hours=(weight * self.wait_hours[pair]).sum(axis=1),
                checkpoint_gib=np.full(all_nodes.size, self.checkpoint_gib),
                checkpoint_writers=writers,
            )
        )
        nothing = np.zeros(all_nodes.size)
        cost = fleet_cost(
            run,
            Rates(
                # All nodes at their mean price; of spot nodes only the price that stops while the job waits for one.
                base_nodes=all_nodes,
                base_usd_per_hour=(price * nodes).sum(axis=1) / all_nodes,
                spot_nodes=nothing,
                spot_usd_per_hour=(weight * price).sum(axis=1),
                committed_nodes=nothing,
                committed_usd_per_hour=nothing,
                volume_usd_per_month=self.volume_usd_per_month[region],
                storage_usd_per_month=self.storage_usd_per_month[region],
                endpoints_usd_per_hour=self.endpoints_usd_per_hour[region],
                # Nothing deploys a mixed fleet, so nothing controls it; who does has to end it in time all the same.
                controller_usd_per_hour=nothing,
                reserve_hours=reserve_hours,
            ),
        )
        return run, cost
