"""Cost of a checkpoint of SpotTolerantRun.

    torchrun --nproc-per-node 2 -m tests.benchmarks.measure_checkpoint FOLDER [--modes ddp fsdp] [--saves 3] [--fused]

A Llama of 1.2e9 parameters (fp32, AdamW: 13.5 GiB of state) trains with DDP and with FSDP2. Prints one JSON object a
mode: seconds that all steps of the window after a save took longer than the median before it (largest over the ranks),
the same over windows without a save, time in the call, time to a durable checkpoint beside writing the same bytes from
page-locked memory, and time to load and verify beside reading the same bytes past the page cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bootstrap.training import SpotTolerantRun, Watcher
from bootstrap.training.loading import Resume
from bootstrap.training.notices import Notice

BLOCK_BYTES = 16 * 2**20
WARM_UP = 25


class Bench:
    """One model in one mode, with the loop that every path is measured in."""

    def __init__(self, mode: str, options: argparse.Namespace, device: torch.device) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

        if not options.read_in_forward:
            # Reads a value of the GPU in each forward pass, behind the copies to the host that were issued before.
            vars(masking_utils)["find_packed_sequence_indices"] = lambda *_, **__: None
        self.mode, self.options, self.device = mode, options, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        size: dict[str, Any] = (
            {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "intermediate_size": 64}
            if options.tiny
            else {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": options.layers,
                  "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5504}
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            inner = LlamaForCausalLM(LlamaConfig(**size, use_cache=False))
        self.model: nn.Module = inner
        if mode == "fsdp":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in inner.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(inner, mp_policy=policy)
        else:
            ids = [device.index] if device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(inner, device_ids=ids, gradient_as_bucket_view=True)
        self.inner = inner
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=options.fused or None)
        shape = (2, 16) if options.tiny else (options.batch, 2048)
        self.ids = torch.randint(0, size["vocab_size"], shape, device=device)
        self.step()  # makes the optimizer's states

    def step(self) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mode == "ddp"):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def extra_seconds(
        self, steps: Iterator[Any], save: Callable[[], float], durable: Callable[[], float | None], saves: int
    ) -> dict[str, Any]:
        """Run the loop; ``save`` begins a save and gives its blocking seconds, ``durable`` the seconds it took."""
        window = self.options.window
        walls: list[float] = []
        slower: list[list[float]] = []
        rows: dict[str, list[float]] = {"extra_s": [], "no_save_s": [], "blocked_s": [], "durable_s": []}
        begun: int | None = None
        base = 0.0
        last = time.perf_counter()
        for _ in steps:
            if begun is None and len(walls) >= WARM_UP + window:
                rows["blocked_s"].append(save())
                begun = len(walls)
            self.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            walls.append(now - last)
            last = now
            if begun is not None and len(walls) >= begun + window:
                took = durable()
                done = torch.tensor([1 if took is not None else 0], device=self.device)
                dist.all_reduce(done, op=dist.ReduceOp.MIN)
                last = time.perf_counter()
                if not done.item():
                    continue
                assert took is not None
                base = statistics.median(walls[begun - window : begun])
                rows["durable_s"].append(took)
                rows["extra_s"].append(sum(wall - base for wall in walls[begun : begun + window]))
                slower.append([round(1e3 * (wall - base), 1) for wall in walls[begun:]])
                rows["no_save_s"].append(sum(wall - base for wall in walls[begun - window : begun]))
                walls, begun = [], None
                if len(rows["extra_s"]) == saves:
                    break
        largest = {}
        for name, values in rows.items():
            tensor = torch.tensor(values, device=self.device)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            largest[name] = [round(value, 4) for value in tensor.tolist()]
        return {**largest, "step_s": round(base, 4), "window_steps": window, "slower_ms_rank_0": slower}


def ours(bench: Bench, folder: Path) -> dict[str, Any]:
    """SpotTolerantRun itself, saving on a notice."""
    watcher = Watcher(None, signals=False)
    run = SpotTolerantRun(
        bench.model, bench.optimizer, dataset_size=10_000, global_batch=bench.world, store=str(folder),
        checkpoint_interval_s=1e9, keep=1, watcher=watcher,
    )  # fmt: skip
    saver, share = run._saver, run._share
    times: dict[str, float] = {"begun": 0.0, "blocked": 0.0, "end_step": 0.0, "steps": 0.0}
    begin, end_step, prepare = saver.begin, run._end_step, share.prepare

    def timed_begin(step: int) -> None:
        times["begun"] = time.perf_counter()
        begin(step)
        times["blocked"] = time.perf_counter() - times["begun"]

    def timed_end_step(*, is_last: bool) -> None:
        started, saves = time.perf_counter(), saver._saves
        end_step(is_last=is_last)
        if saver._saves == saves and not saver.is_pending:
            times["end_step"] += time.perf_counter() - started
            times["steps"] += 1

    def timed_prepare() -> None:
        started = time.perf_counter()
        prepare()
        times["prepare"] = time.perf_counter() - started

    saver.begin, run._end_step, share.prepare = timed_begin, timed_end_step, timed_prepare  # type: ignore[method-assign]
    committed: list[float] = []
    commit = run._checkpoints.commit

    def timed_commit(prefix: str, data: bytes) -> None:
        commit(prefix, data)
        committed.append(time.perf_counter() - times["begun"])

    run._checkpoints.commit = timed_commit  # type: ignore[method-assign]
    state: dict[str, int | None] = {"saved": None}

    def save() -> float:
        state["saved"] = saver.saved_step
        watcher.save_notice = Notice(source="benchmark", detail="")
        return 0.0

    def durable() -> float | None:
        if saver.saved_step == state["saved"]:
            return None
        return committed[-1] if bench.rank == 0 else 0.0

    blocked: list[float] = []

    def durable_and_note() -> float | None:
        took = durable()
        if took is not None:
            blocked.append(times["blocked"])
        return took

    with run:
        result = bench.extra_seconds(run.steps(10**9), save, durable_and_note, bench.options.saves)
        saver.join_pruner()
    result["blocked_s"] = [round(value, 4) for value in blocked]
    result["prepare_s"] = round(times["prepare"], 3)
    result["end_step_ms"] = round(1e3 * times["end_step"] / max(1, times["steps"]), 4)
    result["share_gib"] = round(share.buffer.nbytes / 2**30, 3)
    result["pinned"] = share.buffer.is_pinned()
    result["raw_write_s"] = raw_write(bench, folder, share.buffer)
    return result


def raw_write(bench: Bench, folder: Path, buffer: torch.Tensor) -> list[float]:
    """Seconds to write the same bytes with four threads a rank, past the page cache, and fsync."""
    seconds = []
    for number in range(2):
        path = folder / f"raw-{bench.rank}-{number}"
        memory = memoryview(buffer.numpy())  # type: ignore[arg-type]
        whole = len(memory) // 4096 * 4096
        dist.barrier()
        started = time.perf_counter()
        direct = os.O_DIRECT if buffer.is_pinned() else 0  # which needs aligned memory
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | direct)

        def block(start: int, descriptor: int = descriptor, memory: memoryview = memory, whole: int = whole) -> None:
            os.pwrite(descriptor, memory[start : min(start + BLOCK_BYTES, whole)], start)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(block, range(0, whole, BLOCK_BYTES)))
        os.fsync(descriptor)
        os.close(descriptor)
        dist.barrier()
        seconds.append(round(time.perf_counter() - started, 4))
        path.unlink()
    return seconds


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def load(bench: Bench, folder: Path) -> dict[str, Any]:
    """Resume from the newest checkpoint, and read the same files without verifying them."""
    seconds: dict[str, list[float]] = {"load_s": [], "read_s": []}
    newest = Resume.newest

    def timed(resume: Resume) -> Any:
        forget(folder)
        dist.barrier()
        started = time.perf_counter()
        resumed = newest(resume)
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds["load_s"].append(round(time.perf_counter() - started, 4))
        assert resumed is not None
        return resumed

    Resume.newest = timed  # type: ignore[assignment,method-assign]
    try:
        for _ in range(bench.options.loads):
            run = SpotTolerantRun(
                bench.model, bench.optimizer, dataset_size=10_000, global_batch=bench.world, store=str(folder),
                watcher=Watcher(None, signals=False),
            )  # fmt: skip
            with run:
                buffer = run._share.buffer
            path = next(folder.glob(f"step-*/rank-{bench.rank:05d}.bin"))
            memory = memoryview(buffer.numpy())  # type: ignore[arg-type]
            forget(folder)
            dist.barrier()
            started = time.perf_counter()
            descriptor = os.open(path, os.O_RDONLY)
            size = min(len(memory), os.fstat(descriptor).st_size)

            def block(start: int, descriptor: int = descriptor, memory: memoryview = memory, size: int = size) -> None:
                os.preadv(descriptor, [memory[start : min(start + BLOCK_BYTES, size)]], start)

            with ThreadPoolExecutor(16) as threads:
                list(threads.map(block, range(0, size, BLOCK_BYTES)))
            os.close(descriptor)
            dist.barrier()
            seconds["read_s"].append(round(time.perf_counter() - started, 4))
            del run, buffer, memory
    finally:
        Resume.newest = newest  # type: ignore[method-assign]
    return seconds


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--modes", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--loads", type=int, default=1)
    parser.add_argument("--window", type=int, default=30, help="steps that a save may make longer")
    parser.add_argument("--layers", type=int, default=22, help="9 with --batch 10: one GPU as one rank of two")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--read-in-forward", action="store_true", help="leave the mask's read of the GPU in the model")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True), which leaks with FSDP2")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {os.environ.get('RANK', '0')} %(message)s")
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")

    def say(phase: str, result: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print("RESULT", json.dumps({"phase": phase, "t": round(time.monotonic() - began, 1), **result}), flush=True)

    began = time.monotonic()
    for mode in options.modes:
        folder = options.folder / mode
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(mode, options, device)
        parameters = sum(parameter.numel() for parameter in bench.inner.parameters())
        facts = {
            "mode": mode, "world_size": dist.get_world_size(), "state_gib": round(parameters * 12 / 2**30, 2),
            "device": torch.cuda.get_device_name() if use_cuda else "cpu", "torch": torch.__version__,
        }  # fmt: skip
        say("ours", {**facts, **ours(bench, folder)})
        say("load", {**facts, **load(bench, folder)})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        del bench
        gc.collect()
        if use_cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
