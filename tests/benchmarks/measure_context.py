"""Measure context parallelism on the GPUs of one host.

``torchrun --nproc-per-node N -m tests.benchmarks.measure_context OUT_FOLDER [--seconds 200] [--tiny]`` writes
``ring_attention.csv`` (one layer's attention, with and without its exchange) and ``steps.csv`` (columns of
measured_runs.csv): Llamas of measure_steps.py whose sequence is split by torch's ``context_parallel`` (two pieces on
each rank, so that a causal mask loads all alike), beside runs of whole sequences on each rank. Steps are timed as in
measure_parallel.py. A run whose keys and values are not sent computes the same on its own: the difference is the
cost of sending. ``--tiny`` checks all but the ring, whose kernels need a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.benchmarks.measure_parallel import Parallel, Ranks, begin, shard, steps, timed, write
from tests.benchmarks.measure_steps import FIELDS, SHAPES, Configuration, columns, llm, transformer

KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
RING: Any = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run on all GPUs, which split each sequence or (``ring`` "") have sequences of their own.

    ``ring`` is how keys and values go round: "allgather" once, or from neighbour to neighbour ("alltoall"); "none"
    keeps them.
    """

    run: Configuration
    ring: str = "allgather"
    sharding: str = "zero3"
    kernel: str = "cudnn"


def cases() -> list[Case]:
    """List the cases, the most useful first."""
    middle, long, short = llm("llama-1b", 32768, 1), llm("llama-1b", 65536, 1, "full"), llm("llama-1b", 16384, 1)
    return [
        *[Case(run=middle, ring=ring) for ring in ("allgather", "none", "alltoall")],
        Case(run=short, ring=""),
        *[Case(run=long, ring=ring) for ring in ("allgather", "none")],
        Case(run=llm("llama-1b", 32768, 1, "full"), ring=""),
        *[Case(run=short, ring=ring) for ring in ("allgather", "none")],
        Case(run=llm("llama-1b", 8192, 1), ring=""),
        Case(run=short, sharding="ddp"),
        Case(run=llm("llama-1b", 8192, 1), ring="", sharding="ddp"),
        Case(run=llm("llama-3b", 32768, 1, "full")),
        Case(run=llm("llama-3b", 16384, 1, "full"), ring=""),
        Case(run=llm("llama-410m", 32768, 1)),
        Case(run=llm("llama-410m", 16384, 1), ring=""),
        Case(run=llm("llama-1b", 32768, 1, "full")),
        Case(run=middle, kernel="flash"),
        Case(run=long, ring="alltoall"),
    ]


class Kept:
    """Stand in for the exchange of keys and values, and keep them."""

    def __init__(self, *_: object, **__: object) -> None:
        self.buffer: torch.Tensor | None = None

    def exchange_buffers(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer

    def next_buffer(self) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer


@contextlib.contextmanager
def splitting(ring: str, mesh: Any, buffers: list[torch.Tensor], tiny: bool) -> Iterator[None]:
    """Split the buffers' sequences (dimension 1) over the ranks, with the ring's attention."""
    if not ring:
        yield
        return
    RING.set_rotate_method("alltoall" if ring == "alltoall" else "allgather")
    whole, dispatch = RING._create_rotater, RING._enable_context_parallel_dispatcher_impl
    if ring == "none":
        RING._create_rotater = Kept
    if tiny:  # the ring has no kernel for CPUs
        RING._enable_context_parallel_dispatcher_impl = lambda **_: None
    try:
        with RING.context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            yield
    finally:
        RING._create_rotater, RING._enable_context_parallel_dispatcher_impl = whole, dispatch


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str) -> torch.Tensor:
    """Compute causal attention of (batch, heads, tokens, width), by one kernel where there is a choice."""
    chosen = sdpa_kernel(KERNELS[kernel]) if query.is_cuda else contextlib.nullcontext()
    with chosen:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )


def use_attention(model: Any, kernel: str) -> None:
    """Have a Hugging Face model call ``attend`` and make no mask: the ring takes none."""
    transformers: Any = importlib.import_module("transformers")

    def attention(
        _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
    ) -> tuple[torch.Tensor, None]:
        # Under autocast rotary positions leave queries and keys in 32 bits.
        out = attend(query.to(value.dtype), key.to(value.dtype), value, kernel)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("measured", attention)
    model.config._attn_implementation = "measured"


ATTENTION_FIELDS = (
    "seq_len", "heads", "kv_heads", "head_dim", "kernel", "ring", "ranks", "forward_s", "forward_and_backward_s",
    "largest_error",
)  # fmt: skip


def ring_attention(ranks: Ranks, usable: set[str]) -> Iterator[dict[str, Any]]:
    """Measure one sequence's attention on one rank alone (``ring`` empty), and split over all with each ring.

    Adds to ``usable`` the kernels whose ring gives the result of one rank.
    """
    mesh = init_device_mesh(ranks.device, (ranks.world,))
    for seq_len, heads, kv_heads, dim, kernel in () if ranks.tiny else (
        (32768, 32, 8, 64, "cudnn"), (32768, 32, 8, 64, "flash"), (16384, 32, 8, 64, "cudnn"),
        (65536, 32, 8, 64, "cudnn"), (32768, 32, 8, 128, "cudnn"),
    ):  # fmt: skip
        torch.manual_seed(0)
        # Sequences in dimension 1, as the models' buffers.
        whole = [
            torch.randn(1, seq_len, count, dim, device=ranks.device, dtype=torch.bfloat16)
            for count in (heads, kv_heads, kv_heads, heads)
        ]
        expected: list[torch.Tensor] = []
        for ring in ("", "allgather", "alltoall", "none"):
            parts, wanted = ([tensor.clone() for tensor in tensors] for tensors in (whole, expected))
            try:
                with splitting(ring, mesh, [*parts, *wanted], tiny=False):
                    q, k, v = (part.detach().transpose(1, 2).requires_grad_() for part in parts[:3])
                    up = parts[3].transpose(1, 2)

                    def forward(q: Any = q, k: Any = k, v: Any = v, kernel: str = kernel) -> torch.Tensor:
                        return attend(q, k, v, kernel)

                    def both(q: Any = q, k: Any = k, v: Any = v, up: Any = up, kernel: str = kernel) -> Any:
                        return torch.autograd.grad(attend(q, k, v, kernel), (q, k, v), up)

                    tensors = [tensor.transpose(1, 2).contiguous() for tensor in (forward().detach(), *both())]
                    distances = [float((a - b).norm() / b.norm()) for a, b in zip(tensors, wanted, strict=False)]
                    error = ranks.agreed(max(distances, default=0.0))
                    batch = max(1, 2**17 // seq_len)
                    forward_s, both_s = (
                        ranks.agreed(statistics.median(ranks.seconds(call, repeats=6, batch=batch)))
                        for call in (forward, both)
                    )
            except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as failure:
                ranks.log(f"attention {seq_len} {kernel} {ring}: {' '.join(str(failure).split())[:400]}")
                continue
            expected = expected or tensors
            sends = ring in ("allgather", "alltoall")
            if sends and error < 0.02:  # two roundings to bf16
                usable.add(kernel)
            yield {
                "seq_len": seq_len, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "kernel": kernel,
                "ring": ring, "ranks": ranks.world if ring else 1, "forward_s": f"{forward_s:.4e}",
                "forward_and_backward_s": f"{both_s:.4e}", "largest_error": f"{error:.2e}" if sends else "",
            }  # fmt: skip
            ranks.log(f"attention {seq_len} {dim} {kernel} {ring}: {forward_s:.3e} {both_s:.3e} error {error:.1e}")


CONTEXT_FIELDS = tuple(
    itertools.chain.from_iterable(
        (name, "context_parallel") if name == "pipeline_parallel" else (name,) for name in FIELDS
    )
)


def measure(case: Case, ranks: Ranks, number: int) -> dict[str, Any]:
    """Measure one row; every rank runs this."""
    run, scale = case.run, 16 if ranks.tiny else 1
    torch.manual_seed(0)
    mesh = init_device_mesh(ranks.device, (ranks.world,))
    model = transformer(run, ranks.device, scale)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    use_attention(model, case.kernel)
    model = shard(model, Parallel(run=run, sharding=case.sharding), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not ranks.tiny)
    torch.manual_seed(1 if case.ring else 1 + ranks.rank)
    vocab = SHAPES[run.model][6] // scale
    ids = torch.randint(vocab, (run.micro_batch, run.seq_len // scale), device=ranks.device)
    positions = torch.arange(ids.shape[1], device=ranks.device).expand_as(ids).contiguous()

    def step() -> None:
        buffers = [ids.clone(), ids.roll(-1, 1), positions.clone()]
        with splitting(case.ring, mesh, buffers, ranks.tiny):
            tokens, following, places = buffers
            with torch.autocast(ranks.device, torch.bfloat16, enabled=case.sharding == "ddp"):
                # Labels shifted before they are split: the next token may be another rank's.
                loss = model(input_ids=tokens, position_ids=places, labels=tokens, shift_labels=following).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, steps_measured, held = timed(step, ranks)
    context = ranks.world if case.ring else 1
    samples = run.micro_batch * run.seq_len * ranks.world // context
    how = [{"ddp": "DDP, autocast", "zero3": "FSDP2"}[case.sharding], f"{case.kernel} attention"]
    if case.ring:
        how.append({"none": "keys and values not sent"}.get(case.ring, f"context_parallel, {case.ring}"))
    ranks.log(f"{run} {case.sharding} {case.kernel} ring {case.ring or '-'}: {seconds * 1e3:.1f} ms, {held}")
    return columns(run) | held | {
        "row_id": f"h200-context-{number:02}", "suite": "h200", "gpus": ranks.world, "gpus_per_node": ranks.world,
        "sharding": case.sharding, "context_parallel": context, "parameters": parameters, "memory_kind": "allocated",
        "tokens_per_second_per_gpu": f"{samples / seconds / ranks.world:.7g}",
        "source": f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {', '.join(how)}, fused AdamW, "
        f"median of {steps_measured}: tests/benchmarks/measure_context.py",
    }  # fmt: skip


def usable_cases(ranks: Ranks, usable: set[str]) -> Iterator[Case]:
    """List the cases that can run; a ring takes another kernel where its own does not."""
    for case in cases():
        if case.ring and case.kernel not in usable and not ranks.tiny:
            case = replace(case, kernel=next(iter(usable), "none"))
        yield case


def main() -> None:
    """Measure attention, then every configuration that time allows."""
    out, ranks, deadline = begin()
    usable: set[str] = set()
    write(out / "ring_attention.csv", ranks, ring_attention(ranks, usable), ATTENTION_FIELDS)
    write(out / "steps.csv", ranks, steps(usable_cases(ranks, usable), measure, ranks, deadline), CONTEXT_FIELDS)
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
