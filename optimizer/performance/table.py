"""The table of a step as sums, its seconds by one roofline and a few fitted numbers, and estimates of layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.contract.units import GIB
from optimizer.performance import kernels
from optimizer.performance.calibration import Coefficients
from optimizer.performance.case import Case
from optimizer.performance.collectives import Collective, collectives
from optimizer.performance.memory import CONTEXT_BYTES, FRAGMENTATION, limit_bytes, memory
from optimizer.performance.operations import (
    PARTS,
    Operation,
    host_time,
    model_flops_per_sample,
    operations,
    weight_bytes_moved,
)
from optimizer.performance.types import DDP, ZERO1, ZERO3, Estimates, Number

# Between the longer of GPU and host time (power infinity) and their sum (power 1).
_OVERLAP_POWER = 2.5


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Seconds at full rates of some operations, by the fitted number that scales them (``plain``: by none)."""

    matmul_efficiency: Number = 0.0
    attention_efficiency: Number = 0.0
    elementwise_traffic: Number = 0.0
    plain: Number = 0.0
    kernels: Number = 0.0

    def seconds(self, c: Coefficients) -> Number:
        """Compute the seconds with these fitted numbers."""
        products = self.matmul_efficiency / c.matmul_efficiency + self.attention_efficiency / c.attention_efficiency
        traffic = self.elementwise_traffic * c.elementwise_traffic
        return (products + traffic + self.plain + self.kernels * kernels.KERNEL_S) * c.overhead


class StepTable:
    """All that a step's seconds follow from, but the fitted numbers."""

    def __init__(self, x: Case) -> None:
        layers = x.model.layers
        table = list(operations(x))
        self.sums: dict[str, Sums] = {part: _sum((op for op in table if op.part == part), x) for part in PARTS}
        self.collectives = dict(collectives(x))
        self.rates, self.local = x.rates, x.local
        self.host_layers, self.host_s, self.late_ranks = host_time(x)
        # Copies of weights and sums of gradients, a micro-batch; optimizer and loader, a step.
        self.weights_s: Number = weight_bytes_moved(x) / x.rates.memory
        moved = x.update_bytes + x.master_bytes + (x.weight_bytes if x.master_bytes > 0 else 0.0)
        # DDP copies gradients to its buckets and back.
        copies = np.where((x.sharding == DDP) & (x.ranks > 1), 2.0 * x.bucket_bytes, 0.0)
        self.optimizer_s: Number = x.updated_parameters * (moved + copies) / x.rates.memory
        self.load_s: Number = x.rates.load_s_per_sample * x.micro_batch * x.grad_accum
        # Share of the layers on the fullest stage and on the last.
        self.share: Number = x.stage_layers / layers if layers else 1.0
        self.last_share: Number = x.last_stage_layers / layers if layers else 1.0
        self.stages, self.virtual_stages, self.micro_batches = x.pipeline, x.virtual_stages, x.grad_accum
        # Share of attention beside which a context ring sends; shares of communication that always show.
        self.hides_context: Number = 1.0 - 1.0 / x.context
        self.tensor_shown: Number = kernels.EXPOSED_COMMUNICATION if x.code.overlaps_tensor else 1.0
        hides_data = x.code.overlaps_data & np.logical_not(x.code.hook_shards & (x.sharding == ZERO1))
        self.data_shown: Number = np.where(hides_data, kernels.EXPOSED_COMMUNICATION, 1.0)
        # ZeRO-3 gathers in the forward pass too.
        self.gathers_all_along: Number = np.where(x.sharding >= ZERO3, 1.0, 0.0)


def _sum(table: Iterable[Operation], x: Case) -> Sums:
    total: dict[str, Number] = {}
    for op in table:
        for name, value in (
            (op.unit or "plain", op.flops * (op.count / op.flop_per_s)),
            (op.traffic or "plain", op.moved * (op.count / x.rates.memory)),
            ("kernels", op.kernels * op.count),
        ):
            total[name] = total.get(name, 0.0) + value
    return Sums(**total)


def explain(x: Case, c: Coefficients) -> list[dict[str, Any]]:
    """List the operations of one configuration: a micro-batch of all layers on one rank, nothing hidden."""
    rows: dict[str, dict[str, Any]] = {}
    sums = ("tflop", "moved_gb", "kept_mb_a_layer", "s")
    for op in operations(x):
        row = rows.setdefault(op.name, {"operation": op.name, "count": op.count} | dict.fromkeys(sums, 0.0))
        row["tflop"] += float(op.flops * op.count) / 1e12
        row["moved_gb"] += float(op.moved * op.count) / 1e9
        row["kept_mb_a_layer"] += float(x.tokens * op.kept) / 1e6
        row["s"] += float(_sum([op], x).seconds(c))
    takes_part = [row for row in rows.values() if row["s"] or row["kept_mb_a_layer"]]
    if moved := float(weight_bytes_moved(x) / (x.stage_layers / x.model.layers if x.model.layers else 1.0)):
        copies = {"operation": "copies of weights and gradients", "moved_gb": moved / 1e9}
        takes_part.append(copies | {"s": moved / float(x.rates.memory)})
    return takes_part + [
        {
            "operation": f"{row.kind} of {name} ranks" if name == row.axis else name,
            "ranks": int(row.ranks),
            "count": float(row.calls),
            "moved_gb": float(row.sent) / 1e9,
            "s": float(row.seconds(x.rates, x.local, c)),
        }
        for name, row in collectives(x)
        if np.any(row.a_micro_batch * row.calls + row.a_step * row.calls > 0) and row.ranks != 1
    ]


def step_seconds(t: StepTable, c: Coefficients) -> dict[str, Number]:
    """Seconds by part of one optimizer step; the parts add up to the step."""
    work = {part: t.sums[part].seconds(c) for part in PARTS}
    # Seconds of each axis in a micro-batch, and of all in a step beside its micro-batches; none is hidden.
    sent: dict[str, Number] = dict.fromkeys(("tensor", "context", "expert", "pipeline", "data"), 0.0)
    step_s: Number = 0.0
    for row in t.collectives.values():
        seconds = row.seconds(t.rates, t.local, c)
        sent[row.axis] = sent[row.axis] + seconds * row.a_micro_batch
        step_s = step_s + seconds * row.a_step
    # A context rank's sends hide behind attention to the previous rank's keys.
    context = np.maximum(0.0, sent["context"] - t.hides_context * work["attention"])
    tensor = sent["tensor"] * t.tensor_shown
    host_s = t.host_layers * c.host_s_per_layer + t.host_s
    late_s = t.late_ranks * c.pipeline_hop_s
    each = work["matmul"] + work["attention"] + work["elementwise"] + tensor + context + sent["expert"]

    def stage_s(part: Number, head: Number) -> Number:
        gpu_s = each * part + head
        longer_s = (gpu_s**_OVERLAP_POWER + (host_s * part) ** _OVERLAP_POWER) ** (1.0 / _OVERLAP_POWER)
        return np.maximum(longer_s, (host_s + late_s) * part)

    stage, with_head = stage_s(t.share, 0.0), stage_s(t.last_share, work["head"])

    # A stage that is nearly all arithmetic is slower at the power limit.
    arithmetic = work["matmul"] + work["attention"]
    dense = (arithmetic * t.last_share + work["head"]) / with_head
    over = np.maximum(0.0, dense - kernels.THROTTLED_FROM) / (1.0 - kernels.THROTTLED_FROM)
    slower = t.rates.throttling * over**kernels.THROTTLING_POWER
    stage = stage + slower * arithmetic * t.share
    with_head = with_head + slower * (arithmetic * t.last_share + work["head"])
    # The slowest stage sets the pace: the last, unless layers are spread with the head's weight.
    paced_by_last = with_head >= stage
    last = np.where(paced_by_last, with_head, stage)
    share = np.where(paced_by_last, t.last_share, t.share)
    head = np.where(paced_by_last, work["head"], 0.0)
    throttling = slower * (arithmetic * share + head)

    # 1F1B (arXiv:2104.04473, 2.2); interleaving divides the bubble. Sends hide unless slower than a stage.
    sends = sent["pipeline"] * np.where(t.stages > 2.0, 1.0, 0.5)
    held_up = (t.micro_batches - 1.0) * np.maximum(0.0, sends - last)
    bubble = (t.stages - 1.0) * (stage / t.virtual_stages + sent["pipeline"]) + held_up

    # A share of data ranks' communication always shows, and all that outlasts the computation.
    always, backward = t.data_shown, last * 2.0 / 3.0
    room = np.where(t.gathers_all_along > 0, last, backward)
    hidden = (1.0 - always) * sent["data"]
    shown = always * sent["data"] + np.maximum(0.0, hidden - room)
    left = np.maximum(0.0, backward - hidden)
    shown_a_step = always * step_s + np.maximum(0.0, (1.0 - always) * step_s - left)
    busy = t.micro_batches * share

    parts = {
        "matmul": work["matmul"] * busy,
        "attention": work["attention"] * busy,
        "elementwise": work["elementwise"] * busy + t.weights_s * t.micro_batches,
        "head": head * t.micro_batches,
        "throttling": throttling * t.micro_batches,
        "host": (last - throttling - each * share - head) * t.micro_batches + kernels.HOST_S_PER_STEP,
        "tensor_communication": tensor * busy,
        "context_communication": context * busy,
        "expert_communication": sent["expert"] * busy,
        "data_communication": shown * t.micro_batches + shown_a_step,
        "bubble": bubble,
        "optimizer": t.optimizer_s,
    }
    # Loader processes work while the GPU does; a step lasts at least as long as its samples take to prepare.
    return parts | {"input": np.maximum(0.0, t.load_s - sum(parts.values()))}


def stack(tables: Sequence[Any]) -> Any:
    """Join records of single configurations into one of arrays, an element a record; a row that one lacks is empty."""
    first = tables[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for table in tables for name in table)
        like = {name: next(table[name] for table in tables if name in table) for name in names}
        empty = {name: Collective(axis=row.axis, kind=row.kind) for name, row in like.items() if name not in PARTS}
        return {name: stack([table.get(name, empty.get(name)) for table in tables]) for name in names}
    if isinstance(first, str):
        return first
    if hasattr(first, "__dict__"):
        joined = copy(first)
        vars(joined).update({name: stack([vars(table)[name] for table in tables]) for name in vars(first)})
        return joined
    return np.array(tables, dtype=np.float64).reshape(-1)


def estimate_case(x: Case, coefficients: Coefficients) -> Estimates:
    """Estimate every layout of a case, in the shape that its columns broadcast to."""
    shape = np.broadcast_shapes(*map(np.shape, vars(x.grid).values()))
    parts_s = step_seconds(StepTable(x), coefficients)
    total_s = np.asarray(sum(parts_s.values()), dtype=np.float64)
    held = memory(x)
    peak_gib, nccl_gib = held.peak / GIB, held.nccl / GIB
    reserve_gib = {"fragmentation": FRAGMENTATION * peak_gib, "cuda_context": CONTEXT_BYTES / GIB, "nccl": nccl_gib}

    def full(value: Any) -> Any:
        return np.broadcast_to(value, shape)

    return Estimates(
        step_time_s=full(total_s),
        tokens_per_second=full(x.global_batch * x.recipe.seq_len / total_s),
        mfu=full(x.global_batch * model_flops_per_sample(x) / total_s / (x.gpus * x.rates.peak)),
        peak_memory_gib=full(peak_gib),
        p95_memory_gib=full(held.p95 / GIB),
        limit_gib=full(limit_bytes(x.rates.gpu_memory_bytes, held.nccl) / GIB),
        memory_gib={name: full(value / GIB) for name, value in held.parts.items()},
        reserve_gib={name: full(value) for name, value in reserve_gib.items()},
        time_s={name: full(value) for name, value in parts_s.items()},
    )
