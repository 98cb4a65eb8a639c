"""Cost of agreement, watcher, heartbeat and ledger in a step: ``python -m tests.benchmarks.measure_runtime OUT.jsonl``.

Two CPU processes (gloo) take steps that sleep, as a host does that waits for its GPU; blocks of steps without and with
SpotTolerantRun alternate. One JSON line a pair and rank, milliseconds a step:

    bare_cpu, run_cpu    processor time of all threads of the process, without and with the run
    call_cpu             of it, the main thread's between two steps: what training itself waits for on an idle machine
    call                 the same in wall time; more than call_cpu by other programs' turns on the processors
    watcher_cpu          processor time of the node's own watcher process, for all ranks

``share`` is (run_cpu - bare_cpu) / step: an upper bound on what a step takes longer, as threads run beside the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bootstrap.training import SpotTolerantRun
from bootstrap.training.leaving import end_process
from examples.local_imds import LocalImds

# Compilation, cadence and first ledger lines settle before.
WARMUP_STEPS = 20


def measure(steps: Iterator[int], step_s: float) -> dict[str, float]:
    """Milliseconds a step after the warm-up, until the last step but one."""
    calls: list[tuple[float, float]] = []
    began = last = (0.0, 0.0)
    while True:
        before = time.perf_counter(), time.thread_time()
        step = next(steps, None)
        calls.append((time.perf_counter() - before[0], time.thread_time() - before[1]))
        if step == WARMUP_STEPS:
            calls.clear()
            began = time.perf_counter(), time.process_time()
        ended = time.perf_counter(), time.process_time()
        if step is None:
            break
        time.sleep(step_s)
        last = ended
    calls.pop()
    wall, cpu = (1e3 * (last[i] - began[i]) / len(calls) for i in (0, 1))
    call, call_cpu = (1e3 * statistics.fmean(values) for values in zip(*calls, strict=True))
    return {"cpu": cpu, "wall": wall, "call": call, "call_cpu": call_cpu}


def work(options: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    # States exist, as after a first step.
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    for pair in range(options.pairs):
        dist.barrier()
        bare = measure(iter(range(options.steps)), options.step_s)
        with SpotTolerantRun(
            model, optimizer, dataset_size=1000, global_batch=8, store=str(Path(options.folder) / f"pair-{pair}")
        ) as run:
            ran = measure(run.steps(options.steps), options.step_s)
        row = {
            "pair": pair, "rank": rank, "steps": options.steps - WARMUP_STEPS - 1, "step_s": options.step_s,
            "bare_cpu": bare["cpu"], "run_cpu": ran["cpu"], "call_cpu": ran["call_cpu"], "call": ran["call"],
            "bare_wall": bare["wall"], "run_wall": ran["wall"],
            "share": (ran["cpu"] - bare["cpu"]) / options.step_s / 1e3,
        }  # fmt: skip
        text = json.dumps({name: round(value, 6) for name, value in row.items()})
        (Path(options.folder) / f"row-{pair}-{rank}.json").write_text(text, encoding="ascii")
    end_process(0)


def cpu_s(pid: int) -> float:
    """Processor seconds of a process, to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start two ranks beside a node's watcher, and gather their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=221, help="of each block")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder, LocalImds().running() as imds:
        notices = Path(folder) / "drain"
        environment = {
            **os.environ, "GPUFLEET_DRAIN_FILE": str(notices), "GPUFLEET_PROGRESS_FILE": f"{folder}/progress.json",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint, "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        watcher = subprocess.Popen([sys.executable, "-m", "bootstrap.training.watcher", str(notices)], env=environment)
        time.sleep(2.0)
        began, watched = time.time(), cpu_s(watcher.pid)
        arguments = [
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "tests.benchmarks.measure_runtime",
            str(options.out),
        ]
        numbers = ["--pairs", str(options.pairs), "--steps", str(options.steps), "--step-s", str(options.step_s)]
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *arguments, *numbers, "--folder", folder],
            env=environment, check=True,
        )  # fmt: skip
        watcher_cpu = (cpu_s(watcher.pid) - watched) / (time.time() - began) * options.step_s * 1e3
        watcher.terminate()
        watcher.wait()
        rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("row-*.json"))]
    facts = {
        "torch": torch.__version__, "python": platform.python_version(), "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1), "watcher_cpu": round(watcher_cpu, 6),
    }  # fmt: skip
    options.out.write_text("".join(json.dumps({**row, **facts}) + "\n" for row in rows), encoding="ascii")
    for name in ("bare_cpu", "run_cpu", "call_cpu", "call", "share"):
        values = sorted(row[name] for row in rows)
        sys.stdout.write(f"{name}: median {statistics.median(values):.4g}, {values[0]:.4g} to {values[-1]:.4g}\n")


if __name__ == "__main__":
    main()
