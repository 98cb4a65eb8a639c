"""Rejections: why an instance type has no plan, with the constraint that binds, its value and the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from optimizer.economics.fleet_cost import FleetCost
from optimizer.economics.outcome import Outcome
from optimizer.hardware import InstanceType
from optimizer.performance.evaluate import limit_gib
from optimizer.performance.types import DDP, SHARDINGS, Floats, Ints
from optimizer.request import Constraints
from optimizer.search.layouts import describe_layout
from optimizer.search.problem import Problem
from optimizer.search.search_space import SearchSpace

Binding = Literal[
    "memory",
    "precision",
    "global_batch",
    "sharding",
    "region",
    "price",
    "budget",
    "deadline",
    "interruptions",
    "capacity-block",
]


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """One entry of the answer's ``rejected``.

    Attributes:
        instance_type: the type without a plan.
        reason: a sentence.
        binding_constraint: the constraint that binds.
        value: the type's value of it, a number or text, the nearest to the limit.
        limit: the limit, a number or text; None where there is none.
    """

    instance_type: str
    reason: str
    binding_constraint: Binding
    value: Any
    limit: Any


def reject_purchase(problem: Problem, instance: InstanceType) -> Rejection:
    """The rejection of a type without a purchase: no offer in the regions, or no price of the options."""
    limits = problem.request.constraints
    offered = [region for region in problem.regions if problem.catalog.offer(instance.name, region)]
    if not offered:
        wanted = ", ".join(limits.regions) or "any region"
        return Rejection(
            instance_type=instance.name,
            reason=f"not offered in {wanted}",
            binding_constraint="region",
            value=wanted,
            limit=None,
        )
    options = ", ".join(limits.purchase_options)
    more = " ..." if len(offered) > 3 else ""
    return Rejection(
        instance_type=instance.name,
        reason=f"the catalog has no {options} price of it in {', '.join(offered[:3])}{more}",
        binding_constraint="price",
        value=options,
        limit=None,
    )


def reject_precision(instance: InstanceType, precision: str) -> Rejection:
    """The rejection of a type whose GPU does not compute in the precision."""
    return Rejection(
        instance_type=instance.name,
        reason=f"{instance.gpu.name} does not compute in {precision}",
        binding_constraint="precision",
        value=precision,
        limit=", ".join(sorted(instance.gpu.peak_tflop_per_s)),
    )


def reject_batch(instance: InstanceType, batch: int) -> Rejection:
    """The rejection of a type whose ranks cannot share the global batch evenly."""
    return Rejection(
        instance_type=instance.name,
        reason=f"a global batch of {batch} cannot be split evenly over {instance.ranks} GPUs a node",
        binding_constraint="global_batch",
        value=batch,
        limit=instance.ranks,
    )


def reject_limits(
    instance: InstanceType,
    outcome: Outcome,
    cost: FleetCost,
    available_hours: Floats,
    limits: Constraints,
) -> Rejection:
    """The rejection of a type whose candidates all break a limit at the 95th percentile.

    Args:
        instance: the type.
        outcome, cost, available_hours: of its candidates.
        limits: budget and deadline.
    """

    def reject(binding: Binding, reason: str, value: float, limit: float | None) -> Rejection:
        return Rejection(
            instance_type=instance.name, reason=reason, binding_constraint=binding, value=value, limit=limit
        )

    hours, usd = outcome.hours_p95, cost.p95 + cost.reserve
    if not np.isfinite(hours).any():
        lowest_rate = float(outcome.rate.min())
        return reject("interruptions", "spot nodes are lost faster than the job recovers", lowest_rate, None)
    in_time = hours <= available_hours
    if not in_time.any():
        closest = int((hours - available_hours).argmin())
        available, needed = float(available_hours[closest]), float(hours[closest])
        return reject(
            "capacity-block",
            f"the fastest run takes {needed:,.1f} h at the 95th percentile, and of the Capacity Block "
            f"{available:,.1f} h are left to train in",
            needed,
            available,
        )
    hours, usd = hours[in_time], usd[in_time]
    budget, deadline = limits.budget_usd, limits.deadline_hours
    if budget is not None and not (usd <= budget).any():
        return reject(
            "budget",
            f"the cheapest run needs {usd.min():,.2f} USD at the 95th percentile, with its drain, "
            f"the budget is {budget:,.2f} USD",
            float(usd.min()),
            budget,
        )
    assert deadline is not None  # without it, the budget alone decided
    if not (hours <= deadline).any():
        return reject(
            "deadline",
            f"the fastest run takes {hours.min():,.1f} h at the 95th percentile, the deadline is {deadline:,.1f} h",
            float(hours.min()),
            deadline,
        )
    assert budget is not None  # both limits can be kept, but not together
    cheapest = float(usd[hours <= deadline].min())
    return reject(
        "budget",
        f"the cheapest run within {deadline:,.1f} h needs {cheapest:,.2f} USD at the 95th percentile, with its "
        f"drain, the budget is {budget:,.2f} USD",
        cheapest,
        budget,
    )


def reject_memory(space: SearchSpace, machine: int, rows: Ints) -> Rejection:
    """The rejection of a machine of which none of the weighed ``rows`` fits: the one that comes nearest."""
    instance = space.machines.instances[machine]
    memory = space.memory(rows)
    allowed_gib = limit_gib(space.machines.memory_bytes[machine], memory.nccl_gib)
    lack_gib = memory.peak_gib - allowed_gib
    if not np.isfinite(lack_gib).any():
        shardings = ", ".join(SHARDINGS[sharding] for sharding in space.shardings)
        return Rejection(
            instance_type=instance.name,
            reason=f"one GPU has nothing to shard its state over, and sharding is {shardings}",
            binding_constraint="sharding",
            value=shardings,
            limit=SHARDINGS[DDP],
        )
    nearest = int(np.flatnonzero((lack_gib == lack_gib.min()).any(axis=(0, 1)))[-1])
    setting = np.unravel_index(int(lack_gib[:, :, nearest].argmin()), lack_gib.shape[:2])
    needed, allowed = float(memory.peak_gib[(*setting, nearest)]), float(allowed_gib[nearest])
    layout = describe_layout(space.table, int(rows[nearest]), SHARDINGS[space.shardings[setting[0]]])
    return Rejection(
        instance_type=instance.name,
        reason=f"the smallest step needs {needed:.1f} GiB a GPU ({layout}), "
        f"and {instance.gpu.name} leaves {allowed:.1f} GiB",
        binding_constraint="memory",
        value=needed,
        limit=allowed,
    )
