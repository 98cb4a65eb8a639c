"""``ReportAnswer``: what a report shows, read from a plan's or recommend's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from optimizer.catalog.model import Source
from optimizer.contract.errors import describe_invalid
from optimizer.contract.plan import FleetPlan, PlanError, plan_from_dict, read_plan
from optimizer.search.problem import Rejection


class _Catalog(BaseModel):
    model_config = ConfigDict(frozen=True)
    sources: tuple[Source, ...] = ()


class AnswerExtras(BaseModel):
    """Fields of recommend's JSON beside its plans; a later version may have more."""

    model_config = ConfigDict(frozen=True)
    catalog: _Catalog = _Catalog()
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()
    searched_plans: int | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """A plan of the answer: ``number`` is its place in the list that it is from, None on the Pareto front alone."""

    plan: FleetPlan
    number: int | None
    on_front: bool
    key: str


@dataclass(frozen=True, kw_only=True)
class ReportAnswer:
    """A chosen plan and the answer around it; one plan alone has no other candidates and no rejections."""

    plan: FleetPlan
    number: int
    candidates: tuple[AnswerPlan, ...]
    extras: AnswerExtras


def read_answer(text: str, *, plan_number: int = 1, origin: str = "the plan") -> ReportAnswer:
    """Read one FleetPlan, or recommend's JSON with the ``plan_number``-th plan chosen, or raise PlanError."""
    chosen = read_plan(text, plan_number=plan_number, origin=origin)
    data: dict[str, Any] = json.loads(text.removeprefix("\ufeff"))
    try:
        extras = AnswerExtras.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"{origin} is no output of recommend: {describe_invalid(error)[0]}") from error
    plans = _read_plans(data.get("plans", [data]), origin, "plans")
    front = _read_plans(data.get("pareto", ()), origin, "pareto")
    return ReportAnswer(plan=chosen, number=plan_number, candidates=tuple(_number(plans, front)), extras=extras)


def _read_plans(data: Any, origin: str, name: str) -> list[FleetPlan]:
    if not isinstance(data, Iterable) or isinstance(data, str | dict):
        raise PlanError(f"{origin} is no output of recommend: {name} is no list")
    return [plan_from_dict(entry, origin=f"{name} {i} of {origin}") for i, entry in enumerate(data, start=1)]


def _number(plans: list[FleetPlan], front: list[FleetPlan]) -> Iterable[AnswerPlan]:
    for number, plan in enumerate(plans, start=1):
        yield AnswerPlan(plan=plan, number=number, on_front=plan in front, key=f"plan-{number}")
    for place, plan in enumerate((plan for plan in front if plan not in plans), start=1):
        yield AnswerPlan(plan=plan, number=None, on_front=True, key=f"front-{place}")
