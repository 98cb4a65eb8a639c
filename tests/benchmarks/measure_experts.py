"""Measure expert parallelism on the GPUs of one host.

``torchrun --nproc-per-node N -m tests.benchmarks.measure_experts OUT_FOLDER [--seconds 200] [--tiny]`` writes
``steps.csv`` (columns of measured_runs.csv): Mixtrals of measure_steps.py under FSDP2 whose mixture is the plain block
below, with each rank holding its share of the experts (tokens are exchanged by all-to-all, of the sizes that the router
asks for) or all of them. Timed as in measure_parallel.py. A run whose tokens are not exchanged computes the same on its
own tokens: the difference is the cost of the exchange.
"""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import distributed
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from tests.benchmarks.measure_parallel import Ranks, begin, steps, timed, write
from tests.benchmarks.measure_steps import FIELDS, SHAPES, Configuration, columns, llm, transformer

SHAPES |= {
    "mixtral-5b": ("llama", 12, 2048, 7168, 16, 8, 32000, 8, 2),
    "mixtral-6b": ("llama", 4, 4096, 14336, 32, 8, 32000, 8, 2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run on all GPUs.

    Attributes:
        spread: each rank holds its share of the experts; otherwise all of them.
        router: "learned" sends tokens where its scores say, "even" as many to each expert.
        exchanges: tokens are sent to their experts' ranks (else each rank's experts work on its own).
        block: "plain" is this script's, "transformers" the library's.
    """

    run: Configuration
    spread: bool = False
    router: str = "learned"
    exchanges: bool = True
    block: str = "plain"


def cases() -> list[Case]:
    """List the cases, the most useful first."""
    every = []
    for run in (
        llm("mixtral-5b", 2048, 4), llm("mixtral-6b", 2048, 8), llm("mixtral-1b", 2048, 8),
        llm("mixtral-5b", 2048, 8, "full"),
    ):  # fmt: skip
        every += [Case(run=run), Case(run=run, spread=True), Case(run=run, spread=True, router="even")]
        every.append(Case(run=run, spread=True, router="even", exchanges=False))
    loop = llm("mixtral-5b", 2048, 4, experts="eager")
    return [
        *every[:8],
        Case(run=llm("mixtral-5b", 2048, 4), block="transformers"),
        Case(run=loop, spread=True),
        *every[8:12],
        Case(run=loop),
        Case(run=llm("mixtral-1b", 2048, 8), block="transformers"),
        Case(run=llm("mixtral-6b", 4096, 1, grad_accum=2), spread=True),
        *every[12:],
    ]


class Experts(torch.nn.Module):
    """The experts of one rank: two products each, gate and up in one."""

    def __init__(self, count: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(count, hidden, 2 * ffn) * 0.02)
        self.down = torch.nn.Parameter(torch.randn(count, ffn, hidden) * 0.02)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, loop: bool) -> torch.Tensor:
        """Apply the experts to rows sorted by expert; ``counts`` of each."""
        if loop:
            parts: Any = torch.split(rows, counts.tolist())
            each = zip(parts, self.up, self.down, strict=True)
            return torch.cat([self.gated(part @ up) @ down for part, up, down in each])
        ends = counts.cumsum(0).to(torch.int32)
        inner = self.gated(torch._grouped_mm(rows, self.up, offs=ends))
        return torch._grouped_mm(inner, self.down, offs=ends)

    def gated(self, inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return functional.silu(gate) * up


class Mixture(torch.nn.Module):
    """Top-k router, exchange and experts; takes the place of Hugging Face's block."""

    def __init__(self, case: Case, hidden: int, ffn: int, group: distributed.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.case, self.count, self.used = case, SHAPES[case.run.model][7], SHAPES[case.run.model][8]
        self.ranks = group.size() if case.spread else 1
        self.router = torch.nn.Linear(hidden, self.count, bias=False)
        self.experts = Experts(self.count // self.ranks, hidden, ffn)
        self.fullest = torch.zeros(())  # rows of the fullest rank over the mean, the last time

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        scores = functional.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = scores.topk(self.used, dim=-1)
        if self.case.router == "even":
            chosen = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % self.count
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        rows = self.of_ranks(tokens[order // self.used], counts)
        rows = rows[order.argsort()].view(-1, self.used, tokens.shape[-1])
        return (rows * weights[..., None]).sum(1).view_as(hidden)

    def of_ranks(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Apply the experts of all ranks to rows sorted by expert."""
        loop = self.case.run.experts == "eager"
        if self.ranks == 1:
            return self.experts(rows, counts, loop)  # type: ignore[no-any-return]
        # Rows of each expert from each rank: the host must know the number before it can ask for them.
        theirs = torch.empty_like(counts)
        distributed.all_to_all_single(theirs, counts, group=self.group)
        sent, received = torch.stack([counts, theirs]).view(2, self.ranks, -1).sum(-1).tolist()
        self.fullest = sum(received) / (sum(sent) or 1)
        here = torch.arange(self.count // self.ranks, device=rows.device).repeat(self.ranks)
        order = here.repeat_interleave(theirs, output_size=sum(received)).argsort(stable=True)
        if self.case.exchanges:
            rows = all_to_all_single_autograd(rows, received, sent, self.group)
        rows = self.experts(rows[order], theirs.view(self.ranks, -1).sum(0), loop)[order.argsort()]
        return all_to_all_single_autograd(rows, sent, received, self.group) if self.case.exchanges else rows


@functools.cache
def meshes(device: str, world: int) -> tuple[Any, Any, Any]:
    """Make meshes of all ranks, of this rank, and of all for the exchange, apart from FSDP's gathers."""
    apart = init_device_mesh(device, (1, world), mesh_dim_names=("same", "expert"))
    return init_device_mesh(device, (world,)), apart["same"], apart["expert"]


def mixtral(case: Case, ranks: Ranks, scale: int) -> tuple[Any, int]:
    """Build a sharded model; count its parameters on all ranks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    run = case.run
    world, alone, expert = meshes(ranks.device, ranks.world)
    model = transformer(run, ranks.device, scale)
    if case.block == "plain":
        _, _, hidden, ffn, *_ = SHAPES[run.model]
        with torch.device(ranks.device):
            for layer in model.model.layers:
                layer.mlp = Mixture(case, hidden // scale, ffn // scale, expert.get_group())
    of_experts = sum(
        parameter.numel()
        for module in model.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if case.spread:
        parameters += (ranks.world - 1) * of_experts
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if case.spread:  # nobody else has them: FSDP of one rank, for its 16-bit copies
            fully_shard(layer.mlp.experts, mesh=alone, mp_policy=mixed)
        fully_shard(layer, mesh=world, mp_policy=mixed)
    fully_shard(model, mesh=world, mp_policy=mixed)
    return model, parameters


EXPERT_FIELDS = tuple(
    itertools.chain.from_iterable(
        {"pipeline_parallel": (name, "expert_parallel"), "attention": (name, "experts_implementation")}.get(
            name, (name,)
        )
        for name in FIELDS
    )
)


def measure(case: Case, ranks: Ranks, number: int) -> dict[str, Any]:
    """Measure one row; every rank runs this."""
    run, scale = case.run, 16 if ranks.tiny else 1
    torch.manual_seed(0)
    model, parameters = mixtral(case, ranks, scale)
    # One fused step takes tensors of one mesh.
    kinds: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        kinds.setdefault(parameter.device_mesh, []).append(parameter)
    optimizers = [torch.optim.AdamW(same, lr=1e-4, fused=not ranks.tiny) for same in kinds.values()]
    torch.manual_seed(1 + ranks.rank)
    vocab = SHAPES[run.model][6] // scale
    tokens = torch.randint(vocab, (run.grad_accum, run.micro_batch, run.seq_len // scale), device=ranks.device)

    def step() -> None:
        for batch in tokens:
            model(input_ids=batch, labels=batch).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    seconds, steps_measured, held = timed(step, ranks)
    fullest = [float(module.fullest) for module in model.modules() if isinstance(module, Mixture)]
    uneven = sum(ranks.agreed(each) for each in fullest) / max(1, len(fullest)) if case.spread else 0.0
    how = ["FSDP2", f"{case.block} block", "experts spread" if case.spread else "all experts on each rank"]
    if case.block == "plain":
        how.append(f"{case.router} router")
    if uneven:
        how.append(f"fullest rank {uneven:.3f} of the mean")
    if not case.exchanges:
        how.append("tokens not exchanged")
    samples = run.micro_batch * run.grad_accum * run.seq_len
    ranks.log(f"{run} {run.experts} {', '.join(how)}: {seconds * 1e3:.1f} ms, {held}")
    return columns(run) | held | {
        "row_id": f"h200-experts-{number:02}", "suite": "h200", "gpus": ranks.world, "gpus_per_node": ranks.world,
        "sharding": "zero3", "expert_parallel": ranks.world if case.spread else 1, "parameters": parameters,
        "experts_implementation": {"grouped_mm": "grouped", "eager": "loop"}[run.experts], "memory_kind": "allocated",
        "tokens_per_second_per_gpu": f"{samples / seconds:.7g}",
        "source": f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {', '.join(how)}, fused AdamW, "
        f"median of {steps_measured}: tests/benchmarks/measure_experts.py",
    }  # fmt: skip


def main() -> None:
    """Measure every configuration that time allows."""
    out, ranks, deadline = begin()
    write(out / "steps.csv", ranks, steps(cases(), measure, ranks, deadline), EXPERT_FIELDS)
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
