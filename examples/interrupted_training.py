"""Train a sharded GPT undisturbed and interrupted three times, and compare the two runs bit by bit.

    python -m examples.interrupted_training

bootstrap/agent starts torchrun with two CPU workers (gloo) or GPUs (NCCL); FSDP2 shards parameters, gradients
and optimizer states of a small model over them. The second run is hit by a spot notice from a local metadata server,
by SIGKILL of one worker, and by SIGKILL of everything on the node. Exits 0 only if every loss and parameter equals the
undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bootstrap.training.ledger import read_ledger, table
from examples.local_imds import LocalImds

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120.0


class DemoError(Exception):
    """The demonstration did not go as planned."""


class Node:
    """One node's agent, run as systemd runs it, with workers on CPUs or GPUs."""

    def __init__(
        self,
        folder: Path,
        imds: LocalImds,
        *,
        steps: int,
        step_delay_s: float = 0.0,
        pace: Path | None = None,
        workers: int = 2,
        gpus: bool = False,
        sharding: str = "fsdp2",
        model: str = "",
    ) -> None:
        self.workers = range(workers)
        self.run_folder = folder / "run"
        self.out = folder / "out"
        self.losses_file = self.out / "losses.jsonl"
        self.store = folder / "checkpoints"
        self.log = folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        command = f"-m examples.tiny_gpt --sharding {sharding} --steps {steps} --out {self.out} --checkpoint-every 20"
        command += f" {model}"
        command += f" --pace {pace}" if pace else f" --step-delay-s {step_delay_s}"
        self.environment = {
            **os.environ,
            "GPUFLEET_TRAIN_COMMAND": command,
            "GPUFLEET_NODE_COUNT": "1",
            "GPUFLEET_GPUS_PER_NODE": str(workers),
            "GPUFLEET_PYTHON": sys.executable,
            "GPUFLEET_TRAIN_DIR": str(ROOT),
            "GPUFLEET_RUN_DIR": str(self.run_folder),
            "GPUFLEET_CHECKPOINT_URI": str(self.store),
            "GPUFLEET_IMDS_POLL_S": "1",
            "GPUFLEET_LEDGER_INTERVAL_S": "0.001",  # every step, as these are short
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint,
        }
        if not gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        for name in ("AWS_EC2_METADATA_DISABLED", "GPUFLEET_BUCKET", "GPUFLEET_ASG_NAME", "GPUFLEET_TERMINATE_HOOK"):
            self.environment.pop(name, None)

    def start(self, arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start ``python ARGUMENTS`` in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, *arguments], env=self.environment, stdout=log, stderr=log, start_new_session=True
        )

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the agent; kill its remains at the end."""
        with self.log.open("ab") as log:
            process = self.start([str(ROOT / "bootstrap" / "agent")], log)
            try:
                yield process
            finally:
                self.vanish(process)

    def vanish(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL the agent, torchrun and the workers at once, as a machine that disappears does."""
        # torchrun gives each worker a session of its own, so its group does not have them.
        workers = [self.worker_pid(rank) for rank in self.workers if (self.out / f"rank-{rank}.pid").exists()]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def is_told_to_leave(self) -> bool:
        """True where the training processes can read the notice."""
        return (self.run_folder / "drain").exists()

    def steps_done(self) -> int:
        """Highest step whose loss was written, plus one."""
        return max(self.losses(), default=-1) + 1

    def losses(self) -> dict[int, float]:
        """Loss by step; a recomputed step has its last value."""
        lines = self.losses_file.read_text().splitlines(keepends=True) if self.losses_file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows}

    def parameters_sha256(self) -> str:
        """Digest of the parameters after the last step."""
        return str(json.loads((self.out / "result.json").read_text())["parameters_sha256"])

    def wait_for_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Return when ``step`` steps are done."""
        deadline = time.monotonic() + LIMIT_S
        while self.steps_done() < step:
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"never came to step {step}:\n{self.log_tail()}")
            time.sleep(0.02)

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the agent ended with 0."""
        status = process.wait(timeout=LIMIT_S)
        if status:
            raise DemoError(f"the agent ended with {status}:\n{self.log_tail()}")

    def worker_pid(self, rank: int) -> int:
        """Process of a rank."""
        return int((self.out / f"rank-{rank}.pid").read_text())

    def log_tail(self) -> str:
        """Last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


def interrupt_three_times(node: Node, imds: LocalImds, steps: int) -> None:
    """The disturbed run, from its start to its end."""
    with node.running() as process:
        node.wait_for_step(steps // 5, process)
        imds.interrupt()
        say(f"step {node.steps_done():3}: spot notice from the metadata service")
        node.wait(process)
    say(f"step {node.steps_done():3}: saved, torchrun ended, node left; a new node starts")
    imds.replace_instance()
    with node.running() as process:
        node.wait_for_step(steps * 56 // 100, process)
        last = node.workers[-1]
        say(f"step {node.steps_done():3}: SIGKILL of worker {last}, no notice; torchrun restarts the workers")
        os.kill(node.worker_pid(last), signal.SIGKILL)
        time.sleep(1.0)
        node.wait_for_step(steps * 78 // 100, process)
        say(f"step {node.steps_done():3}: SIGKILL of the whole node, no notice; a new node starts")
        node.vanish(process)
    with node.running() as process:
        node.wait(process)
    say(f"step {node.steps_done():3}: done")


def compare(undisturbed: Node, disturbed: Node) -> bool:
    """Print and return whether losses and parameters are equal."""
    expected, actual = undisturbed.losses(), disturbed.losses()
    different = [step for step in expected.keys() | actual.keys() if expected.get(step) != actual.get(step)]
    last = max(expected)
    say(f"loss after step {last}: {expected[last]!r} undisturbed, {actual.get(last)!r} interrupted")
    say(f"losses: {len(expected) - len(different)} of {len(expected)} steps equal")
    shas = undisturbed.parameters_sha256(), disturbed.parameters_sha256()
    say(f"parameters: SHA-256 {shas[0][:16]}… undisturbed, {shas[1][:16]}… interrupted")
    return not different and shas[0] == shas[1]


def say(text: str = "") -> None:
    """Print one line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the demonstration; 0 if both runs are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--gpus", action="store_true", help="GPUs and NCCL instead of CPU processes and gloo")
    parser.add_argument("--workers", type=int, default=2, help="GPUs or CPU processes")
    parser.add_argument("--model", default="", help="flags of tiny_gpt; 1e9 parameters: '--width 2048 --layers 20'")
    parser.add_argument("--keep", type=Path, help="keep logs, checkpoints and ledger in this new folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpufleet-demo-") as temporary, LocalImds().running() as imds:
        folder = options.keep or Path(temporary)
        try:
            where = "GPUs (torchrun, NCCL" if options.gpus else "CPU processes (torchrun, gloo"
            shape = {name: getattr(options, name) for name in ("steps", "gpus", "workers", "model")}
            what = f"{options.steps} steps of a GPT {options.model}".strip()
            say(f"Undisturbed: {what}, sharded by FSDP2, on {options.workers} {where}, dropout on)")
            undisturbed = Node(folder / "undisturbed", imds, **shape)
            with undisturbed.running() as process:
                undisturbed.wait(process)
            say(f"step {undisturbed.steps_done():3}: done")
            say()
            say("Interrupted: the same run, hit three times")
            disturbed = Node(folder / "interrupted", imds, step_delay_s=0.05, **shape)
            began = time.time()
            interrupt_three_times(disturbed, imds, options.steps)
            took_s = time.time() - began
        except (DemoError, subprocess.TimeoutExpired) as error:
            say(f"FAILED: {error}")
            return 1
        say()
        equal = compare(undisturbed, disturbed)
        say()
        say("Where the interrupted run's time went (its ledger, which outlived every process)")
        summary = read_ledger(str(disturbed.store))
        say(table(summary))
        say(f"{took_s:.2f} s by this program's clock, which also saw the agent and torchrun start and end")
        say()
        say("EQUAL: interruptions changed nothing but the time" if equal else "NOT EQUAL: resuming changed the result")
        return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
