"""The configurations that are searched: every way to lay a model over the GPUs of a fleet, and every batch split.

A layout is (nodes, data, tensor, pipeline, context, expert); a row is a layout with its micro-batch, gradient
accumulation and virtual stages. Each row is crossed with sharding and activation checkpointing where it is evaluated.
What is legal is decided by ``performance.legality`` alone; on top of it the search keeps to what training code does:

- tensor ranks share a node, as each layer waits for their collectives;
- tensor parallelism splits the sequence too where that is legal: no more is sent, and less is kept;
- context ranks are powers of two and keep MIN_CONTEXT_TOKENS each;
- virtual stages are equal chunks of equal stages, as --num-layers-per-virtual-pipeline-stage of Megatron-LM makes them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from optimizer.errors import InvalidInputError
from optimizer.performance.frameworks import framework_name
from optimizer.performance.legality import legal
from optimizer.performance.types import CHECKPOINTINGS, DDP, SHARDINGS, ZERO1, Grid, Recipe
from optimizer.search.problem import Problem
from optimizer.workload.model import ModelSpec

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Kinds of parallelism that a request can allow.
AXES = ("data", "tensor", "pipeline", "context", "expert")
# Those that split the model, by place in a row's ``used``.
SPLITS = AXES[1:]
# Context parallelism is for sequences that do not fit: Llama 3 used it from 16 ranks' 8192 tokens each
# (arXiv:2407.21783, table 4); a quarter of that is still searched.
MIN_CONTEXT_TOKENS = 2048
# Micro-batches where the global batch is free: powers of two.
MICRO_BATCHES = 2 ** np.arange(12)
# What a framework has of sharding where it does not have all: Megatron's distributed optimizer is ZeRO-1
# (https://github.com/NVIDIA/Megatron-LM docs/source/api-guide/dist_optimizer.md).
_SHARDINGS = {"megatron": (DDP, ZERO1), "megatron-core": (DDP, ZERO1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTable:
    """Layouts with their batch splits: flat arrays of one length, sorted by nodes.

    Rows of one ``layout`` (a number from 0) differ in micro-batch, grad_accum and virtual stages only; its first row
    has the smallest micro-batch and no virtual stages. The other fields are those of Grid.
    """

    layout: Ints
    nodes: Ints
    data: Ints
    tensor: Ints
    pipeline: Ints
    context: Ints
    expert: Ints
    sequence_parallel: Ints
    virtual_stages: Ints
    micro_batch: Ints
    grad_accum: Ints

    @property
    def size(self) -> int:
        """How many there are."""
        return self.nodes.size

    @property
    def used(self) -> Ints:
        """Which of SPLITS a row has, a bit for each; with 0, any training loop does it."""
        bits = np.zeros(self.size, dtype=np.int64)
        for at, name in enumerate(SPLITS):
            bits |= (getattr(self, name) > 1).astype(np.int64) << at
        return bits

    @property
    def batch(self) -> Ints:
        """Samples of one optimizer step."""
        batch: Ints = self.data * self.micro_batch * self.grad_accum
        return batch

    def take(self, at: npt.ArrayLike | slice) -> Self:
        """The rows at positions, of a mask, or of a slice ``at``."""
        return type(self)(**{field.name: getattr(self, field.name)[at] for field in fields(self)})

    @classmethod
    def joined(cls, tables: Collection[Self]) -> Self:
        """The rows of several tables, one table after the other."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})


def build_layouts(problem: Problem, *, ranks: int, nodes: range) -> LayoutTable:
    """Every legal row of a problem over ``nodes`` nodes of ``ranks`` GPUs."""
    model, amount = problem.model, problem.amount
    layouts = _layouts(problem, ranks, nodes)
    data = layouts["data"][:, None]
    if amount.global_batch is None:
        sizes = MICRO_BATCHES
        # As near to the limit as whole micro-batches come, so that every fleet trains with about the same batch.
        accum = amount.batch_limit // (data * sizes)
        # Long sequences: one sequence a GPU of one node may already be more, and is the least there is.
        accum[:, 0] = np.where(layouts["nodes"] == 1, np.maximum(accum[:, 0], 1), accum[:, 0])
    else:
        sizes = np.array(divisors(amount.global_batch))
        accum = amount.global_batch // (data * sizes)
        accum[accum * data * sizes != amount.global_batch] = 0
    layout, size = np.nonzero(accum)
    found = {name: values[layout] for name, values in layouts.items()}
    found |= {"layout": layout, "micro_batch": sizes[size], "grad_accum": accum[layout, size]}
    return _with_virtual_stages(model, found)


def _layouts(problem: Problem, ranks: int, nodes: range) -> dict[str, Ints]:
    """Every legal layout, and whether it splits the sequence."""
    model, recipe, axes = problem.model, problem.recipe, problem.request.constraints.parallelism
    one = np.ones(1, dtype=np.int64)
    most = ranks * nodes[-1]
    split = model.layers > 0
    tensor = np.array(divisors(ranks)) if "tensor" in axes and split else one
    contexts = max(1, recipe.seq_len // MIN_CONTEXT_TOKENS).bit_length()
    context = 2 ** np.arange(contexts) if "context" in axes and split else one
    pipeline = np.arange(1, min(model.layers, most) + 1) if "pipeline" in axes and split else one
    expert = np.array(divisors(model.experts)) if "expert" in axes and model.experts else one
    # Two dimensions at a time, so that the table stays small: most products do not divide the fleet.
    n, t, c = (a.ravel() for a in np.meshgrid(np.array(nodes), tensor, context, indexing="ij"))
    keep = n * ranks % (t * c) == 0
    n, t, c = n[keep], t[keep], c[keep]
    rest = n * ranks // (t * c)
    at, p = np.nonzero(rest[:, None] % pipeline == 0)
    n, t, c, p, data = n[at], t[at], c[at], pipeline[p], rest[at] // pipeline[p]
    at, e = np.nonzero(data[:, None] % expert == 0)
    n, t, c, p, data, e = n[at], t[at], c[at], p[at], data[at], expert[e]
    splits = ((t > 1) & (recipe.seq_len % (t * c) == 0)).astype(np.int64)
    mask, _ = legal(
        model, recipe, Grid(nodes=n, data=data, tensor=t, pipeline=p, context=c, expert=e, sequence_parallel=splits)
    )
    if "data" not in axes:
        mask = mask & (data == 1)
    found = {"nodes": n, "data": data, "tensor": t, "pipeline": p, "context": c, "expert": e}
    return {name: values[mask] for name, values in (found | {"sequence_parallel": splits}).items()}


def _with_virtual_stages(model: ModelSpec, found: dict[str, Ints]) -> LayoutTable:
    """Each row without virtual stages, and with each number of them that is legal."""
    row = np.arange(found["nodes"].size)
    one = np.ones_like(row)
    staged = np.flatnonzero((found["pipeline"] > 1) & (found["grad_accum"] % found["pipeline"] == 0))
    chunks = np.array(divisors(max(1, model.layers)))[1:]
    at, chunk = np.nonzero(model.layers % (found["pipeline"][staged, None] * chunks) == 0)
    row, stages = np.concatenate((row, staged[at])), np.concatenate((one, chunks[chunk]))
    order = np.argsort(found["nodes"][row], kind="stable")
    row = row[order]
    return LayoutTable(**{name: values[row] for name, values in found.items()}, virtual_stages=stages[order])


def allowed_shardings(recipe: Recipe) -> Ints:
    """The shardings that the recipe's framework has and the search may use.

    Raises:
        InvalidInputError: there is none.
    """
    had = _SHARDINGS.get(framework_name(recipe.framework), range(len(SHARDINGS)))
    found = [sharding for sharding in had if SHARDINGS[sharding] in recipe.shardings]
    if not found:
        raise InvalidInputError(
            f"sharding is {', '.join(recipe.shardings)}",
            limit=f"{recipe.framework} has {', '.join(SHARDINGS[sharding] for sharding in had)}",
            next_step="leave --sharding out, or choose another --framework",
        )
    return np.array(found)


def allowed_checkpointings(model: ModelSpec) -> Ints:
    """The activation checkpointings that the model can have."""
    return np.array([CHECKPOINTINGS.index(name) for name in model.checkpointings])


def shards(table: LayoutTable, sharding: Ints) -> Bools:
    """Which rows can have which sharding (rows x shardings): there is nothing to shard over one rank."""
    return np.asarray((table.data * table.context > 1)[:, None] | (sharding == DDP))


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, smallest first."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
