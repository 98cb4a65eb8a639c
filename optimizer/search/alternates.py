"""Alternates: the places that a plan's nodes may go to when the plan's own has no capacity, within its limits at p95.

Of each type that the stack can boot, the plan's configuration is priced in every zone, on demand and on spot. On spot
the plan's fallback counts, so its on-demand price binds the limits too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import Alternate, FleetPlan
from optimizer.contract.units import rounded
from optimizer.search.candidates import Candidate, build_table
from optimizer.search.fastest import SAME, estimate_configurations
from optimizer.search.plan_builder import describe_memory, describe_node, describe_run, describe_speed, node_price
from optimizer.search.problem import Problem
from optimizer.search.purchases import list_purchases

# Alternates of a plan at most; the plan is read by people, too.
MAX_ALTERNATES = 6


class _Place(NamedTuple):
    """A zone for a candidate; ``speed`` has the fields of an Alternate that differ from the plan's own type."""

    usd: float
    zone_id: str
    candidate: Candidate
    speed: dict[str, Any]

    @property
    def option(self) -> Any:
        return self.candidate.purchase.option


def add_alternates(problem: Problem, candidate: Candidate, plan: FleetPlan) -> FleetPlan:
    """The plan of a candidate with its alternates, and the on-demand prices that a fallback of other types counts with.

    A reservation or Capacity Block is in one place and is paid for, so its plan has none. Nor has a plan with a file
    system for its data: that is in one zone, and what crosses zones is billed by the GB.
    """
    if plan.purchase.option not in ("on-demand", "spot") or plan.lustre:
        return plan
    places = _choose(
        [
            place
            for instance in problem.instance_types
            if can_replace(candidate.table.fastest.instance, instance)
            for place in _list_places(problem, candidate, plan, instance)
        ]
    )
    prices, alternates = dict.fromkeys(plan.prices), list[Alternate]()
    for place in places:
        purchase = place.candidate.purchase
        offer = purchase.offer
        if purchase.fallback and offer.on_demand:
            prices[node_price("on-demand", offer, offer.on_demand)] = None
        alternates.append(
            Alternate(
                zone_id=place.zone_id,
                instance_type=offer.instance.name,
                purchase=place.option,
                price=node_price(place.option, offer, purchase.price),
                **place.speed,
                **describe_run(problem, place.candidate),
            )
        )
    return plan.model_copy(update={"alternates": tuple(alternates), "prices": tuple(prices)})


def can_replace(own: InstanceType, other: InstanceType) -> bool:
    """True where a stack made for ``own`` can boot nodes of ``other``, whose GPUs may have more memory.

    The node's checks count on a GPU model, the launch template on its network cards.
    """
    same = ("gpu_count", "network_cards", "efa_cards", "gpudirect", "interconnect", "cpu_architecture")
    at_least = ("gpu_memory_gib", "vcpus", "memory_gib", "nvme_gb", "network_gbit_per_s")
    return (
        own.gpu.name == other.gpu.name
        and all(getattr(own, name) == getattr(other, name) for name in same)
        and all(getattr(own, name) <= getattr(other, name) for name in at_least)
    )


def _list_places(problem: Problem, candidate: Candidate, plan: FleetPlan, instance: InstanceType) -> Iterator[_Place]:
    """Price the plan's configuration on a type in every zone; another type must be cheaper by more than SAME."""
    # An old spot price neither heads a ranking nor comes after a current one: the meter would count with it.
    old, falls_back = candidate.purchase.stale, plan.purchase.fallback == "on-demand"
    offer = problem.catalog.offer(instance.name, plan.region)
    if not offer or not offer.zone_ids or (falls_back and not offer.on_demand):
        return
    purchases = [
        replace(purchase, fallback=falls_back and purchase.option == "spot")
        for purchase in list_purchases(offer, problem.request.constraints, every_zone=True)
        if purchase.option in ("on-demand", "spot") and not purchase.base and purchase.stale <= old
    ]
    if not purchases:
        return
    fastest, margin = replace(candidate.table.fastest.only(candidate.configuration), instance=instance), 1.0
    speed: dict[str, Any] = {"step_time_s": plan.step_time_s, "tokens_per_second": plan.tokens_per_second}
    if instance.name != plan.instance_type:
        estimates = estimate_configurations(problem, [(fastest, 0)])
        if not estimates.fits_p95[0]:
            return
        speed = {
            "step_time_s": rounded(estimates.step_time_s[0]),
            "tokens_per_second": rounded(estimates.tokens_per_second[0]),
            "node": describe_node(instance),
            "memory": describe_memory(estimates, 0),
            "calibration": describe_speed(problem, instance, plan.node_count, plan.parallelism),
        }
        hours = np.array([problem.amount.steps * float(estimates.step_time_s[0]) / 3600])
        error = np.array([speed["calibration"].relative_error])
        fastest, margin = replace(fastest, train_hours=hours, relative_error=error), 1 + SAME
    table, taken = build_table(problem, fastest, purchases), _own_places(plan)
    for row in np.flatnonzero(table.feasible(problem.request.constraints)).tolist():
        place = _Place(float(table.cost.expected[row]) * margin, "", Candidate(table, row), speed)
        priced = place.candidate.purchase.price.zone_id
        for zone_id in offer.zone_ids:
            if priced in ("", zone_id) and (zone_id, instance.name, place.option) not in taken:
                yield place._replace(zone_id=zone_id)


def _own_places(plan: FleetPlan) -> set[tuple[str, str, str]]:
    """Places that the plan's own group tries: one zone for a gang, else all."""
    zones = plan.wanted_zone_ids[:1] if plan.node_count > 1 else plan.wanted_zone_ids
    options = {plan.purchase.option, *(["on-demand"] if plan.purchase.fallback == "on-demand" else [])}
    return set(product(zones, (plan.instance_type,), options))


def _choose(places: list[_Place]) -> list[_Place]:
    """Choose the places with the least expected cost, one on demand among them: spot may be short in all zones."""
    places = sorted(places, key=lambda place: place.usd)
    on_demand = [place for place in places if place.option == "on-demand"][:1]
    chosen = places[:MAX_ALTERNATES]
    if all(place.option == "spot" for place in chosen):
        chosen = [*chosen[: MAX_ALTERNATES - len(on_demand)], *on_demand]
    return chosen
