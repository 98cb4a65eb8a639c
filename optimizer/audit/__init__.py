"""Audit of a plan before money is spent on it: its numbers against each other, and its facts against the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from optimizer.audit.facts import Fault, check_facts
from optimizer.audit.numbers import check_numbers
from optimizer.catalog import Catalog
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import Alternate, FleetPlan
from optimizer.search.plan_builder import can_replace


def audit(plan: FleetPlan, catalog: Catalog) -> list[Fault]:
    """Every number of ``plan`` that disagrees with its other numbers or with ``catalog``.

    Its alternates follow from it, so they are compared only where the plan itself agrees.
    """
    return _audit_place(plan, catalog) or [
        replace(fault, field=f"alternates.{i}: {fault.field}")
        for i, alternate in enumerate(plan.alternates)
        for fault in _audit_place(plan.at(alternate), catalog) or _check_type(plan, alternate, catalog)
    ]


def check_plan(plan: FleetPlan, catalog: Catalog) -> None:
    """Raise InvalidInputError for a plan with a fault, naming all of them."""
    faults = audit(plan, catalog)
    if faults:
        raise InvalidInputError(
            "the plan's numbers do not agree:\n    " + "\n    ".join(map(str, faults)),
            why="the nodes, the meter that ends the fleet at the budget, and the alarms take these numbers as they are",
            next_step="; or ".join(dict.fromkeys(fault.next_step for fault in faults)),
        )


def _audit_place(plan: FleetPlan, catalog: Catalog) -> list[Fault]:
    return [*check_facts(plan, catalog), *check_numbers(plan, catalog)]


def _check_type(plan: FleetPlan, alternate: Alternate, catalog: Catalog) -> Iterator[Fault]:
    own, other = catalog.instance_type(plan.instance_type), catalog.instance_type(alternate.instance_type)
    if not can_replace(own, other):
        yield Fault(
            field="instance_type",
            value=other.name,
            limit=f"types with the GPU model and network cards of {own.name}, and nothing smaller",
            why="the launch template and the node's checks are of one GPU model",
        )
    if own == other and alternate.step_time_s != plan.step_time_s:
        yield Fault(
            field="step_time_s",
            value=f"{alternate.step_time_s:g}",
            limit=f"{plan.step_time_s:g}",
            why=f"the plan's step on {own.name}",
        )
