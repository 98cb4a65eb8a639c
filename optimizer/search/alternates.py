"""Alternates: the places that a plan's nodes may go to when the plan's own has no capacity, within its limits at p95.

Of each type that the stack can boot, the plan's configuration is priced in every zone, on demand and on spot. On spot
the plan's fallback counts, so its on-demand price binds the limits too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import Alternate, FleetPlan
from optimizer.search.candidates import Candidate, build_table
from optimizer.search.fastest import SAME, Fastest, estimate_configurations
from optimizer.search.plan_builder import describe_run, describe_speed, node_price
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


def add_alternates(problem: Problem, plans: Mapping[Candidate, FleetPlan]) -> dict[Candidate, FleetPlan]:
    """Plans with their alternates, and the on-demand prices that a fallback of other types counts with.

    A reservation or Capacity Block is in one place and is paid for, so its plan has none. Nor has a plan with a file
    system for its data: that is in one zone, and what crosses zones is billed by the GB.
    """
    places: dict[Candidate, list[_Place]] = {candidate: [] for candidate in plans}
    for instance in problem.instance_types:
        movable = {
            candidate: plan
            for candidate, plan in plans.items()
            if plan.purchase.option in ("on-demand", "spot") and not plan.lustre
            if can_replace(candidate.table.fastest.instance, instance)
        }
        for candidate, place in _list_places(problem, instance, movable):
            places[candidate].append(place)
    return {candidate: _with_places(problem, plan, places[candidate]) for candidate, plan in plans.items()}


def _with_places(problem: Problem, plan: FleetPlan, places: list[_Place]) -> FleetPlan:
    prices, alternates = dict.fromkeys(plan.prices), list[Alternate]()
    for place in _choose(places):
        purchase: Any = place.candidate.purchase
        offer = purchase.offer
        if purchase.fallback and offer.on_demand:
            prices[node_price("on-demand", offer, offer.on_demand)] = None
        alternates.append(
            Alternate(
                zone_id=place.zone_id,
                instance_type=offer.instance.name,
                purchase=purchase.option,
                price=node_price(purchase.option, offer, purchase.price),
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


def _list_places(
    problem: Problem, instance: InstanceType, plans: Mapping[Candidate, FleetPlan]
) -> Iterator[tuple[Candidate, _Place]]:
    """Price the plans' configurations on a type in every zone; another type must be cheaper by more than SAME."""
    offers = [
        problem.catalog.offer(instance.name, region) for region in dict.fromkeys(p.region for p in plans.values())
    ]
    fallbacks = {plan.purchase.fallback == "on-demand" for plan in plans.values()}
    purchases = [
        replace(purchase, fallback=fallback)
        for offer in offers
        if offer and offer.zone_ids
        for purchase in list_purchases(offer, problem.request.constraints, every_zone=True)
        if purchase.option in ("on-demand", "spot") and not purchase.base
        for fallback in (fallbacks if purchase.option == "spot" else [False])
    ]
    if not purchases:
        return
    owners = [(candidate, plan, _own_places(plan)) for candidate, plan in plans.items()]
    chosen = [(candidate.table.fastest, candidate.configuration) for candidate in plans]
    fastest = Fastest(
        instance=instance,
        columns={name: np.array([own.columns[name][i] for own, i in chosen]) for name in chosen[0][0].columns},
        relative_error=np.array([own.relative_error[i] for own, i in chosen]),
        train_hours=np.array([own.train_hours[i] for own, i in chosen]),
        configurations=len(chosen),
    )
    speeds: list[dict[str, Any]] = [
        {"step_time_s": plan.step_time_s, "tokens_per_second": plan.tokens_per_second} for plan in plans.values()
    ]
    fits = np.ones(len(chosen), dtype=bool)
    others = [(i, plan) for i, plan in enumerate(plans.values()) if plan.instance_type != instance.name]
    estimates = estimate_configurations(problem, [(fastest, i) for i, _ in others]) if others else None
    for at, (i, plan) in enumerate(others):
        assert estimates is not None
        speeds[i] = describe_speed(problem, instance, plan.node_count, plan.parallelism, estimates, at)
        fits[i], fastest.relative_error[i] = estimates.fits_p95[at], speeds[i]["calibration"].relative_error
        fastest.train_hours[i] = problem.amount.steps * float(estimates.step_time_s[at]) / 3600
    table = build_table(problem, fastest, purchases)
    for row in np.flatnonzero(table.feasible(problem.request.constraints) & fits[table.configuration]).tolist():
        place = Candidate(table, row)
        (own, plan, taken), purchase = owners[place.configuration], place.purchase
        falls_back = purchase.option == "spot" and plan.purchase.fallback == "on-demand"
        # An old spot price neither heads a ranking nor comes after a current one: the meter would count with it.
        is_alike = (purchase.offer.region, purchase.fallback) == (plan.region, falls_back)
        if not is_alike or purchase.stale > own.purchase.stale:
            continue
        usd = float(table.cost.expected[row]) * (1 if plan.instance_type == instance.name else 1 + SAME)
        for zone_id in purchase.offer.zone_ids:
            if purchase.price.zone_id in ("", zone_id) and (zone_id, instance.name, purchase.option) not in taken:
                yield own, _Place(usd, zone_id, place, speeds[place.configuration])


def _own_places(plan: FleetPlan) -> set[tuple[str, str, str]]:
    """Places that the plan's own group tries: one zone for a gang, else all."""
    zones = plan.wanted_zone_ids[:1] if plan.node_count > 1 else plan.wanted_zone_ids
    options = {plan.purchase.option, *(["on-demand"] if plan.purchase.fallback == "on-demand" else [])}
    return set(product(zones, (plan.instance_type,), options))


def _choose(places: list[_Place]) -> list[_Place]:
    """Choose the places with the least expected cost, one on demand among them: spot may be short in all zones."""
    places = sorted(places, key=lambda place: place.usd)
    on_demand = [place for place in places if place.candidate.purchase.option == "on-demand"][:1]
    chosen = places[:MAX_ALTERNATES]
    if all(place.candidate.purchase.option == "spot" for place in chosen):
        chosen = [*chosen[: MAX_ALTERNATES - len(on_demand)], *on_demand]
    return chosen
