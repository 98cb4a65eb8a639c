"""Measure the host time of a tensor-parallel collective: ``measure_collective_hosts OUT.csv``, run by torchrun.

Needs N GPUs of one host and transformers. A collective is made as Megatron makes it: an autograd function that reduces
forward and passes on backward, then one that does the reverse (megatron/core/tensor_parallel/mappings.py). The host's
time to issue them is measured on buffers so small that the host never waits; beside it, in the same process, a layer of
GPT-2 so narrow that the GPU waits (measure_hosts). Rank 0 writes a row a repetition: seconds of a layer, of a
collective, and of a collective without its functions.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.benchmarks.measure_hosts import FEW, MANY, seconds_by_layers
from tests.benchmarks.measure_steps import Configuration, log

PAIRS, TIMES, REPETITIONS = 20, 50, 5


class Reduced(torch.autograd.Function):
    """Sum over ranks forward, pass on backward; without ``calls``, do nothing."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, calls: bool) -> torch.Tensor:
        if calls:
            distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Copied(torch.autograd.Function):
    """Pass on forward, sum over ranks backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, calls: bool) -> torch.Tensor:
        context.calls = calls
        return x

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.calls:
            distributed.all_reduce(gradients[0])
        return gradients[0], None


def seconds_to_issue(device: str, times: int, functions: bool, calls: bool) -> float:
    """Measure the host seconds of PAIRS pairs forward and backward: median of ``times``, after as many to warm up."""
    leaf = torch.ones(8, 64, device=device, requires_grad=True)
    seconds: list[float] = []
    for _ in range(2 * times):
        distributed.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        x = leaf
        for _ in range(PAIRS):
            x = x * 1.0
            x = Reduced.apply(Copied.apply(x, calls) * 1.0, calls) if functions else x * 1.0  # type: ignore[no-untyped-call]
        x.sum().backward()  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - start)
        leaf.grad = None
    return statistics.median(seconds[times:])


def main() -> None:
    """Measure, on every rank; rank 0 writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, once")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    times = 2 if options.tiny else TIMES
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("gloo" if options.tiny else "nccl")
    rows = []
    base = Configuration(model="", micro_batch=1, seq_len=8)
    for _ in range(1 if options.tiny else REPETITIONS):
        few, many = (statistics.median(each) for each in seconds_by_layers(base, "decoder", device))
        without = seconds_to_issue(device, times, functions=False, calls=False)
        passed = seconds_to_issue(device, times, functions=True, calls=False)
        reduced = seconds_to_issue(device, times, functions=True, calls=True)
        rows.append(
            {
                "ranks": distributed.get_world_size(),
                "layer_s": f"{(many - few) / (MANY - FEW):.4e}",
                "collective_s": f"{(reduced - without) / (2 * PAIRS):.4e}",
                "call_s": f"{(reduced - passed) / (2 * PAIRS):.4e}",
                "torch": torch.__version__,
                "gpu": "none" if options.tiny else torch.cuda.get_device_name(),
            }
        )
    if distributed.get_rank() == 0:
        with options.out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        log("\n".join(str(row) for row in rows))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
