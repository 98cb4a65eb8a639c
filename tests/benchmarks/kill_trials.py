"""Random SIGKILLs of workers, torchrun and whole nodes; every run must end bit-equal to its undisturbed reference.

    python -m tests.benchmarks.kill_trials --shardings fsdp2 --user-processes --kills 1000 --seed 1 --out kills.jsonl

Runs of examples.tiny_gpt (DDP and FSDP2, two CPU workers and gloo each, started by bootstrap/agent) side by side,
each killed again and again until enough kills are counted or the time is over. One JSON line a kill and a run, each
with its seed; exits 0 only if all runs ended equal and none hung. Needs torch and numpy alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from bootstrap.training.standby import TAKES
from examples.interrupted_training import Node
from examples.local_imds import LocalImds

SHARDINGS = ("ddp", "fsdp2")
# A node's victims, by weight; a worker's death is the most frequent. A standby process waits for a command.
VICTIMS = {"worker": 3, "torchrun": 1, "node": 1, "standby": 1}
# Moments to wait for before a kill, then a random part of a second.
MOMENTS = {"any": 0.0, "load": 0.15, "save": 0.02, "steps": 1.0}
POLL_S = 0.005


class HangError(Exception):
    """Nothing happened for too long."""


class Trials:
    """Kills still to do, and the record of those done."""

    def __init__(self, options: argparse.Namespace, record: Any) -> None:
        self.options = options
        self.left = options.kills
        self.stop_at = time.monotonic() + options.time_s
        self.counts: Counter[str] = Counter()
        self.restarts: list[float] = []
        self._record = record
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True where one more kill is wanted."""
        with self._lock:
            if self.left <= 0 or time.monotonic() > self.stop_at:
                return False
            self.left -= 1
            return True

    def write(self, kind: str, row: dict[str, Any]) -> None:
        """Append one line."""
        with self._lock:
            self._record.write(json.dumps({"kind": kind, **row}) + "\n")
            self._record.flush()


class KilledRun:
    """One run, killed until ``trials`` has enough."""

    def __init__(self, trials: Trials, node: Node, name: str, sharding: str, seed: int) -> None:
        self.trials, self.node, self.name, self.sharding, self.seed = trials, node, name, sharding, seed
        self.dice = random.Random(seed)  # noqa: S311 - not for secrets
        self.kills = 0
        self.launch = self._launch()
        self.began = self.progress_at = time.monotonic()
        self.killed_at: float | None = None
        self.row: dict[str, Any] = {}
        self.size_before = 0
        self.is_restarted = False
        self.orphans: set[str] = set()

    def run(self) -> str:
        """Kill until enough or done; ``done``, or what went wrong."""
        try:
            while self.launch.poll() is None:
                moment = self.dice.choice(list(MOMENTS))
                if not self._wait_for(moment) or not self.trials.take():
                    break
                self._kill(moment)
            self._wait_for("end")
            self._close_row()
        except HangError as error:
            return f"hang: {error}"
        finally:
            self._signal_all()
            self.launch.wait()
        return "done" if self.launch.returncode == 0 else f"the agent ended with {self.launch.returncode}"

    def _launch(self) -> subprocess.Popen[bytes]:
        with self.node.log.open("ab") as log:
            command = [sys.executable, str(Path(__file__).parents[2] / "bootstrap" / "agent")]
            return subprocess.Popen(command, env=self.node.environment, stdout=log, stderr=log, start_new_session=True)

    def _wait_for(self, moment: str) -> bool:
        """Wait for ``moment`` and a random time more; False where the run ended."""
        more_s = self.dice.uniform(0, MOMENTS.get(moment, 0.0))
        deadline = time.monotonic() + (
            self.dice.uniform(0, self.trials.options.cycle_s) if moment == "any" else math.inf
        )
        while True:
            if self.launch.poll() is not None:
                return False
            self._look()
            if time.monotonic() >= deadline if moment == "any" else self.phase() == moment:
                break
            time.sleep(POLL_S if moment == "save" else 4 * POLL_S)
        deadline = time.monotonic() + more_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._look()
            time.sleep(min(left_s, 4 * POLL_S))
        return self.launch.poll() is None

    def _look(self) -> None:
        """Note progress; HangError after too long without."""
        size = self._losses_size()
        now = time.monotonic()
        if self.killed_at is not None and not self.is_restarted and self.phase() != "start":
            # Survivors may end the step that they are in; a step counts from here on.
            self.is_restarted, self.size_before = True, size
        if size > self.size_before:
            if self.is_restarted and self.killed_at is not None:
                self.row["next_step_s"] = round(now - self.killed_at, 2)
                self.trials.restarts.append(now - self.killed_at)
                self._close_row()
            self.size_before, self.progress_at = size, now
        if now - self.progress_at > self.trials.options.hang_s:
            raise HangError(f"no step for {self.trials.options.hang_s} s; log: {self.node.log}")

    def _losses_size(self) -> int:
        with suppress(FileNotFoundError):
            return (self.node.out / "losses.jsonl").stat().st_size
        return 0

    def phase(self) -> str:
        """start (imports), load (or another exchange before the first step), save, steps."""
        if len(list(self.node.out.glob("rank-*.pid"))) < len(self.node.workers):
            return "start"
        if self.killed_at is not None or not self._losses_size():
            return "load"
        return "save" if self._unfinished() - self.orphans else "steps"

    def _unfinished(self) -> set[str]:
        with suppress(FileNotFoundError):
            saves = [entry for entry in os.scandir(self.node.store) if entry.name.startswith("step-")]
            return {entry.name for entry in saves if not (Path(entry.path) / "manifest.json").exists()}
        return set()

    def _processes(self) -> dict[str, list[int]]:
        """Processes of this node by role, found by a variable that they all inherit."""
        mark = f"GPUFLEET_CHECKPOINT_URI={self.node.store}\0".encode()
        roles: dict[str, list[int]] = {name: [] for name in VICTIMS}
        ranks = {path.read_text() for path in self.node.out.glob("rank-*.pid")}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                variables = (entry / "environ").read_bytes()
                if mark not in variables:
                    continue
                command = (entry / "cmdline").read_bytes()
                roles["node"].append(int(entry.name))
                if b"bootstrap.training.torchrun" in command:
                    roles["torchrun"].append(int(entry.name))
                elif b"bootstrap.training.standby" in command:
                    roles["worker" if entry.name in ranks else "standby"].append(int(entry.name))
                elif (
                    b"\0LOCAL_RANK=" in variables
                    and b"examples.tiny_gpt" in command
                    and (
                        entry.name in ranks or not self.trials.options.user_processes  # a rank's fork has its command
                    )
                ):
                    roles["worker"].append(int(entry.name))
        return roles

    def _kill(self, moment: str) -> None:
        self._close_row()
        phase, done = self.phase(), self.node.steps_done()
        roles = self._processes()
        wanted = self.dice.choices(list(VICTIMS), weights=list(VICTIMS.values()))[0]
        victim = wanted if roles[wanted] else "worker" if roles["worker"] else "node"
        pids = roles["node"] if victim == "node" else [self.dice.choice(roles[victim])]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.killed_at = self.progress_at = time.monotonic()
        self.kills += 1
        self.trials.counts.update([f"victim {victim}", f"phase {phase}", f"sharding {self.sharding}"])
        self.row = {
            "run": self.name, "seed": self.seed, "sharding": self.sharding, "kill": self.kills, "victim": victim,
            "phase": phase, "waited_for": moment, "at_s": round(self.killed_at - self.began, 2), "steps_done": done,
            "next_step_s": None,
        }  # fmt: skip
        for path in self.node.out.glob("rank-*.pid"):
            path.unlink()
        self.size_before, self.is_restarted = self._losses_size(), False
        self.orphans = self._unfinished()
        if victim == "node":
            self.launch.wait()
            self.launch = self._launch()

    def _close_row(self) -> None:
        if self.row:
            self.trials.write("kill", self.row)
        self.row, self.killed_at = {}, None

    def _signal_all(self) -> None:
        for pid in self._processes()["node"]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def make_node(folder: Path, imds: LocalImds, sharding: str, options: argparse.Namespace, *, delay_s: float) -> Node:
    """Node whose torchrun survives any number of kills."""
    node = Node(folder, imds, steps=options.steps, step_delay_s=delay_s, sharding=sharding)
    command = node.environment["GPUFLEET_TRAIN_COMMAND"].replace(
        "--checkpoint-every 20", f"--checkpoint-every {options.checkpoint_every}"
    )
    if options.user_processes:
        command = command.replace("-m ", "-m tests.benchmarks.with_processes ")
    node.environment |= {
        "GPUFLEET_TRAIN_COMMAND": command,
        "GPUFLEET_AGENT": '{"max_restarts": 100000, "max_launches": 100000, "relaunch_delay_s": 1}',
        "OMP_NUM_THREADS": "1",
        "GPUFLEET_STANDBY": str(int(options.standby)),
        "GPUFLEET_STANDBY_DELAY_S": "1",
    }
    return node


def main() -> int:
    """Run the trials; 0 if every run ended equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills in all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time; default: one a processor")
    parser.add_argument("--shardings", nargs="+", choices=SHARDINGS, default=SHARDINGS)
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    parser.add_argument("--step-delay-s", type=float, default=0.01)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--cycle-s", type=float, default=6.0, help="longest random wait between two kills")
    parser.add_argument("--hang-s", type=float, default=120.0, help="a run without a step for so long hangs")
    parser.add_argument("--time-s", type=float, default=480.0, help="no kill after this time")
    parser.add_argument("--standby", action="store_true", help="processes stand by, and are killed as well")
    parser.add_argument("--user-processes", action="store_true", help="ranks have processes of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the runs; default: a temporary one, removed")
    parser.add_argument("--out", type=Path, default=Path("kills.jsonl"))
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="gpufleet-kills-", dir=options.folder) as folder,
        LocalImds().running() as imds,
        options.out.open("w", encoding="ascii") as record,
    ):
        return run_trials(Trials(options, record), Path(folder), imds)


def run_trials(trials: Trials, folder: Path, imds: LocalImds) -> int:
    """References, then killed runs side by side; print and write the summary."""
    options = trials.options
    began = time.monotonic()
    references = {}
    with ThreadPoolExecutor(options.jobs) as threads:
        nodes = {
            sharding: make_node(folder / f"reference-{sharding}", imds, sharding, options, delay_s=0)
            for sharding in options.shardings
        }
        for sharding, outcome in zip(nodes, threads.map(_run_undisturbed, nodes.values()), strict=True):
            references[sharding] = outcome
    numbers = iter(range(10**9))
    results: Counter[str] = Counter()

    def slot(_: int) -> None:
        while trials.left > 0 and time.monotonic() < trials.stop_at:
            number = next(numbers)
            sharding = options.shardings[number % len(options.shardings)]
            node = make_node(folder / f"run-{number}", imds, sharding, options, delay_s=options.step_delay_s)
            run = KilledRun(trials, node, f"run-{number}", sharding, options.seed * 1_000_000 + number)
            result = run.run()
            if result == "done":
                is_equal = (node.losses(), node.parameters_sha256()) == references[sharding]
                result = "equal" if is_equal else "DIFFERENT"
            results.update([result.split(":")[0]])
            log = node.log.read_text(errors="replace")
            row = {"run": run.name, "seed": run.seed, "sharding": sharding, "kills": run.kills, "result": result}
            row["places_taken"] = log.count(TAKES)
            if result != "equal":
                row["log"] = log[-20_000:]
            trials.write("run", row)

    with ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(slot, range(options.jobs)))
    restarts = sorted(trials.restarts)
    summary = {
        "kills": options.kills - trials.left,
        "seed": options.seed,
        "runs": dict(results),
        **{key: trials.counts[key] for key in sorted(trials.counts)},
        "median_next_step_s": round(restarts[len(restarts) // 2], 2) if restarts else None,
        "wall_s": round(time.monotonic() - began, 1),
        "jobs": options.jobs,
        "processors": os.cpu_count(),
    }
    trials.write("summary", summary)
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return 0 if set(results) == {"equal"} else 1


def _run_undisturbed(node: Node) -> tuple[dict[int, float], str]:
    with node.running() as process:
        node.wait(process)
    return node.losses(), node.parameters_sha256()


if __name__ == "__main__":
    sys.exit(main())
