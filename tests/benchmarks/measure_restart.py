"""Time from a worker's SIGKILL to the next new step: ``python -m tests.benchmarks.measure_restart OUT.jsonl``.

Needs a quiet machine. Kills worker 1 of a run of examples.tiny_gpt (two CPU processes, gloo, bootstrap/agent)
several times, without and with processes that stand by (bootstrap/training/standby.py), and times
``python -c 'import torch'`` on the same processors. One JSON line a kill, seconds by phase:

    gone     until the surviving worker has ended (torchrun notices, and stops it)
    spawn    until the new worker process exists, which one that stands by does already
    import   until its imports are done, torch's among them; of one that stands by, until it got its command
    group    until its process group is made
    load     until the checkpoint is loaded (imports of the optimizer and DDP's rehearsal, too)
    step     until the first new step is done
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from bootstrap.training.standby import READY
from examples.interrupted_training import Node
from examples.local_imds import LocalImds

PHASES = ("gone", "spawn", "import", "group", "load", "step")
LIMIT_S = 240.0
_IMPORTED = re.compile(r"^(\S+ \S+) rank 0 imported$", re.MULTILINE)
_LOADED = re.compile(r"^(\S+ \S+) rank 0 resuming at step", re.MULTILINE)


def logged_at(pattern: re.Pattern[str], text: str) -> float:
    """Unix seconds of the last line that matches."""
    return datetime.strptime(pattern.findall(text)[-1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


def started_at(pid: int) -> float:
    """Unix seconds of a process's start, to a hundredth."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    """False for a zombie, too."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def measure_kill(node: Node, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Seconds by phase of one restart, and ``all``."""
    survivor, victim = node.worker_pid(0), node.worker_pid(1)
    pid_file = node.out / "rank-0.pid"
    pid_file.unlink()
    os.kill(victim, signal.SIGKILL)
    killed = time.time()
    deadline = killed + LIMIT_S
    while is_alive(survivor):
        time.sleep(0.002)
    gone = time.time()
    while not (pid_file.exists() and pid_file.stat().st_size):
        assert process.poll() is None and time.time() < deadline, node.log_tail()
        time.sleep(0.005)
    grouped, losses = pid_file.stat().st_mtime, node.out / "losses.jsonl"
    size = losses.stat().st_size
    spawned = max(gone, started_at(node.worker_pid(0)))
    while losses.stat().st_size == size:
        assert process.poll() is None and time.time() < deadline, node.log_tail()
        time.sleep(0.002)
    stepped = time.time()
    text = node.log.read_text(errors="replace")
    moments = [killed, gone, spawned, logged_at(_IMPORTED, text), grouped, logged_at(_LOADED, text), stepped]
    seconds = {name: moments[i + 1] - moments[i] for i, name in enumerate(PHASES)}
    return {**seconds, "all": stepped - killed}


def wait_for_standby(node: Node, process: subprocess.Popen[bytes], restarts: int) -> None:
    """Return when as many processes stand by as there are workers."""
    deadline = time.time() + LIMIT_S
    while node.log.read_text(errors="replace").count(READY) < 2 * (restarts + 1):
        assert process.poll() is None and time.time() < deadline, node.log_tail()
        time.sleep(0.1)


def import_s() -> float:
    """Seconds of ``import torch`` in a new interpreter, from its start to its end."""
    began = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.time() - began


def main() -> None:
    """Kill, time and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=5, help="of each sharding")
    parser.add_argument("--shardings", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--standby", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalImds().running() as imds,
        options.out.open("w", encoding="ascii") as out,
    ):
        for sharding, standby in itertools.product(options.shardings, options.standby):
            rows: list[dict[str, float]] = []
            node = Node(Path(folder) / f"{sharding}-{standby}", imds, steps=10**6, step_delay_s=0.05, sharding=sharding)
            node.environment |= {
                "GPUFLEET_MAX_RESTARTS": "1000", "GPUFLEET_STANDBY": str(standby), "GPUFLEET_STANDBY_DELAY_S": "1",
            }  # fmt: skip
            with node.running() as process:
                node.wait_for_step(25, process)
                for kill in range(options.kills):
                    if standby:
                        wait_for_standby(node, process, kill)
                    row = measure_kill(node, process)
                    node.wait_for_step(node.steps_done() + 25, process)
                    rows.append(row)
            for row in rows:
                row["import torch alone"] = import_s()
                out.write(
                    json.dumps({"sharding": sharding, "standby": standby, **{k: round(v, 3) for k, v in row.items()}})
                    + "\n"
                )
            names = [*PHASES, "all", "import torch alone"]
            medians = {name: round(statistics.median(row[name] for row in rows), 2) for name in names}
            sys.stdout.write(f"{sharding}, standby {standby}: {medians}\n")


if __name__ == "__main__":
    main()
