"""Measure loss and speed of DDP with compressed gradients over a slow link between two ranks on this machine's CPU.

``python -m tests.benchmarks.measure_slow_link OUT.csv [--mbit-per-s 100] [--steps 200]``, as root: each rank runs in a
network namespace of its own, and ``tc`` (token bucket filter) throttles the link between them. The model is a small GPT
over the bytes of Python's own library; every compression starts from the same weights and sees the same samples.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.trainer.hooks import compress_gradients

COMPRESSIONS = ("none", "bf16", "fp16", "powersgd-1", "powersgd-4")
WIDTH, LAYERS, LENGTH, BATCH = 256, 4, 32, 4
NAMESPACES = ("gpufleet-link-0", "gpufleet-link-1")
ADDRESSES = ("10.199.7.1", "10.199.7.2")


class Gpt(nn.Module):
    """Decoder over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.place.weight
        logits: torch.Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


def corpus() -> torch.Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batch_of(data: torch.Tensor, seed: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(first, last - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def run(compression: str, data: torch.Tensor, steps: int, rank: int) -> dict[str, Any]:
    """Train, and measure step time, all-reduce included, and the loss on held-out bytes."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(), gradient_as_bucket_view=True)
    compress_gradients(model, compression, precision="fp32", steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    held_out = len(data) * 9 // 10
    seconds = []
    for step in range(steps):
        batch = batch_of(data, 2 * step + rank, 0, held_out)
        dist.barrier()
        start = time.perf_counter()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        losses = [float(loss_of(model.module, batch_of(data, seed, held_out, len(data)))) for seed in range(50)]
    with model.no_sync():
        alone = []
        for step in range(20):
            start = time.perf_counter()
            loss_of(model, batch_of(data, step, 0, held_out)).backward()  # type: ignore[no-untyped-call]
            alone.append(time.perf_counter() - start)
    return {
        "compression": compression,
        "step_s": f"{statistics.median(seconds[-steps // 2 :]):.4f}",
        "backward_alone_s": f"{statistics.median(alone):.4f}",
        "held_out_loss": f"{statistics.mean(losses):.4f}",
    }


def worker(out: Path, options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, data, rows = dist.get_rank(), corpus(), []
    for compression in COMPRESSIONS:
        rows.append(run(compression, data, options.steps, rank))
        if rank == 0:
            sys.stderr.write(f"{rows[-1]}\n")
    if rank == 0:
        facts = {
            "mbit_per_s": options.mbit_per_s,
            "steps": options.steps,
            "parameters": sum(parameter.numel() for parameter in Gpt().parameters()),
            "source": f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {os.cpu_count()} CPU cores: "
            "tests/benchmarks/measure_slow_link.py",
        }
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], *facts])
            writer.writeheader()
            writer.writerows(row | facts for row in rows)
    dist.destroy_process_group()


def call(command: str) -> None:
    subprocess.run(command.split(), check=True)


def main() -> None:
    """Lay the link, start both ranks in their namespaces, and take the link away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mbit-per-s", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options.out, options)
        return
    try:
        for namespace in NAMESPACES:
            call(f"ip netns add {namespace}")
        call(f"ip link add veth0 netns {NAMESPACES[0]} type veth peer name veth0 netns {NAMESPACES[1]}")
        for namespace, address in zip(NAMESPACES, ADDRESSES, strict=True):
            call(f"ip -n {namespace} addr add {address}/24 dev veth0")
            for device in ("lo", "veth0"):
                call(f"ip -n {namespace} link set {device} up")
            limit = f"rate {options.mbit_per_s}mbit burst 256kb latency 100ms"
            call(f"tc -n {namespace} qdisc add dev veth0 root tbf {limit}")
        environment = {**os.environ, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        environment |= {"GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-m", "tests.benchmarks.measure_slow_link", *sys.argv[1:]]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", namespace, *arguments], env={**environment, "RANK": str(rank)})
            for rank, namespace in enumerate(NAMESPACES)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
    finally:
        for namespace in NAMESPACES:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


if __name__ == "__main__":
    main()
