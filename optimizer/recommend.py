"""``recommend``: from a FleetRequest to its answer.

``from optimizer import recommend`` gives this module, which is called as its function: the first import of a submodule
binds its name in the package, whatever else had it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from bootstrap.contract import trainer
from bootstrap.contract.timings import BLOCK_TAIL
from bootstrap.contract.words import counted
from optimizer.catalog import Catalog, load
from optimizer.contract.plan import SCHEMA_VERSION, FleetPlan
from optimizer.contract.request import (
    ExistingReservation,
    FleetRequest,
    read_request_file,
    request_from_dict,
)
from optimizer.economics.policy_outlook import price_policies
from optimizer.performance import calibration as calibrations
from optimizer.performance.calibration import Calibration
from optimizer.performance.case import lengths
from optimizer.performance.frameworks import fp8_note, slow_attention_note
from optimizer.performance.setups import positions_note
from optimizer.search.advice import list_advice
from optimizer.search.alternates import with_alternates
from optimizer.search.candidates import (
    CandidateTable,
    find_candidates,
    list_cheapest,
)
from optimizer.search.global_batch import FEW_STEPS
from optimizer.search.nearest import NearestPlan, find_nearest
from optimizer.search.plan_builder import build_plans
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase
from optimizer.search.ranking import list_chosen, rank
from optimizer.search.rejections import Rejection

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
    chosen = list_chosen(ranking, request)
    contrasts = [candidate for candidate in (ranking.faster, ranking.cheaper) if candidate]
    candidates = list(dict.fromkeys([*ranking.pareto, *chosen, *contrasts]))
    built = with_alternates(problem, candidates, build_plans(problem, candidates))
    plans = {candidate: plan.seal() for candidate, plan in zip(candidates, built, strict=True)}
    for candidate in chosen[:PRICED_PLANS]:
        outlook = price_policies(plans[candidate])
        plans[candidate] = plans[candidate].model_copy(update={"spot_policy": outlook})
    first = plans[chosen[0]] if chosen else None
    return Recommendation(
        problem=problem,
        plans=tuple(plans[candidate] for candidate in chosen),
        pareto=tuple(plans[candidate] for candidate in ranking.pareto),
        faster=plans[ranking.faster] if ranking.faster else None,
        cheaper=plans[ranking.cheaper] if ranking.cheaper else None,
        nearest=() if first else tuple(find_nearest(problem, tables)),
        rejected=tuple(rejected),
        candidates=list_cheapest(tables, request.constraints),
        searched_plans=sum(table.fastest.configurations * len(table.purchases) for table in tables),
        configurations=sum(table.fastest.configurations for table in tables),
        notes=(
            *_workload_notes(problem),
            *_batch_notes(problem),
            *trainer_notes(problem),
            *_spot_notes(problem),
            *_reservation_notes(problem, tables, rejected, [candidate.purchase for candidate in chosen]),
            *(list_advice(problem, first) if first else ()),
        ),
        elapsed_s=time.perf_counter() - started,
    )


def _workload_notes(problem: Problem) -> list[str]:
    work, model = problem.request.workload, problem.model
    slow = fp8_note(problem.recipe.precision, problem.recipe.framework, compiled=work.compiled)
    seq_len, framework = problem.recipe.seq_len, problem.recipe.framework
    notes = [slow, slow_attention_note(model, seq_len, framework), positions_note(model, seq_len)]
    if work.precision == "fp32" and any("tf32" in instance.gpu.peak_tflop_per_s for instance in problem.instance_types):
        notes.append("precision fp32 leaves the tensor cores idle: --precision tf32 uses them, on 32-bit weights too")
    notes = [note for note in notes if note]
    if model.quantised:
        notes.append(
            f"{model.name} is quantised ({model.quantised}), and the plan trains weights of 16 or 32 bits: dequantise "
            "the checkpoint first"
        )
    if model.counts_samples and work.tokens is not None:
        unit = "images" if model.takes_images else f"clips of {model.encoder_tokens} frames"
        notes.append(
            f"{model.name} has no tokens to count: {work.tokens:,} tokens are taken for {work.tokens:,} samples "
            f"({unit})"
        )
    if model.counts_samples and work.seq_len is not None:
        notes.append(f"{model.name} fixes the length of its samples: seq_len {work.seq_len} is not used")
    if model.architecture == "seq2seq":
        inputs, targets = lengths(model, problem.recipe)
        notes.append(
            f"{model.name} reads {inputs:,} tokens and writes {targets:,} (--target-len; default: span corruption's); "
            "tokens of the request are those it reads"
        )
    return notes


def _batch_notes(problem: Problem) -> list[str]:
    amount = problem.amount
    if problem.request.workload.steps is not None or amount.steps >= FEW_STEPS:
        return []
    return [
        f"only {counted(amount.steps, 'step')} of {counted(amount.global_batch, 'sample')}: published "
        "fine-tunings take "
        f"{FEW_STEPS} at least; train on more data, or give a smaller --global-batch"
    ]


def trainer_notes(problem: Problem) -> list[str]:
    """Say what of the request asks for training code of the user's own, and what that code may do."""
    request, limits = problem.request, problem.request.constraints
    # A request that names another framework needs no note.
    if not problem.reach.beyond_trainer or request.workload.framework not in trainer.FRAMEWORKS:
        return []
    may = ", ".join(problem.reach.axes)
    asked = "" if limits.parallelism else f", which may use {may} parallelism (--parallelism data narrows it)"
    return [f"plans are for training code of your own{asked}: {'; '.join(problem.reach.beyond_trainer)}"]


def _spot_notes(problem: Problem) -> list[str]:
    limits = problem.request.constraints
    has_block = any(owned.capacity_block for owned in limits.usable_reservations)
    if has_block or "spot" in limits.purchase_options or limits.spot_fallback == "none":
        return []
    return [
        f"spot_fallback {limits.spot_fallback} is not used: purchase_options ({', '.join(limits.purchase_options)}) "
        "leave out spot; add --purchase spot"
    ]


def _reservation_notes(
    problem: Problem,
    tables: Sequence[CandidateTable],
    rejected: Sequence[Rejection],
    used: Collection[PricedPurchase],
) -> list[str]:
    limits, types = problem.request.constraints, {instance.name for instance in problem.instance_types}
    notes = []
    for owned in limits.existing_reservations:
        unused = f"the reservation of {owned.count} {owned.instance_type} in {owned.region} is not used"
        if owned not in limits.usable_reservations:
            notes.append(f"{unused}: purchase_options ({', '.join(limits.purchase_options)}) leave out {owned.option}")
        elif owned.region not in problem.regions:
            notes.append(f"{unused}: regions ({', '.join(limits.regions)}) leave it out")
        elif owned.instance_type not in types:
            notes.append(f"{unused}: instance_types ({', '.join(limits.instance_types)}) leave it out")
        elif owned.capacity_block and not owned.capacity_block.usable_hours(datetime.now(UTC)):
            over = (owned.capacity_block.end - BLOCK_TAIL).astimezone(UTC)
            notes.append(f"{unused}: its Capacity Block is over, AWS ended the nodes from {over:%Y-%m-%d %H:%M} UTC on")
        elif not any(owned in (purchase.reservation, *purchase.following) for purchase in used):
            notes.append(f"{unused}: {_describe_unused(problem, owned, tables, rejected)}")
    return notes


def _describe_unused(
    problem: Problem, owned: ExistingReservation, tables: Sequence[CandidateTable], rejected: Sequence[Rejection]
) -> str:
    """Say why no plan of the answer is on owned nodes: no candidate keeps the limits, or others are better."""
    limits = problem.request.constraints
    table = next((table for table in tables if table.fastest.instance.name == owned.instance_type), None)
    if table is None:
        return next(entry.reason for entry in rejected if entry.instance_type == owned.instance_type)
    uses = [i for i, purchase in enumerate(table.purchases) if owned in (purchase.reservation, *purchase.following)]
    on_owned = table.keep(np.flatnonzero(np.isin(table.purchase, uses)))
    if (rejection := on_owned.reject(limits)) is not None:
        return rejection.reason
    usd = float(on_owned.cost.expected[on_owned.feasible(limits)].min())
    return f"other plans are better; the cheapest on it costs {usd:,.2f} USD expected"


class _CallableModule(ModuleType):
    __call__ = staticmethod(recommend)


# https://docs.python.org/3/reference/datamodel.html#customizing-module-attribute-access
sys.modules[__name__].__class__ = _CallableModule
