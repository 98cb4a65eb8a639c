"""The search against brute force: every configuration of small catalogs, models and limits, one by one."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optimizer import performance
from optimizer.catalog.gpus import gpu_table
from optimizer.performance.confidence import SPLITS, WRITTEN_SPLITS, measured_splits, speed_source
from optimizer.performance.frameworks import framework_name, frameworks
from optimizer.performance.legality import legal
from optimizer.performance.types import CHECKPOINTINGS, DDP, SHARDINGS, Estimates, Grid, Hardware, Recipe
from optimizer.search import layouts
from optimizer.search.fastest import (
    SAME,
    Fastest,
    SearchSpace,
    allowed_shardings,
    estimate_configurations,
    find_fastest,
)
from optimizer.search.problem import AXES, Rejection
from optimizer.workload.model import ModelSpec
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import evaluate
from tests.unit.optimizer.search.requests import calibration, catalog, make_problem

# One of each kind of node: NVSwitch and EFA, PCIe and TCP, one GPU, two GPUs, a fraction of a GPU.
TYPES = ("p4d.24xlarge", "g5.12xlarge", "g6.4xlarge", "g7e.12xlarge", "g6f.4xlarge")
FIELDS = ("data", "tensor", "pipeline", "context", "expert", "sequence_parallel", "virtual_stages")


def small_model(layers: int, heads: int, width: int, experts: int, vocab: int) -> ModelSpec:
    fields: dict[str, Any] = {"layers": layers, "hidden_size": heads * width, "ffn_size": 4 * heads * width}
    fields |= {"attention_heads": heads, "kv_heads": math.gcd(heads, 4), "vocab_size": vocab, "head_dim": width}
    return resolve_model(fields | ({"experts": experts, "experts_per_token": 2} if experts else {}))


def configurations(
    model: ModelSpec, recipe: Recipe, ranks: int, nodes: int, batch: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Every configuration of the searched space on ``nodes`` nodes, by loops."""
    rows = []
    gpus = ranks * nodes
    most = max(1, model.layers)
    for tensor, pipeline, context, expert in itertools.product(
        range(1, ranks + 1), range(1, most + 1), (1, 2, 4, 8), range(1, max(1, model.experts) + 1)
    ):
        if ranks % tensor or gpus % (tensor * pipeline * context) or context * 2048 > max(recipe.seq_len, 2048):
            continue
        data = gpus // (tensor * pipeline * context)
        # Megatron's code spreads experts over tensor ranks too, and has other groups of micro-batches; no plan does.
        if data % expert:
            continue
        splits = int(tensor > 1 and recipe.seq_len % (tensor * context) == 0)
        for micro in range(1, batch + 1):
            accum = batch // (data * micro)
            if accum * data * micro != batch:
                continue
            for stages in range(1, most + 1):
                if stages > 1 and (model.layers % (pipeline * stages) or accum % pipeline):
                    continue
                for sharding, way in itertools.product(range(len(SHARDINGS)), model.checkpointings):
                    if data * context == 1 and sharding != DDP:
                        continue
                    layout = (data, tensor, pipeline, context, expert, splits, stages)
                    rows.append((*layout, micro, accum, sharding, CHECKPOINTINGS.index(way)))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 11).T
    names = (*FIELDS, "micro_batch", "grad_accum", "sharding", "checkpointing")
    found = dict(zip(names, columns, strict=True))
    mask = legal(model, recipe, Grid(nodes=nodes, **found))
    return {name: values[mask] for name, values in found.items()}


def expected(
    found: dict[str, Any], estimates: Estimates, samples: int, measured: tuple[str, ...]
) -> list[tuple[float, tuple[int, ...]]]:
    """(hours, configuration) that the search should pick: the simplest of the fastest, measured and not."""
    batch = found["data"] * found["micro_batch"] * found["grad_accum"]
    hours = np.where(estimates.fits_p95, np.ceil(samples / batch) * estimates.step_time_s / 3600, np.inf)
    splits = ("tensor", "pipeline", "context", "expert")
    axes = np.sum([found[name] > 1 for name in splits], axis=0)
    picked = []
    surer = np.inf
    unmeasured = np.sum([found[name] > 1 for name in splits if name not in measured], axis=0) > 0
    for group in (~unmeasured, unmeasured):
        best = min(surer, hours[group].min(initial=np.inf))
        if surer > (1 + SAME) * best:
            at = np.flatnonzero(group & (hours <= (1 + SAME) * best))
            order = (found[n] for n in ("virtual_stages", "sharding", "checkpointing", "grad_accum"))
            keys = list(zip(*(column[at] for column in (axes, *order, hours)), strict=True))
            first = at[min(range(len(keys)), key=keys.__getitem__)]
            picked.append((float(hours[first]), tuple(int(found[name][first]) for name in FIELDS)))
        surer = best
    return picked


@settings(max_examples=25, deadline=None)
@given(
    shape=st.fixed_dictionaries(
        {
            "layers": st.sampled_from([1, 2, 3, 4, 6, 8]),
            "heads": st.sampled_from([2, 4, 6, 8]),
            "width": st.sampled_from([64, 128, 512, 1024]),
            "experts": st.sampled_from([0, 0, 0, 4]),
            "vocab": st.sampled_from([1000, 128256]),
        }
    ),
    seq_len=st.sampled_from([128, 2048, 4096, 16384]),
    batch=st.sampled_from([1, 6, 8, 12, 64, 96, 1000]),
    samples=st.sampled_from([1, 1000, 999_999]),
    nodes=st.integers(1, 3),
    name=st.sampled_from(TYPES),
    framework=st.sampled_from(["torch", "gpufleet", "megatron", "megatron-core", "nemo", "nanotron"]),
    compiled=st.booleans(),
)
# Every layout of a batch of one splits the model, and the least memory of none fits.
@example(
    shape={"layers": 6, "heads": 6, "width": 1024, "experts": 4, "vocab": 128256},
    seq_len=128, batch=1, samples=1, nodes=1, name="p4d.24xlarge", framework="torch", compiled=False,
)  # fmt: skip
def test_the_search_finds_what_brute_force_finds(
    shape: dict[str, int],
    seq_len: int,
    batch: int,
    samples: int,
    nodes: int,
    name: str,
    framework: str,
    compiled: bool,
) -> None:
    model = small_model(**shape)
    recipe = Recipe(seq_len=seq_len, framework=framework, compiled=compiled)
    instance = catalog().instance_type(name)
    most = nodes if instance.gpu_count >= 1 else 1
    asked = make_problem(model, recipe, samples=samples, global_batch=batch, max_nodes=nodes, instance_types=(name,))
    (result,) = find_fastest(asked, [instance])
    allowed = allowed_shardings(recipe.framework, SHARDINGS)
    measured = measured_splits(instance.gpu, recipe.framework)
    total = 0
    wanted: list[tuple[int, float, tuple[int, ...]]] = []
    for count in range(1, most + 1):
        found = configurations(model, recipe, instance.ranks, count, batch)
        found = {key: values[np.isin(found["sharding"], allowed)] for key, values in found.items()}
        if not found["data"].size:
            continue
        estimates = evaluate(
            model, recipe, Hardware.from_instance_type(instance), Grid(nodes=count, **found), calibration()
        )
        total += found["data"].size
        wanted += [(count, hours, layout) for hours, layout in expected(found, estimates, samples, measured)]
    if isinstance(result, Rejection):
        assert not wanted
        assert result.binding_constraint == ("memory" if total else "global_batch")
        return
    assert result.configurations == total
    got = sorted(
        (int(n), tuple(int(result.columns[field][i]) for field in FIELDS), float(result.train_hours[i]))
        for i, n in enumerate(result.nodes)
    )
    assert [(n, layout) for n, layout, _ in got] == [(n, layout) for n, _, layout in sorted(wanted, key=_by_layout)]
    for (_, _, hours), (_, right, _) in zip(got, sorted(wanted, key=_by_layout), strict=True):
        assert hours == pytest.approx(right, rel=1e-9)


def _by_layout(entry: tuple[int, float, tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    return entry[0], entry[2]


def test_estimates_of_a_result_are_those_of_its_configuration() -> None:
    model, recipe = resolve_model("llama-3.1-8b"), Recipe(seq_len=8192)
    kinds = [catalog().instance_type(name) for name in ("p5.48xlarge", "p4d.24xlarge")]
    asked = make_problem(model, recipe, samples=1000, global_batch=240, max_nodes=4)
    results = [result for result in find_fastest(asked, kinds) if isinstance(result, Fastest)]
    chosen = [(result, index) for result in results for index in range(result.nodes.size)]
    estimates = estimate_configurations(asked, chosen)
    assert estimates.fits_p95.all()
    for cell, (result, index) in enumerate(chosen):
        grid = Grid(
            nodes=result.nodes[index],
            **{key: values[index] for key, values in result.columns.items() if key != "nodes"},
        )
        alone = evaluate(model, recipe, Hardware.from_instance_type(result.instance), grid, calibration())
        assert estimates.step_time_s[cell] == pytest.approx(float(alone.step_time_s), rel=1e-12)
        hours = asked.amount.steps * float(alone.step_time_s) / 3600
        assert result.train_hours[index] == pytest.approx(hours, rel=1e-12)


def test_axes_that_are_not_allowed_are_not_used() -> None:
    model, recipe = resolve_model("mixtral-8x7b"), Recipe(seq_len=8192)
    for allowed in (("data",), ("data", "tensor"), ("pipeline", "context"), ("data", "expert")):
        asked = make_problem(model, recipe, global_batch=64, max_nodes=4, parallelism=allowed)
        rows = layouts.build_layouts(asked, ranks=8, nodes=range(1, 5))
        for axis in set(AXES) - set(allowed):
            assert (rows[axis] == 1).all()
        for axis in set(allowed) - {"data"}:
            assert (rows[axis] > 1).any()


def test_measured_kinds_of_parallelism_are_those_of_the_measured_runs() -> None:
    """One row is enough to count: the residual of its GPU has it in."""
    with (Path(performance.__file__).parent / "data" / "measured_runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    splits: dict[str, set[str]] = {}
    for row in rows:
        if not frameworks()[framework_name(row["framework"])].fused_kernels:
            axes = {axis for axis in SPLITS if float(row[f"{axis}_parallel"] or 1) > 1}
            splits.setdefault(gpu_table()[row["gpu"]].name, set()).update(axes)
    assert {key: names for key, names in splits.items() if names} == {k: set(v) for k, v in WRITTEN_SPLITS.items()}


def test_pipelines_between_nodes_have_the_error_of_those_measured() -> None:
    """nanotron's stages on several nodes were up to 25 times too slow; the search and a plan's description agree."""
    model, recipe = resolve_model("llama-3.1-8b"), Recipe(seq_len=4096, framework="nanotron")
    asked = make_problem(model, recipe, global_batch=256, max_nodes=4)
    (result,) = find_fastest(asked, [catalog().instance_type("p5.48xlarge")])
    assert isinstance(result, Fastest)
    hardware = Hardware.from_instance_type(result.instance)
    for i, error in enumerate(result.relative_error):
        nodes, stages = int(result.nodes[i]), int(result.columns["pipeline"][i])
        described, _ = speed_source(calibration(), model, recipe, hardware, nodes, ["pipeline"] * (stages > 1))
        assert error == described.relative_error
    space = SearchSpace(asked, [result.instance], layouts.build_layouts(asked, ranks=8, nodes=range(1, 5)))
    row = np.arange(space.splits.size)
    between = (space.table["pipeline"] > 1) & (space.table["nodes"] > 1)
    errors = space.relative_error(0, row)
    of_others, of_pipelines = (calibration().residuals[f"nanotron{name}"].relative_error for name in ("", " pipelines"))
    assert of_others < 0.5 < 1.0 < of_pipelines
    assert (errors[between] == of_pipelines).all() and (errors[~between] == of_others).all()
    assert between.any() and (space.table["pipeline"][~between] > 1).any()
