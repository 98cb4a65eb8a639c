"""Alternates of a plan, each compared as the plan of its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from optimizer.audit.arithmetic import check_arithmetic
from optimizer.audit.facts import check_facts
from optimizer.audit.fault import AGAIN, Fault
from optimizer.catalog import Catalog
from optimizer.contract.plan import Alternate, FleetPlan
from optimizer.search.plan_builder import can_replace


def check_alternates(plan: FleetPlan, catalog: Catalog) -> Iterator[Fault]:
    """Compare each alternate of ``plan``, which has no fault itself, with the plan and with ``catalog``."""
    for i, alternate in enumerate(plan.alternates):
        there = plan.at(alternate)
        faults = [*check_facts(there, catalog), *check_arithmetic(there, catalog)]
        for fault in faults or _check_type(plan, alternate, catalog):
            yield replace(fault, field=f"alternates.{i}: {fault.field}")


def _check_type(plan: FleetPlan, alternate: Alternate, catalog: Catalog) -> Iterator[Fault]:
    own, other = catalog.instance_type(plan.instance_type), catalog.instance_type(alternate.instance_type)
    if not can_replace(own, other):
        yield Fault(
            field="instance_type",
            value=other.name,
            limit=f"types with the GPU model and network cards of {own.name}, and nothing smaller",
            why="the launch template and the node's checks are of one GPU model",
            next_step=AGAIN,
        )
    if own == other and alternate.step_time_s != plan.step_time_s:
        yield Fault(
            field="step_time_s",
            value=f"{alternate.step_time_s:g}",
            limit=f"{plan.step_time_s:g}",
            why=f"the plan's step on {own.name}",
            next_step=AGAIN,
        )
