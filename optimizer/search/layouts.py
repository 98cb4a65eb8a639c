"""Layouts that are searched: every legal mesh of a fleet's GPUs with every split of the global batch.

``performance.legality`` decides what is legal. Besides, as in training code: tensor ranks share a node, tensor
parallelism splits the sequence where legal, and virtual stages are equal chunks of equal stages, as
--num-layers-per-virtual-pipeline-stage of Megatron-LM makes them.
"""

from __future__ import annotations

import math

import numpy as np

from bootstrap.contract.words import counted
from optimizer.performance.confidence import SPLITS
from optimizer.performance.legality import legal
from optimizer.performance.types import Grid, Ints
from optimizer.search.problem import Problem
from optimizer.workload.model import ModelSpec

# Least tokens of a context rank: a quarter of Llama 3's, 8192 on each of 16 ranks (arXiv:2407.21783, table 4).
MIN_CONTEXT_TOKENS = 2048


# Fields of Grid by name, a layout with its batch split a row; rows are sorted by nodes.
Layouts = dict[str, Ints]


def split_bits(layouts: Layouts) -> Ints:
    """The splits of each row, bit i for SPLITS[i]."""
    return np.asarray(sum((layouts[name] > 1).astype(np.int64) << i for i, name in enumerate(SPLITS)))


def build_layouts(problem: Problem, *, ranks: int, nodes: range) -> Layouts:
    """Every legal row of a problem over ``nodes`` nodes of ``ranks`` GPUs."""
    batch = problem.amount.global_batch
    layouts = _build_meshes(problem, ranks, nodes)
    data, sizes = layouts["data"][:, None], np.array(divisors(batch))
    accum = batch // (data * sizes)
    accum[accum * data * sizes != batch] = 0
    layout, size = np.nonzero(accum)
    columns = {name: values[layout] for name, values in layouts.items()}
    columns |= {"micro_batch": sizes[size], "grad_accum": accum[layout, size]}
    return _add_virtual_stages(problem.model, columns)


def _build_meshes(problem: Problem, ranks: int, nodes: range) -> Layouts:
    model, recipe, axes = problem.model, problem.recipe, problem.reach.axes
    one = np.ones(1, dtype=np.int64)
    most = ranks * nodes[-1]
    layered = model.layers > 0
    tensor = np.array(divisors(ranks)) if "tensor" in axes and layered else one
    contexts = max(1, recipe.seq_len // MIN_CONTEXT_TOKENS).bit_length()
    context = 2 ** np.arange(contexts) if "context" in axes and layered else one
    pipeline = np.arange(1, min(model.layers, most) + 1) if "pipeline" in axes and layered else one
    expert = np.array(divisors(model.experts)) if "expert" in axes and model.experts else one
    # Two dimensions at a time keep the table small: most products do not divide the fleet.
    n, t, c = (a.ravel() for a in np.meshgrid(np.array(nodes), tensor, context, indexing="ij"))
    keep = n * ranks % (t * c) == 0
    n, t, c = n[keep], t[keep], c[keep]
    rest = n * ranks // (t * c)
    row, column = np.nonzero(rest[:, None] % pipeline == 0)
    n, t, c, p, data = n[row], t[row], c[row], pipeline[column], rest[row] // pipeline[column]
    row, column = np.nonzero(data[:, None] % expert == 0)
    n, t, c, p, data, e = n[row], t[row], c[row], p[row], data[row], expert[column]
    sequence = ((t > 1) & (recipe.seq_len % (t * c) == 0)).astype(np.int64)
    columns = {"nodes": n, "data": data, "tensor": t, "pipeline": p, "context": c, "expert": e}
    columns |= {"sequence_parallel": sequence}
    mask = legal(model, recipe, Grid(**columns))
    if "data" not in axes:
        mask = mask & (data == 1)
    return {name: values[mask] for name, values in columns.items()}


def _add_virtual_stages(model: ModelSpec, columns: Layouts) -> Layouts:
    row = np.arange(columns["nodes"].size)
    one = np.ones_like(row)
    staged = np.flatnonzero((columns["pipeline"] > 1) & (columns["grad_accum"] % columns["pipeline"] == 0))
    chunks = np.array(divisors(max(1, model.layers)))[1:]
    index, chunk = np.nonzero(model.layers % (columns["pipeline"][staged, None] * chunks) == 0)
    row, stages = np.concatenate((row, staged[index])), np.concatenate((one, chunks[chunk]))
    order = np.argsort(columns["nodes"][row], kind="stable")
    row = row[order]
    return {name: values[row] for name, values in columns.items()} | {"virtual_stages": stages[order]}


def describe_layout(layouts: Layouts, row: int, sharding: str) -> str:
    """One row in words: "zero3 over 8 GPUs, tensor 2, pipeline 4, micro-batch 1"."""
    splits = "".join(f", {name} {layouts[name][row]}" for name in SPLITS if layouts[name][row] > 1)
    ranks = int(layouts["data"][row])
    return f"{sharding} over {counted(ranks, 'GPU')}{splits}, micro-batch {layouts['micro_batch'][row]}"


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, smallest first."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
