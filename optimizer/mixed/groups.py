"""Node groups that a mixed fleet can be made of: who may join whom, and hours and dollars of two together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.checkpoint import checkpoints
from optimizer.economics.fleet_cost import FleetCost, HourlyRates, fleet_cost
from optimizer.economics.interruption import gang_reclaims, gang_waits
from optimizer.economics.outcome import Fleets, Outcome, predict_outcome
from optimizer.performance.calibration import POOLED, model_kind
from optimizer.performance.types import Hardware
from optimizer.search.confidence import network_error
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase, list_purchases
from optimizer.search.rejections import reject_disk

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def zones(purchase: PricedPurchase) -> tuple[str, ...]:
    """Zones that have the nodes at this price."""
    return (purchase.price.zone_id,) if purchase.price.zone_id else purchase.offer.zone_ids


@dataclass(frozen=True, kw_only=True)
class NodeGroups:
    """Every purchase that can be a node group; arrays are over the purchases.

    Attributes:
        purchases: rented on demand or on the spot market, or owned.
        most_nodes: nodes that can be had.
        usd_per_hour: price of one node.
        hazard_rate: reclaims per node-hour; 0 where nodes are not reclaimed.
        wait_hours: mean wait for the replacement of a reclaimed node.
        ranks: of one node.
        relative_error: of the type's estimates.
    """

    problem: Problem
    purchases: tuple[PricedPurchase, ...]
    most_nodes: Ints
    usd_per_hour: Floats
    hazard_rate: Floats
    wait_hours: Floats
    ranks: Ints
    relative_error: Floats

    @classmethod
    def find(cls, problem: Problem) -> Self:
        """List the purchases in the regions of the owned capacity.

        Left out: a new one-year commitment (its whole year is paid whatever joins it), an on-demand base under spot
        nodes and a topped-up reservation (mixes already), a Capacity Block (the mix would end with it), a fraction of a
        GPU (its network and host are shared with strangers), and types without known zones.
        """
        limits, recipe = problem.request.constraints, problem.recipe
        regions = {owned.region for owned in limits.usable_reservations} & set(problem.regions)
        types = {
            instance.name
            for instance in problem.instance_types
            if instance.gpu_count >= 1
            and recipe.precision in instance.gpu.peak_tflop_per_s
            and instance.ranks < problem.amount.global_batch
        }
        choices = tuple(
            purchase
            for offer in problem.catalog.offers
            if offer.instance.name in types and offer.region in regions and offer.zone_ids
            if reject_disk(problem, offer.instance) is None
            for purchase in list_purchases(offer, limits, every_zone=True)
            if not (purchase.committed or purchase.base or purchase.topped_up or purchase.option == "capacity-block")
        )
        kind, hazards = model_kind(problem.model), [purchase.hazard for purchase in choices]
        residuals = [
            problem.calibration.residual(p.offer.instance.gpu, recipe.precision, recipe.framework, kind=kind)
            for p in choices
        ]
        unmeasured = problem.model.unmeasured_parts(recipe.seq_len)
        least_error = problem.calibration.residuals[POOLED].relative_error if unmeasured else 0.0
        most = [p.reservation.count if p.reservation else limits.max_nodes for p in choices]
        return cls(
            problem=problem,
            purchases=choices,
            most_nodes=np.minimum(np.array(most, dtype=np.int64), limits.max_nodes - 1),
            usd_per_hour=np.array([p.price.usd_per_hour for p in choices]),
            hazard_rate=np.array([hazard.rate_per_node_hour if hazard else 0.0 for hazard in hazards]),
            wait_hours=np.array([hazard.wait_hours if hazard else 0.0 for hazard in hazards]),
            ranks=np.array([p.offer.instance.ranks for p in choices], dtype=np.int64),
            relative_error=np.array(
                [
                    max(
                        residual.relative_error,
                        network_error(Hardware.from_instance_type(p.offer.instance), nodes=2),
                        least_error,
                    )
                    for p, residual in zip(choices, residuals, strict=True)
                ]
            ),
        )

    def pairs(self, *, like: bool) -> Iterator[tuple[int, int]]:
        """Pairs of an owned group and another in one zone and of one processor architecture; two owned ones once.

        EFA does not leave a zone (https://docs.aws.amazon.com/parallelcluster/latest/ug/efa-v3.html), gradients that do
        are billed by the GB (https://aws.amazon.com/ec2/pricing/on-demand/), and all nodes run one image.

        Args:
            like: whether both are of one instance type, or of two.
        """
        for a, owned in enumerate(self.purchases):
            for b, other in enumerate(self.purchases):
                own, joining = owned.offer.instance, other.offer.instance
                if (
                    owned.reservation
                    and a != b
                    and not (other.reservation and b < a)
                    and (own.name == joining.name) == like
                    and own.cpu_architecture == joining.cpu_architecture
                    and owned.offer.region == other.offer.region
                    and set(zones(owned)) & set(zones(other))
                ):
                    yield a, b

    def price(
        self,
        pair: NDArray[np.intp],
        nodes: Ints,
        train_hours: Floats,
        checkpoint_writers: Floats,
        drain_reserve_hours: Floats,
        relative_error: Floats | None = None,
    ) -> tuple[Outcome, FleetCost]:
        """Work out hours and dollars of mixes, one an element; losing a node of either group stops both.

        Args:
            pair: positions of the two groups, mix x 2.
            nodes: of the groups, mix x 2.
            train_hours: useful hours of training.
            checkpoint_writers: nodes that write a checkpoint together.
            drain_reserve_hours: kept under the budget to end the nodes in.
            relative_error: of the speed; without it, that of the less certain group.
        """
        spot = (nodes * (self.hazard_rate[pair] > 0)).sum(axis=1)
        # The groups are two pools, whose reclaims do not come together.
        node_rate = self.hazard_rate[pair]
        rates = node_rate * gang_reclaims(nodes.astype(float))
        rate = rates.sum(axis=1)
        spot_rate = rate / np.maximum(gang_reclaims(spot), 1)
        waits = (node_rate * gang_waits(nodes.astype(float)) * self.wait_hours[pair]).sum(axis=1)
        # Share of the reclaims that takes a node of each group.
        share = np.divide(rates, rate[:, None], out=np.zeros(rates.shape), where=rate[:, None] > 0)
        all_nodes = nodes.sum(axis=1).astype(float)
        price = self.usd_per_hour[pair]
        copies = [self.problem.node_copy(purchase.offer.instance.name) for purchase in self.purchases]
        costs = [self.problem.running_costs(self.purchases[a].offer.region) for a in pair[:, 0].tolist()]
        checkpoint_usd = np.array([c.checkpoint_usd for c in costs])
        gpus_per_node = (nodes * self.ranks[pair]).sum(axis=1) / all_nodes
        hours = predict_outcome(
            Fleets(
                train_hours=train_hours,
                log_error=self.relative_error[pair].max(axis=1) if relative_error is None else relative_error,
                nodes=all_nodes,
                spot_nodes=spot,
                gpus_per_node=gpus_per_node,
                spot_rate=spot_rate,
                spot_wait_hours=np.divide(
                    waits, spot_rate * gang_waits(spot), out=np.zeros(rate.shape), where=spot_rate > 0
                ),
                checkpoints=checkpoints(
                    self.problem.checkpoint_gib,
                    self.problem.recipe.framework,
                    nodes=all_nodes,
                    gpus_per_node=gpus_per_node,
                    writers=checkpoint_writers,
                    usd=checkpoint_usd,
                ),
                usd_per_hour=(price * nodes).sum(axis=1),
                fallback=np.zeros(all_nodes.size, dtype=bool),
                # The slower group's: both are needed to train.
                staging_hours=np.array([copy.hours if copy else 0.0 for copy in copies])[pair].max(axis=1),
            )
        )
        copy_usd = np.array([copy.requests if copy else 0 for copy in copies])[pair].max(axis=1) * np.array(
            [c.read_request_usd for c in costs]
        )
        nothing = np.zeros(all_nodes.size)
        cost = fleet_cost(
            hours,
            HourlyRates(
                # All nodes at their mean price; of spot nodes only the price that stops while the job waits for one.
                base_nodes=all_nodes,
                base_usd_per_hour=(price * nodes).sum(axis=1) / all_nodes,
                spot_nodes=nothing,
                spot_usd_per_hour=(share * price).sum(axis=1),
                committed_nodes=nothing,
                committed_usd_per_hour=nothing,
                volume_usd_per_month=np.array([c.volume_usd_per_month for c in costs]),
                storage_usd_per_month=np.array([c.storage_usd_per_month for c in costs]),
                endpoints_usd_per_hour=np.array([c.endpoints_usd_per_hour for c in costs]),
                # Nothing deploys a mixed fleet, so no controller is paid; the time to end it in is kept all the same.
                controller_usd_per_hour=nothing,
                reserve_hours=drain_reserve_hours,
                copy_usd=copy_usd,
                carry_usd=np.array([c.carry_usd for c in costs]),
                checkpoint_usd=checkpoint_usd,
            ),
        )
        return hours, cost
