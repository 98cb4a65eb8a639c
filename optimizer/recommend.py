"""From a FleetRequest to the best plans: resolve the model, search, rank, and write the answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optimizer.catalog import Catalog
from optimizer.mixed import find_mixed
from optimizer.performance.calibration import Calibration
from optimizer.performance.frameworks import fp8_note
from optimizer.plan import SCHEMA_VERSION, FleetPlan
from optimizer.request import FleetRequest, Objective
from optimizer.search.alternatives import alternatives
from optimizer.search.candidates import Table, pareto_front, search_types
from optimizer.search.fastest import estimates_of
from optimizer.search.plan_builder import Facts, assemble
from optimizer.search.problem import Problem
from optimizer.search.rejections import Rejection

if TYPE_CHECKING:
    from optimizer.mixed.fleet import MixedFleet

# Most plans an answer lists; each is the best of its instance type and purchase option.
MAX_PLANS = 20


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer to a request.

    Attributes:
        problem: what was asked, and the prices, types and calibration it was answered from.
        plans: best first by the objective; the best of each instance type and purchase option, or the Pareto set.
        pareto: plans no other plan beats in both expected hours and expected cost, cheapest first.
        mixed_fleets: two groups of unlike nodes as one job, where that is cheaper than every plan; cheapest first.
        rejected: each considered type without a plan: instance_type, reason, binding_constraint, value, limit.
        searched_plans: ``configurations`` crossed with the ways to pay for them.
        configurations: legal configurations of all types that have a price, none left unweighed.
        evaluated: those of them whose memory and time were worked out; a bound proved the others slower.
        alternatives: what the best plan's parallelism was chosen over on the same nodes, and why it loses.
        notes: what the user should know about the request, a sentence each.
        elapsed_s: seconds the search took.
    """

    problem: Problem
    plans: tuple[FleetPlan, ...]
    pareto: tuple[FleetPlan, ...]
    mixed_fleets: tuple[MixedFleet, ...]
    rejected: tuple[Rejection, ...]
    searched_plans: int
    configurations: int
    evaluated: int
    alternatives: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON answer of ``gpufleet recommend``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "request": self.problem.request.model_dump(mode="json"),
            "catalog": self.problem.catalog.describe(),
            "plans": [plan.model_dump(mode="json") for plan in self.plans],
            "pareto": [plan.model_dump(mode="json") for plan in self.pareto],
            "mixed_fleets": [fleet.to_dict() for fleet in self.mixed_fleets],
            "rejected": list(self.rejected),
            "searched_plans": self.searched_plans,
            "searched": {
                "configurations": self.configurations,
                "evaluated": self.evaluated,
                "ruled_out_by_bound": self.configurations - self.evaluated,
            },
            "alternatives": list(self.alternatives),
            "notes": list(self.notes),
            "elapsed_s": round(self.elapsed_s, 4),
        }


def recommend(request: FleetRequest, catalog: Catalog, calibration: Calibration) -> Recommendation:
    """Find the best fleets for a request.

    Raises:
        InvalidInputError: an unknown model, region or instance type, or a workload or framework the model cannot have.
        DataMissingError: a price the cost needs is in no region of the catalog.
    """
    started = time.perf_counter()
    problem = Problem.resolve(request, catalog, calibration)
    limits = request.constraints
    found = search_types(problem)
    searched = [table for table in found if isinstance(table, Table)]
    tables = [table for table in searched if table.feasible(limits).any()]
    rejected = [
        table.rejection(limits) if isinstance(table, Table) else table
        for table in found
        if not isinstance(table, Table) or not table.feasible(limits).any()
    ]
    best, front = _rank(tables, request)
    chosen = list(dict.fromkeys([*front, *best]))
    configs = [(tables[table].fastest, int(tables[table].config[row])) for table, row in chosen]
    estimates = estimates_of(problem, configs) if configs else None
    facts = Facts(catalog)
    plans = {
        (table, row): assemble(problem, facts, tables[table], row, estimates, cell)
        for cell, (table, row) in enumerate(chosen)
        if estimates is not None
    }
    pareto = tuple(plans[at] for at in front)
    lost = []
    if chosen:
        table, row = (front if request.objective == "pareto" else best)[0]
        lost = alternatives(
            problem,
            plans[table, row],
            tables[table],
            tables[table].purchases[tables[table].purchase[row]],
        )
    return Recommendation(
        problem=problem,
        plans=pareto if request.objective == "pareto" else tuple(plans[at] for at in best),
        pareto=pareto,
        mixed_fleets=find_mixed(problem, [table.fastest for table in searched], pareto[0] if pareto else None),
        rejected=tuple(rejected),
        searched_plans=sum(table.fastest.configurations * len(table.purchases) for table in searched),
        configurations=sum(table.fastest.configurations for table in searched),
        evaluated=sum(table.fastest.evaluated for table in searched),
        alternatives=tuple(lost),
        notes=(*_understood(problem), *_notes(problem)),
        elapsed_s=time.perf_counter() - started,
    )


def _understood(problem: Problem) -> tuple[str, ...]:
    """What a CNN's workload was taken for where it was said in a transformer's words, and that 8 bits may be slow."""
    work, model = problem.request.workload, problem.model
    slow = fp8_note(work.precision, work.framework, compiled=work.compiled)
    found = [slow] if slow else []
    if model.architecture != "cnn":
        return tuple(found)
    if work.tokens is not None:
        found.append(
            f"{model.name} is a CNN and has no tokens: {work.tokens:,} tokens are taken for {work.tokens:,} samples "
            "(images)"
        )
    if work.seq_len is not None:
        found.append(f"{model.name} is a CNN: seq_len {work.seq_len} is not used")
    return tuple(found)


def _notes(problem: Problem) -> tuple[str, ...]:
    """Which reservations of the request its own limits leave unused."""
    limits, types = problem.request.constraints, {instance.name for instance in problem.instance_types}
    found = []
    for owned in limits.existing_reservations:
        what = f"the reservation of {owned.count} {owned.instance_type} in {owned.region} is not used"
        if owned not in limits.usable_reservations:
            found.append(f"{what}: purchase_options ({', '.join(limits.purchase_options)}) leave out {owned.option}")
        elif owned.region not in problem.regions:
            found.append(f"{what}: regions ({', '.join(limits.regions)}) leave it out")
        elif owned.instance_type not in types:
            found.append(f"{what}: instance_types ({', '.join(limits.instance_types)}) leave it out")
    return tuple(found)


def _rank(tables: list[Table], request: FleetRequest) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The best candidate of each type and purchase option, best first, and the Pareto set; as (table, row)."""
    best: list[tuple[tuple[float, ...], tuple[int, int]]] = []
    at: list[tuple[int, int]] = []
    hours, cost = [], []
    for index, table in enumerate(tables):
        feasible = np.flatnonzero(table.feasible(request.constraints))
        names = sorted({way.option for way in table.purchases})
        options = np.array([names.index(way.option) for way in table.purchases])[table.purchase[feasible]]
        for option in range(len(names)):
            rows = feasible[options == option]
            if not rows.size:
                continue
            keys = _keys(table, rows, request.objective)
            first = int(np.lexsort(keys[::-1])[0])
            best.append((tuple(float(key[first]) for key in keys), (index, int(rows[first]))))
        front = feasible[pareto_front(table.run.hours_expected[feasible], table.cost.expected[feasible])]
        at += [(index, int(row)) for row in front]
        hours.append(table.run.hours_expected[front])
        cost.append(table.cost.expected[front])
    best.sort()
    if not at:
        return [], []
    overall = pareto_front(np.concatenate(hours), np.concatenate(cost))
    return [where for _, where in best[:MAX_PLANS]], [at[i] for i in overall]


def _keys(table: Table, rows: Any, objective: Objective) -> list[Any]:
    cost, hours = table.cost.expected[rows], table.run.hours_expected[rows]
    nodes = table.fastest.nodes[table.config[rows]]
    return [hours, cost, nodes] if objective == "time" else [cost, hours, nodes]
