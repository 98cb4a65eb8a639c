"""Measure collectives and parallel training steps on the GPUs of one host.

``torchrun --nproc-per-node N -m tests.benchmarks.measure_parallel OUT_FOLDER [--seconds 200] [--tiny]`` writes
``collectives.csv``, ``overlap.csv`` and ``steps.csv`` (columns of measured_runs.csv). Models, settings and timing are
those of measure_steps.py; DDP under autocast, FSDP2 (``fully_shard`` a layer) with bf16 parameters and fp32 reduction,
tensor parallelism with DTensor under autocast. NVLink multicast is off where NCCL_NVLS_ENABLE=0 says so.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from tests.benchmarks.measure_steps import (
    FIELDS,
    SHAPES,
    Configuration,
    clear,
    columns,
    llm,
    log,
    memory,
    transformer,
)

cuda: Any = torch.cuda  # its events have no types
SIZES = [2**exponent for exponent in (16, 18, 20, 22, 24, 26, 28, 30)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """One run on all GPUs: tensor parallel, or data parallel (zero2 is FSDP2 that keeps gathered layers)."""

    run: Configuration
    sharding: str = "ddp"
    tensor: bool = False
    sequence_parallel: bool = False
    no_sync: bool = False


CONFIGURATIONS = [
    Parallel(run=llm("llama-410m", 2048, 8)),
    Parallel(run=llm("llama-410m", 2048, 8), no_sync=True),
    Parallel(run=llm("llama-1b", 2048, 4)),
    Parallel(run=llm("llama-1b", 2048, 4), no_sync=True),
    Parallel(run=llm("llama-410m", 2048, 8), sharding="zero3"),
    Parallel(run=llm("llama-410m", 512, 1), sharding="zero3"),
    Parallel(run=llm("llama-1b", 2048, 4), sharding="zero3"),
    Parallel(run=llm("llama-1b", 2048, 4), sharding="zero2"),
    Parallel(run=llm("llama-1b", 2048, 4, "full"), sharding="zero3"),
    Parallel(run=llm("llama-1b", 2048, 1, grad_accum=4), sharding="zero3"),
    Parallel(run=llm("llama-3b", 2048, 2), sharding="zero3"),
    Parallel(run=llm("llama-3b", 2048, 4, "full"), sharding="zero3"),
    Parallel(run=llm("llama-8b", 2048, 2, "full"), sharding="zero3"),
    Parallel(run=llm("llama-1b", 2048, 4), tensor=True),
    Parallel(run=llm("llama-3b", 2048, 4), tensor=True),
    Parallel(run=llm("llama-1b", 2048, 4), tensor=True, sequence_parallel=True),
    Parallel(run=llm("llama-1b", 2048, 4, compiled=True), sharding="zero3"),
    Parallel(run=llm("llama-3b", 2048, 4, compiled=True), sharding="zero3"),
    Parallel(run=llm("llama-410m", 2048, 8, compiled=True)),
    Parallel(run=llm("llama-1b", 2048, 4, compiled=True)),
    Parallel(run=llm("llama-8b", 2048, 1), sharding="zero3"),
    Parallel(run=llm("bert-large", 512, 8)),
    Parallel(run=llm("gpt2", 1024, 8)),
    Parallel(run=llm("gpt2", 1024, 8), sharding="zero3"),
]


class Ranks:
    """This process among the others."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = "cpu" if tiny else "cuda"
        if not tiny:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "gloo" if tiny else "nccl"
        distributed.init_process_group(backend, timeout=timedelta(seconds=90))

    def log(self, text: str) -> None:
        if self.rank == 0:
            log(text)

    def agreed(self, value: float) -> float:
        """Return the largest of all ranks' values: clocks differ, and ranks must stop together."""
        tensor = torch.tensor([value], device=self.device, dtype=torch.float64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return float(tensor)

    def seconds(self, call: Callable[[], object], repeats: int, batch: int) -> list[float]:
        """Measure the seconds of a call on this rank, each the mean of a batch."""
        for _ in range(3):
            call()
        measured = []
        for _ in range(repeats):
            if self.tiny:
                start = time.perf_counter()
                call()
                measured.append(time.perf_counter() - start)
                continue
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(batch):
                call()
            end.record()
            end.synchronize()
            measured.append(begin.elapsed_time(end) / 1e3 / batch)
        return measured


def write(path: Path, ranks: Ranks, rows: Iterator[dict[str, Any]], fields: tuple[str, ...]) -> None:
    """Write rows as they come; the first rank writes."""
    file = path.open("w", encoding="utf-8", newline="") if ranks.rank == 0 else None
    writer = csv.DictWriter(file, fields, lineterminator="\n") if file else None
    if writer:
        writer.writeheader()
    for row in rows:
        if writer and file:
            writer.writerow(row)
            file.flush()


COLLECTIVE_FIELDS = (
    "collective",
    "gpus",
    "bytes",
    "precision",
    "seconds",
    "iqr_s",
    "repeats",
    "algorithm_gb_per_s",
    "bus_gb_per_s",
)


def collectives(ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Measure collectives; ``bytes`` is a rank's larger buffer; bus bandwidth as in NCCL's tests."""
    world, other = ranks.world, (ranks.rank ^ 1)
    for size in SIZES[:2] if ranks.tiny else SIZES:
        full = torch.randn(size // 2, device=ranks.device, dtype=torch.bfloat16)
        full2, part = torch.empty_like(full), torch.randn(size // 2 // world, device=ranks.device, dtype=torch.bfloat16)

        def exchange(full: torch.Tensor = full, full2: torch.Tensor = full2) -> None:
            if ranks.rank % 2 == 0:
                distributed.send(full, other)
            else:
                distributed.recv(full2, other)

        def both_ways(full: torch.Tensor = full, full2: torch.Tensor = full2) -> None:
            sent = distributed.P2POp(distributed.isend, full, other), distributed.P2POp(distributed.irecv, full2, other)
            for work in distributed.batch_isend_irecv(list(sent)):
                work.wait()

        ring = (world - 1) / world
        cases: list[tuple[str, float, Callable[[], object]]] = [
            ("all-reduce", 2 * ring, partial(distributed.all_reduce, full)),
            ("all-gather", ring, partial(distributed.all_gather_into_tensor, full, part)),
            ("broadcast", 1.0, partial(distributed.broadcast, full, 0)),
            ("send", 1.0, exchange),
        ]
        if not ranks.tiny:
            cases += [
                ("reduce-scatter", ring, partial(distributed.reduce_scatter_tensor, part, full)),
                ("all-to-all", ring, partial(distributed.all_to_all_single, full2, full)),
                ("send and receive", 1.0, both_ways),
            ]
        for name, factor, call in cases:
            distributed.barrier()
            times = ranks.seconds(call, repeats=12, batch=max(2, min(50, 2**26 // size)))
            median = ranks.agreed(statistics.median(times))
            quartiles = statistics.quantiles(times, n=4)
            yield {
                "collective": name, "gpus": world, "bytes": size, "precision": "bf16", "seconds": f"{median:.4e}",
                "iqr_s": f"{quartiles[2] - quartiles[0]:.2e}", "repeats": len(times),
                "algorithm_gb_per_s": f"{size / median / 1e9:.4g}",
                "bus_gb_per_s": f"{factor * size / median / 1e9:.4g}",
            }  # fmt: skip
    ranks.log("collectives done")


OVERLAP_FIELDS = ("collective", "gpus", "bytes", "products", "product_s", "collective_s", "both_s", "product_slower")


def overlap(ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Measure products (bf16, 8192 x 4096 x 4096) on one stream while a collective of 256 MiB runs on another."""
    if ranks.tiny:
        return
    x, w = (torch.randn(size, 4096, device="cuda", dtype=torch.bfloat16) for size in (8192, 4096))
    y = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)
    full = torch.randn(2**27, device="cuda", dtype=torch.bfloat16)
    part = torch.randn(2**27 // ranks.world, device="cuda", dtype=torch.bfloat16)
    cases: dict[str, Callable[[], Any]] = {
        "all-reduce": partial(distributed.all_reduce, full, async_op=True),
        "all-gather": partial(distributed.all_gather_into_tensor, full, part, async_op=True),
        "reduce-scatter": partial(distributed.reduce_scatter_tensor, part, full, async_op=True),
    }
    products = 16

    def multiply() -> None:
        for _ in range(products):
            torch.mm(x, w.t(), out=y)

    def send(start: Callable[[], Any], meanwhile: Callable[[], object]) -> None:
        works = [start() for _ in range(6)]
        meanwhile()
        for work in works:
            work.wait()

    def multiply_and_mark(mark: Any) -> None:
        multiply()
        mark.record()

    ranks.seconds(multiply, 300, 1)  # to the clock of long work
    for name, start in cases.items():
        begin, inner, end = (cuda.Event(enable_timing=True) for _ in range(3))
        alone = statistics.median(ranks.seconds(multiply, 10, 1))
        sent = statistics.median(ranks.seconds(partial(send, start, lambda: None), 10, 1))
        both, inside = [], []
        for _ in range(10):
            distributed.barrier()
            begin.record()
            send(start, partial(multiply_and_mark, inner))
            end.record()
            end.synchronize()
            both.append(begin.elapsed_time(end) / 1e3)
            inside.append(begin.elapsed_time(inner) / 1e3)
        yield {
            "collective": f"6 x {name}", "gpus": ranks.world, "bytes": 2**28, "products": products,
            "product_s": f"{alone:.4e}", "collective_s": f"{sent:.4e}", "both_s": f"{statistics.median(both):.4e}",
            "product_slower": f"{statistics.median(inside) / alone:.3f}",
        }  # fmt: skip
    ranks.log("overlap done")


def shard(model: Any, case: Parallel, mesh: Any) -> Any:
    """Wrap a model for its kind of parallelism."""
    run = case.run
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    if case.tensor:
        split_tensors(model, mesh, case.sequence_parallel)
        return model
    if case.sharding == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
        if run.compiled:
            model = torch.compile(model)
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        if run.compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=case.sharding == "zero3")
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=case.sharding == "zero3")
    return model


def split_tensors(model: Any, mesh: Any, sequence_parallel: bool) -> None:
    """Split a Hugging Face Llama by tensor parallelism: columns, then rows; with sequence parallelism norms too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    out = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(output_layouts=out),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=out),
    }  # fmt: skip
    if sequence_parallel:
        plan |= {
            "input_layernorm": SequenceParallel(use_local_output=True),
            "post_attention_layernorm": SequenceParallel(use_local_output=True),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    top: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=out),
        "lm_head": ColwiseParallel(input_layouts=out, output_layouts=Replicate()),
    }
    if sequence_parallel:
        top["model.norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, top)


def timed(step: Callable[[], None], ranks: Ranks) -> tuple[float, int, dict[str, str]]:
    """Measure the seconds of a step on the slowest rank, the number of steps, and the most memory of any rank."""
    times: list[float] = []
    for least, least_s in ((3, 1.0), (6, 1.5)):  # warm-up, then the measured steps
        if times and not ranks.tiny:
            torch.cuda.reset_peak_memory_stats()
        times = []
        while True:
            distributed.barrier()
            if not ranks.tiny:
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if not ranks.tiny:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            taken = ranks.agreed(sum(times))
            # Steps of a second and more settle sooner.
            if ranks.tiny or (taken > least_s and len(times) >= (least if taken < 4 * least_s else least - 2)):
                break
    held = {name: f"{ranks.agreed(float(str(value))):.6g}" for name, value in memory().items()}
    return ranks.agreed(statistics.median(times)), len(times), held


def measure(case: Parallel, ranks: Ranks, number: int) -> dict[str, Any]:
    """Measure one row; every rank runs this."""
    run, scale = case.run, ((4 if case.tensor else 16) if ranks.tiny else 1)
    torch.manual_seed(0)
    mesh = init_device_mesh(ranks.device, (ranks.world,))
    model = transformer(run, ranks.device, scale)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model = shard(model, case, mesh)
    # A fused step takes no mixture of DTensors and plain tensors (norms that tensor parallelism leaves whole).
    kinds: dict[type, list[Any]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizers = [torch.optim.AdamW(same, lr=1e-4, fused=not ranks.tiny) for same in kinds.values()]
    torch.manual_seed(1 if case.tensor else 1 + ranks.rank)
    seq_len, vocab = run.seq_len // scale, SHAPES[run.model][6] // scale
    tokens = torch.randint(vocab, (run.grad_accum, run.micro_batch, seq_len), device=ranks.device)
    sharded = case.sharding != "ddp"
    more = {"position_ids": torch.arange(seq_len, device=ranks.device)[None]} if case.sequence_parallel else {}

    def step() -> None:
        for index, batch in enumerate(tokens):
            last = index == len(tokens) - 1
            quiet = case.no_sync or (not last and case.sharding == "ddp" and not case.tensor)
            with (
                model.no_sync() if quiet else contextlib.nullcontext(),
                torch.autocast(ranks.device, torch.bfloat16, enabled=not sharded),
            ):
                loss = model(input_ids=batch, labels=batch, **more).loss
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    seconds, steps_measured, held = timed(step, ranks)
    tensor = ranks.world if case.tensor else 1
    samples = run.micro_batch * run.grad_accum * run.seq_len * ranks.world // tensor
    how = {"ddp": "DDP, autocast", "zero2": "FSDP2 without resharding", "zero3": "FSDP2"}[case.sharding]
    how = "DTensor tensor parallelism, autocast" if case.tensor else how
    how += ", gradients not sent (no_sync)" if case.no_sync else ""
    ranks.log(
        f"{run} {case.sharding} tensor {tensor}{' sequence' * case.sequence_parallel}"
        f"{' no_sync' * case.no_sync}: {seconds * 1e3:.1f} ms, {held}"
    )
    return columns(run) | held | {
        "row_id": f"h200-parallel-{number:02}", "suite": "h200", "gpus": ranks.world, "gpus_per_node": ranks.world,
        "sharding": case.sharding, "tensor_parallel": tensor,
        "sequence_parallel": int(case.sequence_parallel), "parameters": parameters, "memory_kind": "allocated",
        "tokens_per_second_per_gpu": f"{samples / seconds / ranks.world:.7g}",
        "source": f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {how}, fused AdamW, median of "
        f"{steps_measured}: tests/benchmarks/measure_parallel.py",
    }  # fmt: skip


Case = TypeVar("Case")


def steps(
    cases: Iterable[Case], measure: Callable[[Case, Ranks, int], dict[str, Any]], ranks: Ranks, deadline: float
) -> Iterator[dict[str, Any]]:
    """Measure the rows of ``cases`` as far as the time goes; report and skip a case that fails."""
    for number, case in enumerate(cases):
        if ranks.agreed(time.monotonic() - deadline) > 0:
            ranks.log(f"out of time before {case}")
            return
        try:
            yield measure(case, ranks, number)
        except (RuntimeError, TypeError, ValueError, AttributeError, ImportError, AssertionError) as error:
            ranks.log(f"{case}: {type(error).__name__} {' '.join(str(error).split())[:600]}")
            if not ranks.tiny and "out of memory" in str(error):
                raise
        clear()


def begin() -> tuple[Path, Ranks, float]:
    """Return the output folder, this process's ranks, and the time after which no configuration begins."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--tiny", action="store_true", help="Check this script on the CPU.")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    return options.out, Ranks(options.tiny), deadline


def main() -> None:
    """Measure collectives, overlap, and every configuration that time allows."""
    out, ranks, deadline = begin()
    ranks.log(f"torch {torch.__version__}, {ranks.world} ranks, NCCL {None if ranks.tiny else cuda.nccl.version()}")
    write(out / "collectives.csv", ranks, collectives(ranks), COLLECTIVE_FIELDS)
    write(out / "overlap.csv", ranks, overlap(ranks), OVERLAP_FIELDS)
    write(out / "steps.csv", ranks, steps(CONFIGURATIONS, measure, ranks, deadline), FIELDS)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
