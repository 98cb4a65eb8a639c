"""Alternates: the places that a plan's nodes may go to when the plan's own has no capacity, within its limits at p95.

Of each type that the stack can boot, the plan's configuration is priced in every zone, on demand and on spot. On spot
the plan's fallback counts, so its on-demand price binds the limits too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import Alternate, FleetPlan
from optimizer.contract.units import rounded
from optimizer.performance.types import Estimates
from optimizer.search.candidates import Candidate, build_table
from optimizer.search.fastest import SAME, Fastest, estimate_configurations
from optimizer.search.plan_builder import describe_memory, describe_node, describe_run, describe_speed, node_price
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase, list_purchases

# Alternates of a plan at most; the plan is read by people, too.
MAX_ALTERNATES = 6


class _Move(NamedTuple):
    """The configuration of a plan, by its number, on one type with the ways to buy it there."""

    number: int
    fastest: Fastest
    purchases: list[PricedPurchase]


class _Place(NamedTuple):
    """A zone for a candidate of a move, which has the ``i``-th estimate."""

    usd: float
    zone_id: str
    candidate: Candidate
    i: int

    @property
    def option(self) -> Any:
        return self.candidate.purchase.option


def with_alternates(problem: Problem, candidates: Sequence[Candidate], plans: Sequence[FleetPlan]) -> list[FleetPlan]:
    """The plans of ``candidates``, each with its alternates.

    A reservation or Capacity Block is in one place and is paid for, so its plan has none. Nor has a plan with a file
    system for its data: that is in one zone, and what crosses zones is billed by the GB.
    """
    moves = [
        move
        for number, plan in enumerate(plans)
        if plan.purchase.option in ("on-demand", "spot") and not plan.lustre
        for move in _list_moves(problem, candidates[number], plan, number)
    ]
    if not moves:
        return list(plans)
    estimates = estimate_configurations(problem, [(move.fastest, 0) for move in moves])
    places: dict[int, list[_Place]] = {}
    for i, move in enumerate(moves):
        if estimates.fits_p95[i]:
            places.setdefault(move.number, []).extend(_list_places(problem, plans[move.number], move, estimates, i))
    return [
        _move_to(problem, plan, _choose(places[number]), estimates) if number in places else plan
        for number, plan in enumerate(plans)
    ]


def _list_moves(problem: Problem, candidate: Candidate, plan: FleetPlan, number: int) -> Iterator[_Move]:
    fastest, limits = candidate.table.fastest, problem.request.constraints
    own = fastest.only(candidate.configuration)
    # An old spot price neither heads a ranking nor comes after a current one: the meter would count with it.
    old = candidate.purchase.stale
    falls_back = plan.purchase.fallback == "on-demand"
    for instance in problem.instance_types:
        offer = can_replace(fastest.instance, instance) and problem.catalog.offer(instance.name, plan.region)
        if not offer or not offer.zone_ids or (falls_back and not offer.on_demand):
            continue
        purchases = [
            replace(purchase, fallback=falls_back and purchase.option == "spot")
            for purchase in list_purchases(offer, limits, every_zone=True)
            if purchase.option in ("on-demand", "spot") and not purchase.base and purchase.stale <= old
        ]
        if purchases:
            yield _Move(number, replace(own, instance=instance), purchases)


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


def _list_places(problem: Problem, plan: FleetPlan, move: _Move, estimates: Estimates, i: int) -> Iterator[_Place]:
    """Price a move in every zone; another type must be cheaper by more than SAME."""
    fastest, margin = move.fastest, 1.0
    if fastest.instance.name != plan.instance_type:
        speed, margin = describe_speed(problem, fastest.instance, plan.node_count, plan.parallelism), 1 + SAME
        hours = np.array([problem.amount.steps * float(estimates.step_time_s[i]) / 3600])
        fastest = replace(fastest, train_hours=hours, relative_error=np.array([speed.relative_error]))
    table, taken = build_table(problem, fastest, move.purchases), _own_places(plan)
    for row in np.flatnonzero(table.feasible(problem.request.constraints)).tolist():
        place = _Place(float(table.cost.expected[row]) * margin, "", Candidate(table, row), i)
        priced = place.candidate.purchase.price.zone_id
        for zone_id in place.candidate.purchase.offer.zone_ids:
            if priced in ("", zone_id) and (zone_id, fastest.instance.name, place.option) not in taken:
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


def _move_to(problem: Problem, plan: FleetPlan, places: Sequence[_Place], estimates: Estimates) -> FleetPlan:
    """The plan with its alternates, and with the on-demand prices that a fallback of other types counts with."""
    prices = dict.fromkeys(plan.prices)
    for place in places:
        offer = place.candidate.purchase.offer
        if place.candidate.purchase.fallback and offer.on_demand:
            prices[node_price("on-demand", offer, offer.on_demand)] = None
    alternates = tuple(_describe(problem, plan, place, estimates) for place in places)
    return plan.model_copy(update={"alternates": alternates, "prices": tuple(prices)})


def _describe(problem: Problem, plan: FleetPlan, place: _Place, estimates: Estimates) -> Alternate:
    purchase, i = place.candidate.purchase, place.i
    instance = purchase.offer.instance
    facts: dict[str, Any] = {}
    if instance.name != plan.instance_type:
        facts = {
            "node": describe_node(instance),
            "memory": describe_memory(estimates, i),
            "calibration": describe_speed(problem, instance, plan.node_count, plan.parallelism),
        }
    return Alternate(
        zone_id=place.zone_id,
        instance_type=instance.name,
        purchase=place.option,
        price=node_price(place.option, purchase.offer, purchase.price),
        step_time_s=rounded(estimates.step_time_s[i]),
        tokens_per_second=rounded(estimates.tokens_per_second[i]),
        **describe_run(problem, place.candidate),
        **facts,
    )
