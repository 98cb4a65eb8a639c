"""``audit``: every fault of a plan."""

from __future__ import annotations

from optimizer.audit.alternates import check_alternates
from optimizer.audit.arithmetic import check_arithmetic
from optimizer.audit.facts import check_facts
from optimizer.audit.fault import Fault
from optimizer.catalog import Catalog
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan


def audit(plan: FleetPlan, catalog: Catalog) -> list[Fault]:
    """Every number of ``plan`` that disagrees with its other numbers or with ``catalog``.

    Its alternates follow from it, so they are compared only where the plan itself agrees.
    """
    return [*check_facts(plan, catalog), *check_arithmetic(plan, catalog)] or list(check_alternates(plan, catalog))


def check_plan(plan: FleetPlan, catalog: Catalog) -> None:
    """Raise InvalidInputError for a plan with a fault, naming all of them."""
    faults = audit(plan, catalog)
    if faults:
        raise InvalidInputError(
            "the plan's numbers do not agree:\n    " + "\n    ".join(map(str, faults)),
            why="the nodes, the meter that ends the fleet at the budget, and the alarms take these numbers as they are",
            next_step="; or ".join(dict.fromkeys(fault.next_step for fault in faults)),
        )
