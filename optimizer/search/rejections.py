"""Rejections: why an instance type has no plan, with the constraint that binds, its value and the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bootstrap.contract.words import counted
from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import Volumes
from optimizer.contract.request import Constraints
from optimizer.economics.fleet_cost import FleetCost
from optimizer.economics.outcome import Outcome
from optimizer.economics.staging import disk_gib
from optimizer.performance.types import DDP, SHARDINGS, Floats
from optimizer.search.layouts import describe_layout
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase
from optimizer.search.search_space import SearchSpace

Binding = Literal[
    "memory",
    "data",
    "precision",
    "global_batch",
    "sharding",
    "region",
    "price",
    "budget",
    "deadline",
    "interruptions",
    "capacity-block",
    "quota",
]


@dataclass(frozen=True)
class Rejection:
    """One entry of the answer's ``rejected``; ``value`` is the type's nearest to ``limit``, each a number or text."""

    instance_type: str
    reason: str
    binding_constraint: Binding
    value: Any
    limit: Any


def reject_purchase(problem: Problem, instance: InstanceType) -> Rejection:
    """Reject a type without a purchase: no offer in the regions, or no price of the options."""
    limits = problem.request.constraints
    offered = [region for region in problem.regions if problem.catalog.offer(instance.name, region)]
    if not offered:
        wanted = ", ".join(limits.regions) or "any region"
        return Rejection(instance.name, f"not offered in {wanted}", "region", wanted, None)
    options, more = ", ".join(limits.purchase_options), " ..." if len(offered) > 3 else ""
    reason = f"the catalog has no {options} price of it in {', '.join(offered[:3])}{more}"
    return Rejection(instance.name, reason, "price", options, None)


def reject_disk(problem: Problem, instance: InstanceType) -> Rejection | None:
    """Reject a type whose disks are too small for the training data."""
    work, space = problem.request.workload, disk_gib(instance, Volumes())
    size = work.data_gib
    if size is None or work.lustre_gib is not None or size <= space:
        return None
    disk = "NVMe" if instance.nvme_gb else "root volume"
    reason = f"each node copies {size:,.0f} GiB of data, and its {disk} has room for {space:,.0f} GiB"
    return Rejection(instance.name, reason, "data", size, space)


def reject_precision(instance: InstanceType, precision: str) -> Rejection:
    """Reject a type whose GPU does not compute in the precision."""
    known = ", ".join(sorted(instance.gpu.peak_tflop_per_s))
    reason = f"{instance.gpu.name} does not compute in {precision}"
    return Rejection(instance.name, reason, "precision", precision, known)


def reject_batch(instance: InstanceType, batch: int) -> Rejection:
    """Reject a type whose ranks cannot share the global batch evenly."""
    reason = f"a global batch of {batch} cannot be split evenly over {counted(instance.ranks, 'GPU')} a node"
    return Rejection(instance.name, reason, "global_batch", batch, instance.ranks)


def reject_limits(
    name: str, outcome: Outcome, cost: FleetCost, available_hours: Floats, limits: Constraints
) -> Rejection:
    """Reject a type whose candidates all break a limit at the 95th percentile."""
    hours, usd = outcome.hours_p95, cost.p95 + cost.reserve
    if not np.isfinite(hours).any():
        reason = "spot nodes are lost faster than the job recovers"
        return Rejection(name, reason, "interruptions", float(outcome.rate.min()), None)
    in_time = hours <= available_hours
    if not in_time.any():
        closest = int((hours - available_hours).argmin())
        available, needed = float(available_hours[closest]), float(hours[closest])
        reason = (
            f"the fastest run takes {needed:,.1f} h at the 95th percentile, and of the Capacity Block "
            f"{available:,.1f} h are left to train in"
        )
        return Rejection(name, reason, "capacity-block", needed, available)
    hours, usd = hours[in_time], usd[in_time]
    budget, deadline = limits.budget_usd, limits.deadline_hours
    if budget is not None and not (usd <= budget).any():
        reason = (
            f"the cheapest run needs {usd.min():,.2f} USD at the 95th percentile, with its drain, "
            f"the budget is {budget:,.2f} USD"
        )
        return Rejection(name, reason, "budget", float(usd.min()), budget)
    assert deadline is not None  # without it, the budget alone decided
    if not (hours <= deadline).any():
        reason = f"the fastest run takes {hours.min():,.1f} h at the 95th percentile, the deadline is {deadline:,.1f} h"
        return Rejection(name, reason, "deadline", float(hours.min()), deadline)
    assert budget is not None  # both limits can be kept, but not together
    cheapest = float(usd[hours <= deadline].min())
    reason = (
        f"the cheapest run within {deadline:,.1f} h needs {cheapest:,.2f} USD at the 95th percentile, with its "
        f"drain, the budget is {budget:,.2f} USD"
    )
    return Rejection(name, reason, "budget", cheapest, budget)


def reject_quota(purchase: PricedPurchase, nodes: int) -> Rejection:
    """Reject a purchase of so many nodes, which a quota of the account leaves no room for."""
    instance, region, room = purchase.offer.instance, purchase.offer.region, purchase.room
    fleet = f"{nodes} x {instance.name} {purchase.in_short} in {region}"
    if room is None:
        reason = f"{fleet}: the quotas of {region} could not be read"
        return Rejection(instance.name, reason, "quota", nodes * instance.vcpus, None)
    on_demand_base = purchase.option == "spot" and purchase.most_nodes == 0 and purchase.base
    owned = purchase.reservation.count if purchase.reservation and purchase.topped_up else 0
    bought = purchase.base if on_demand_base else nodes - purchase.base - owned
    needed = bought * instance.vcpus
    reason = (
        f"{fleet} needs {needed:,} vCPUs of quota {room.name} ({room.code}), which is {room.value:,.0f}, "
        f"{room.used:,.0f} in use; next: {room.increase(room.used + needed)}"
    )
    return Rejection(instance.name, reason, "quota", needed, room.free)


def reject_memory(space: SearchSpace, machine: int, instance: InstanceType) -> Rejection:
    """Reject a type on whose machine nothing fits: name the layout that comes nearest."""
    allowed_gib = space.limit_gib(machine)
    lack_gib = space.p95_gib - allowed_gib
    if not np.isfinite(lack_gib).any():
        shardings = ", ".join(SHARDINGS[sharding] for sharding in space.shardings)
        reason = f"one GPU has nothing to shard its state over, and sharding is {shardings}"
        return Rejection(instance.name, reason, "sharding", shardings, SHARDINGS[DDP])
    nearest = int(np.flatnonzero((lack_gib == lack_gib.min()).any(axis=(0, 1)))[-1])
    setting = np.unravel_index(int(lack_gib[:, :, nearest].argmin()), lack_gib.shape[:2])
    needed, allowed = float(space.p95_gib[(*setting, nearest)]), float(allowed_gib[nearest])
    layout = describe_layout(space.table, nearest, SHARDINGS[space.shardings[setting[0]]])
    reason = (
        f"the smallest step needs {needed:.1f} GiB a GPU at the 95th percentile ({layout}), and {instance.gpu.name} "
        f"leaves {allowed:.1f} GiB"
    )
    return Rejection(instance.name, reason, "memory", needed, allowed)
