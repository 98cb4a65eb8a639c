"""``recommend``: from a FleetRequest to its answer.

``from optimizer import recommend`` gives this module, which is called as its function: the first import of a submodule
binds its name in the package, whatever else had it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from optimizer.catalog import Catalog, load
from optimizer.contract.plan import SCHEMA_VERSION, FleetPlan
from optimizer.contract.request import FleetRequest, read_request_file, request_from_dict
from optimizer.economics.policy_outlook import price_policies
from optimizer.performance import calibration as calibrations
from optimizer.performance.calibration import Calibration
from optimizer.search.advice import list_notes
from optimizer.search.alternates import add_alternates
from optimizer.search.candidates import find_candidates, list_cheapest
from optimizer.search.nearest import NearestPlan, find_nearest
from optimizer.search.plan_builder import build_plans
from optimizer.search.problem import Problem, Rejection
from optimizer.search.ranking import rank

if TYPE_CHECKING:
    import pandas as pd

# Best plans whose spot policies are priced at once, a tenth of a second each; `gpufleet stack set` prices any other.
PRICED_PLANS = 5


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer to a request.

    Attributes:
        plans: best first by the objective; the best of each instance type and purchase option, or the Pareto front.
        candidates: columns of search/candidates.py; ``pandas.DataFrame`` takes them.
        searched_plans: ``configurations`` crossed with their purchases.
        configurations: legal configurations of priced types.
        faster, cheaper: the plans at current prices that beat plan 1 in hours and in dollars, where some do.
        nearest: without a plan, those that keep the limits with one or two moved, the nearest first.
    """

    problem: Problem
    plans: tuple[FleetPlan, ...]
    pareto: tuple[FleetPlan, ...]
    faster: FleetPlan | None
    cheaper: FleetPlan | None
    nearest: tuple[NearestPlan, ...]
    rejected: tuple[Rejection, ...]
    candidates: Mapping[str, Sequence[Any]]
    searched_plans: int
    configurations: int
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
            "nearest": [nearest.to_dict() for nearest in self.nearest],
            "rejected": [asdict(rejection) for rejection in self.rejected],
            "candidates": self.candidates,
            "searched_plans": self.searched_plans,
            "searched": {"configurations": self.configurations},
            "notes": list(self.notes),
            "elapsed_s": round(self.elapsed_s, 4),
        }

    def to_frame(self, plans: Sequence[FleetPlan] | None = None) -> pd.DataFrame:
        """One row a plan, by default of ``plans``; the index is its number.

        A column is a field of the plan, named by its path: ``node_count``, ``cost_usd.expected``.
        """
        import pandas as pd  # the command line does without pandas

        chosen = self.plans if plans is None else plans
        frame = pd.json_normalize([plan.model_dump(mode="json") for plan in chosen])
        frame.index = pd.RangeIndex(1, len(chosen) + 1, name="plan")
        return frame


def recommend(
    request: FleetRequest | Mapping[str, Any] | str | Path,
    catalog: Catalog | None = None,
    calibration: Calibration | None = None,
) -> Recommendation:
    """Find the best fleets for a request.

    Args:
        request: also a mapping with the keys of docs/request.md, or the path of a YAML file with them.
        catalog: by default the newer of the shipped one and the user's.
        calibration: by default the shipped one.

    Raises:
        InvalidInputError: the request is wrong.
        DataMissingError: a unit price is missing.
    """
    started = time.perf_counter()
    if isinstance(request, str | Path):
        request = request_from_dict(read_request_file(Path(request)), origin=str(request))
    elif not isinstance(request, FleetRequest):
        request = request_from_dict(request)
    catalog = catalog or load()
    calibration = calibration or calibrations.load()
    problem = Problem.resolve(request, catalog, calibration)
    tables, rejected = find_candidates(problem)
    ranking = rank(tables, request)
    listed = list_cheapest(tables, request.constraints)
    contrasts = [candidate for candidate in (ranking.faster, ranking.cheaper) if candidate]
    candidates = list(dict.fromkeys([*ranking.pareto, *ranking.best, *contrasts]))
    built = build_plans(problem, candidates)
    places = add_alternates(problem, dict(zip(candidates, built, strict=True)))
    plans = {candidate: plan.seal() for candidate, plan in places.items()}
    for candidate in ranking.best[:PRICED_PLANS]:
        outlook = price_policies(plans[candidate])
        plans[candidate] = plans[candidate].model_copy(update={"spot_policy": outlook})
    first = plans[ranking.best[0]] if ranking.best else None
    return Recommendation(
        problem=problem,
        plans=tuple(plans[candidate] for candidate in ranking.best),
        pareto=tuple(plans[candidate] for candidate in ranking.pareto),
        faster=plans[ranking.faster] if ranking.faster else None,
        cheaper=plans[ranking.cheaper] if ranking.cheaper else None,
        nearest=() if first else tuple(find_nearest(problem, tables)),
        rejected=tuple(rejected),
        candidates=listed,
        searched_plans=sum(table.fastest.configurations * len(table.purchases) for table in tables),
        configurations=sum(table.fastest.configurations for table in tables),
        notes=tuple(list_notes(problem, tables, rejected, [candidate.purchase for candidate in ranking.best], first)),
        elapsed_s=time.perf_counter() - started,
    )


class _CallableModule(ModuleType):
    __call__ = staticmethod(recommend)


# https://docs.python.org/3/reference/datamodel.html#customizing-module-attribute-access
sys.modules[__name__].__class__ = _CallableModule
