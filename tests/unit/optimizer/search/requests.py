"""Requests of the search's tests, and their answers from the shipped catalog and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from optimizer.catalog import Catalog, load
from optimizer.contract.request import FleetRequest, request_from_dict
from optimizer.performance.calibration import Calibration
from optimizer.performance.calibration import load as load_calibration
from optimizer.performance.types import Recipe
from optimizer.recommend import Recommendation, recommend
from optimizer.search.problem import AXES, Amount, Problem, find_reach
from optimizer.workload.model import ModelSpec

TYPES = ("p4d.24xlarge", "g5.12xlarge", "g6f.xlarge", "p5.48xlarge")


@cache
def catalog() -> Catalog:
    return load()


@cache
def calibration() -> Calibration:
    return load_calibration()


def request(
    model: str = "gpt2-xl", objective: str = "cost", work: dict[str, Any] | None = None, **limits: Any
) -> FleetRequest:
    """A request, with changes to its workload and its constraints."""
    workload = {"samples": 200_000, "seq_len": 1024, "global_batch": 64} | (work or {})
    constraints = {"instance_types": TYPES, "regions": ["us-east-1", "us-west-2"], "max_nodes": 4} | limits
    return request_from_dict({"model": model, "workload": workload, "constraints": constraints, "objective": objective})


def answer(*args: Any, **changes: Any) -> Recommendation:
    """The answer to ``request``."""
    return recommend(request(*args, **changes), catalog(), calibration())


def make_problem(
    model: ModelSpec,
    recipe: Recipe,
    *,
    samples: int = 10_000,
    global_batch: int,
    max_nodes: int,
    parallelism: Sequence[str] = AXES,
    instance_types: Sequence[str] = (),
) -> Problem:
    """A problem of any model and batch, also those that no request resolves to."""
    names = ("seq_len", "precision", "framework", "compiled")
    workload = {"samples": samples} | {name: getattr(recipe, name) for name in names}
    limits = {"max_nodes": max_nodes, "parallelism": parallelism, "instance_types": instance_types}
    made = request_from_dict({"model": "gpt2", "workload": workload, "constraints": limits})
    return Problem(
        request=made,
        model=model,
        reach=find_reach(made, model, recipe.seq_len),
        recipe=recipe,
        amount=Amount(samples=samples, global_batch=global_batch),
        catalog=catalog(),
        calibration=calibration(),
        regions=(),
        instance_types=(),
    )
