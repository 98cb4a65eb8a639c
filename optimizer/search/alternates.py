"""Alternates: the places that a plan's nodes may go to when the plan's own has no capacity, within its limits at p95.

Of each type that the stack can boot, the plan's configuration is priced in every zone, on demand and on spot. On spot
the plan's fallback counts, so its on-demand price binds the limits too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from optimizer.contract.plan import Alternate, FleetPlan, SpeedSource
from optimizer.contract.units import rounded
from optimizer.performance.types import Estimates
from optimizer.search.candidates import Candidate, CandidateTable, build_tables
from optimizer.search.fastest import SAME, Fastest, estimate_configurations
from optimizer.search.plan_builder import (
    can_replace,
    describe_memory,
    describe_node,
    describe_run,
    node_price,
)
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase, list_purchases

# Alternates of a plan at most; the plan is read by people, too.
MAX_ALTERNATES = 6


@dataclass(frozen=True, kw_only=True)
class _Move:
    """A plan's configuration on one type, with the ways to buy it; ``speed`` and ``estimate`` are of another type."""

    plan: FleetPlan
    fastest: Fastest
    purchases: Sequence[PricedPurchase]
    speed: SpeedSource | None = None
    estimate: int = -1


def with_alternates(problem: Problem, candidates: Sequence[Candidate], plans: Sequence[FleetPlan]) -> list[FleetPlan]:
    """The plans of ``candidates``, each with its alternates.

    A reservation or Capacity Block is in one place and is paid for, so its plan has none. Nor has a plan with a file
    system for its data: that is in one zone, and what crosses zones is billed by the GB.
    """
    movable = {i for i, plan in enumerate(plans) if plan.purchase.option in ("on-demand", "spot") and not plan.lustre}
    moves = [move for i in movable for move in _list_moves(problem, candidates[i], plans[i])]
    moves, estimates = _estimate(problem, moves)
    if not moves:
        return list(plans)
    tables = build_tables(problem, [(move.fastest, move.purchases) for move in moves])
    found: dict[int, list[tuple[_Move, CandidateTable]]] = {}
    for move, table in zip(moves, tables, strict=True):
        found.setdefault(id(move.plan), []).append((move, table))
    return [
        _move_to(problem, plan, _choose(problem, found[id(plan)], estimates)) if id(plan) in found else plan
        for plan in plans
    ]


def _move_to(problem: Problem, plan: FleetPlan, alternates: tuple[Alternate, ...]) -> FleetPlan:
    """The plan with its alternates, and with the on-demand prices that a fallback of other types counts with."""
    prices = dict.fromkeys(plan.prices)
    for alternate in alternates if plan.purchase.fallback == "on-demand" else ():
        offer = problem.catalog.offer(alternate.instance_type, plan.region)
        if alternate.purchase == "spot" and offer and offer.on_demand:
            prices[node_price("on-demand", offer, offer.on_demand)] = None
    return plan.model_copy(update={"alternates": alternates, "prices": tuple(prices)})


def _list_moves(problem: Problem, candidate: Candidate, plan: FleetPlan) -> Iterator[_Move]:
    fastest, limits = candidate.table.fastest, problem.request.constraints
    own = fastest.only(candidate.configuration)
    # An old spot price neither heads a ranking nor comes after a current one: the meter would count with it.
    old = candidate.purchase.stale
    falls_back = plan.purchase.fallback == "on-demand"
    for instance in problem.instance_types:
        if not can_replace(fastest.instance, instance):
            continue
        offer = problem.catalog.offer(instance.name, plan.region)
        if offer is None or not offer.zone_ids:
            continue
        purchases = [
            replace(purchase, fallback=falls_back and purchase.option == "spot")
            for purchase in list_purchases(offer, limits, every_zone=True)
            if purchase.option in ("on-demand", "spot") and not purchase.base and purchase.stale <= old
            if offer.on_demand or not falls_back
        ]
        if not purchases:
            continue
        is_own = instance.name == plan.instance_type
        yield _Move(
            plan=plan,
            fastest=replace(own, instance=instance),
            purchases=purchases,
            speed=None if is_own else problem.describe_speed(instance, plan.node_count, plan.parallelism),
        )


def _estimate(problem: Problem, moves: Sequence[_Move]) -> tuple[list[_Move], Estimates | None]:
    """Estimate the moves to another type; keep those whose layout fits."""
    others = [move for move in moves if move.speed]
    if not others:
        return list(moves), None
    estimates = estimate_configurations(problem, [(move.fastest, 0) for move in others])
    kept = [move for move in moves if not move.speed]
    for i, move in enumerate(others):
        if estimates.fits_p95[i] and move.speed:
            hours = problem.amount.steps * float(estimates.step_time_s[i]) / 3600
            fastest = replace(
                move.fastest, train_hours=np.array([hours]), relative_error=np.array([move.speed.relative_error])
            )
            kept.append(replace(move, fastest=fastest, estimate=i))
    return kept, estimates


class _Place(NamedTuple):
    """A zone for a candidate of a move."""

    usd: float
    zone_id: str
    move: _Move
    candidate: Candidate

    @property
    def purchase(self) -> PricedPurchase:
        return self.candidate.purchase


def _choose(
    problem: Problem, moves: Sequence[tuple[_Move, CandidateTable]], estimates: Estimates | None
) -> tuple[Alternate, ...]:
    """The places with the least expected cost; another type must be cheaper by more than SAME.

    An on-demand place within the limits is among them: spot may be short in all zones together.
    """
    taken = _own_places(moves[0][0].plan)
    places = []
    for move, table in moves:
        for row in np.flatnonzero(table.feasible(problem.request.constraints)).tolist():
            usd = float(table.cost.expected[row]) * (1 + SAME if move.speed else 1)
            place = _Place(usd, "", move, Candidate(table, row))
            offer, priced = place.purchase.offer, place.purchase.price.zone_id
            places += [
                place._replace(zone_id=zone_id)
                for zone_id in offer.zone_ids
                if priced in ("", zone_id) and (zone_id, offer.instance.name, place.purchase.option) not in taken
            ]
    places.sort(key=lambda place: place.usd)
    on_demand = [place for place in places if place.purchase.option == "on-demand"][:1]
    chosen = places[:MAX_ALTERNATES]
    if all(place.purchase.option == "spot" for place in chosen):
        chosen = [*chosen[: MAX_ALTERNATES - len(on_demand)], *on_demand]
    return tuple(_describe(problem, place, estimates) for place in chosen)


def _own_places(plan: FleetPlan) -> set[tuple[str, str, str]]:
    """Places that the plan's own group tries: one zone for a gang, else all."""
    zones = plan.wanted_zone_ids[:1] if plan.node_count > 1 else plan.wanted_zone_ids
    options = {plan.purchase.option, *(["on-demand"] if plan.purchase.fallback == "on-demand" else [])}
    return set(product(zones, (plan.instance_type,), options))


def _describe(problem: Problem, place: _Place, estimates: Estimates | None) -> Alternate:
    plan, speed, i = place.move.plan, place.move.speed, place.move.estimate
    option: Literal["on-demand", "spot"] = "spot" if place.purchase.option == "spot" else "on-demand"
    instance = place.move.fastest.instance
    facts: dict[str, Any] = {"step_time_s": plan.step_time_s, "tokens_per_second": plan.tokens_per_second}
    if speed and estimates:
        facts = {
            "step_time_s": rounded(estimates.step_time_s[i]),
            "tokens_per_second": rounded(estimates.tokens_per_second[i]),
            "node": describe_node(instance),
            "memory": describe_memory(estimates, i),
            "calibration": speed,
        }
    return Alternate(
        zone_id=place.zone_id,
        instance_type=instance.name,
        purchase=option,
        price=node_price(option, place.purchase.offer, place.purchase.price),
        **describe_run(problem, place.candidate),
        **facts,
    )
