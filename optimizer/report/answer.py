"""``ReportAnswer``: what a report shows, read from a plan's or recommend's JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from optimizer.catalog.model import Source
from optimizer.contract.errors import describe_wrong
from optimizer.contract.plan import FleetPlan, PlanError, PurchaseOption, plan_from_dict, read_plan
from optimizer.search.rejections import Rejection


class _Catalog(BaseModel):
    model_config = ConfigDict(frozen=True)
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A candidate as search/candidates.py lists it."""

    instance_type: str
    node_count: int
    purchase_option: PurchaseOption
    region: str
    hours_expected: float | None
    hours_p95: float | None
    cost_usd_expected: float | None
    cost_usd_p95: float | None
    excluded_by: str


class _Extras(BaseModel):
    """Fields of recommend's JSON beside its plans; a later version may have more."""

    model_config = ConfigDict(frozen=True)
    catalog: _Catalog = _Catalog()
    rejected: tuple[Rejection, ...] = ()
    candidates: tuple[Weighed, ...] = ()
    notes: tuple[str, ...] = ()
    searched_plans: int | None = None

    @field_validator("candidates", mode="before")
    @classmethod
    def _rows(cls, columns: Any) -> list[dict[str, Any]]:
        if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
            raise ValueError("no columns")
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """A plan of the answer: ``number`` is its place in the list that it is from, None on the Pareto front alone."""

    plan: FleetPlan
    number: int | None
    on_front: bool
    key: str


@dataclass(frozen=True, kw_only=True)
class ReportAnswer:
    """A chosen plan and the answer around it; one plan alone has no other candidates and no rejections.

    ``weighed`` are the candidates that ``candidates`` has no plan of, first those within the limits, each the cheapest
    first.
    """

    plan: FleetPlan
    number: int
    candidates: tuple[AnswerPlan, ...]
    weighed: tuple[Weighed, ...]
    rejected: tuple[Rejection, ...]
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    searched_plans: int | None


def answer_of(plan: FleetPlan) -> ReportAnswer:
    """Return the answer that one plan alone is."""
    return read_answer(plan.to_json())


def read_answer(text: str, *, plan_number: int = 1, origin: str = "the plan") -> ReportAnswer:
    """Read one FleetPlan, or recommend's JSON with the ``plan_number``-th plan chosen, or raise PlanError."""
    chosen = read_plan(text, plan_number=plan_number, origin=origin)
    data: dict[str, Any] = json.loads(text.removeprefix("\ufeff"))
    try:
        extras = _Extras.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise PlanError(f"{origin} is no output of recommend: {place}: {describe_wrong(problem)}") from error
    plans = _read_plans(data.get("plans", [data]), origin, "plans")
    front = _read_plans(data.get("pareto", ()), origin, "pareto")
    listed = tuple(_number(plans, front))
    named = {
        (candidate.plan.instance_type, candidate.plan.node_count, candidate.plan.purchase.option)
        for candidate in listed
    }
    others = [
        candidate
        for candidate in extras.candidates
        if (candidate.instance_type, candidate.node_count, candidate.purchase_option) not in named
    ]
    others.sort(key=lambda candidate: (bool(candidate.excluded_by), candidate.cost_usd_expected or math.inf))
    return ReportAnswer(
        plan=chosen,
        number=plan_number,
        candidates=listed,
        weighed=tuple(others),
        rejected=extras.rejected,
        sources=extras.catalog.sources,
        notes=extras.notes,
        searched_plans=extras.searched_plans,
    )


def _read_plans(data: Any, origin: str, name: str) -> list[FleetPlan]:
    if not isinstance(data, Iterable) or isinstance(data, str | dict):
        raise PlanError(f"{origin} is no output of recommend: {name} is no list")
    return [plan_from_dict(entry, origin=f"{name} {i} of {origin}") for i, entry in enumerate(data, start=1)]


def _number(plans: list[FleetPlan], front: list[FleetPlan]) -> Iterable[AnswerPlan]:
    for number, plan in enumerate(plans, start=1):
        yield AnswerPlan(plan=plan, number=number, on_front=plan in front, key=f"plan-{number}")
    for place, plan in enumerate((plan for plan in front if plan not in plans), start=1):
        yield AnswerPlan(plan=plan, number=None, on_front=True, key=f"front-{place}")
