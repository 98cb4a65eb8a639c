"""The smoke test with faults put in, many in one start of torch, which is most of a run.

``sabotaged.py FOLDER RUNS`` forks a supervisor for each run and lets it fork its ranks; RUNS is JSON, the arguments of
bootstrap.smoke by fault. FOLDER gets each run's standard output, error and exit code: FAULT.out, FAULT.err, FAULT.code.

Under torchrun, ``sabotaged.py FAULT,FAULT,... FOLDER [arguments]`` runs one fault after another in the same
ranks: FOLDER gets each report, FAULT.json, and what each rank would exit with, FAULT.RANK.code.

The faults replace functions of the product in these processes alone: the product has no switch that could be left on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Run as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import torch._dynamo  # DDP imports it at its first use
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.smoke import __main__ as cli
from bootstrap.smoke import bandwidth, gang, gradients, ranks, supervisor

TENSOR = "layers.layers.0.linear1.weight"


def is_rank_1() -> bool:
    """Tell whether torchrun or the supervisor made this process its second rank."""
    return os.environ.get("RANK") == "1"


def change_gradients(change: Callable[[torch.Tensor], None]) -> None:
    """Apply ``change`` to one gradient after the DDP backward."""
    original = gradients.named_gradients

    def changed(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        result = original(model, tokens)
        if isinstance(model, DistributedDataParallel):
            change(result[TENSOR])
        return result

    gradients.named_gradients = changed


def perturbed_gradient() -> None:
    """Rank 1's gradient of one tensor is a little off, as after a bit flip."""
    if is_rank_1():
        change_gradients(lambda gradient: gradient.view(-1)[7].add_(1e-3))  # type: ignore[arg-type]


def nan_gradient() -> None:
    """Every rank has the same NaN, so the ranks agree."""
    change_gradients(lambda gradient: gradient.view(-1)[7].fill_(float("nan")))  # type: ignore[arg-type]


def wrong_sum() -> None:
    """On rank 1 an all-reduce leaves one element wrong."""
    original = dist.all_reduce

    def corrupting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = original(tensor, *arguments, **options)
        tensor[5] += 1
        return work

    if is_rank_1():
        dist.all_reduce = corrupting


def instead_of_bandwidth(what: Callable[[], object]) -> None:
    """Rank 1 does ``what`` where the all-reduce test would begin."""
    if is_rank_1():
        bandwidth.check = lambda *_, **__: what()  # type: ignore[assignment]


def fail() -> None:
    """An exception of rank 1."""
    raise ValueError("a reason of rank 1's own")


def hang() -> None:
    """Answer nobody any more."""
    time.sleep(600)


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "perturbed_gradient": perturbed_gradient,
    "nan_gradient": nan_gradient,
    "wrong_sum": wrong_sum,
    "misses_a_floor": lambda: None,
    "is_killed": lambda: instead_of_bandwidth(lambda: os.kill(os.getpid(), 9)),
    "hangs": lambda: instead_of_bandwidth(hang),
    "is_ended_from_outside": lambda: instead_of_bandwidth(hang),
    "raises": lambda: instead_of_bandwidth(fail),
}


class Rank(ForkProcess):
    """Part of subprocess.Popen that supervisor.py uses, for a fork of this process instead of a new one."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: int) -> None:
        super().__init__(target=self.run_as, args=(command, env, stdout))
        self.start()

    @staticmethod
    def run_as(command: list[str], env: Mapping[str, str], stdout: int) -> None:
        """Become the rank that the command would start."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdout, 1)
        os.environ.clear()
        os.environ.update(env)
        _, fault, *arguments = command
        FAULTS[fault]()
        sys.exit(cli.main(arguments))

    returncode = property(lambda self: self.exitcode)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()


def supervise(fault: str, arguments: list[str], folder: Path) -> None:
    """Run the supervisor, whose ranks have the fault."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{fault}.{name}", os.O_WRONLY | os.O_CREAT), number)
    supervisor.RANK_PROGRAM = (fault,)  # type: ignore[assignment]
    vars(supervisor)["subprocess"] = SimpleNamespace(Popen=Rank)
    sys.exit(cli.main(arguments))


def all_at_once(runs: Mapping[str, list[str]], folder: Path) -> None:
    """Run every fault under a supervisor of its own; most of a run is waiting."""
    processes = {name: ForkProcess(target=supervise, args=(name, runs[name], folder)) for name in runs}
    for process in processes.values():
        process.start()
    for name, process in processes.items():
        if name == "is_ended_from_outside":
            errors = folder / f"{name}.err"
            while process.is_alive() and not (errors.exists() and "pids" in errors.read_text(encoding="utf-8")):
                time.sleep(0.05)
            process.terminate()
        process.join()
        (folder / f"{name}.code").write_text(str(process.exitcode), encoding="utf-8")


def one_after_another(faults: list[str], arguments: list[str], folder: Path) -> None:
    """Run the smoke test once a fault: each run joins the group of the first and leaves it to the next."""
    place = ranks.meet("cpu", timeout_s=gang.COLD_JOIN_S)
    ranks.connect(place, timeout=place.timeout)
    leave = place.leave
    ranks.meet = lambda *_, **__: place
    ranks.connect = lambda *_, **__: None
    place.leave = lambda: None  # type: ignore[method-assign]
    for fault in faults:
        originals = [(owner, name, getattr(owner, name)) for owner, name in REPLACED]
        FAULTS[fault]()
        code = cli.main([*arguments, "--out", str(folder / f"{fault}.json")])
        (folder / f"{fault}.{place.rank}.code").write_text(str(code), encoding="utf-8")
        for owner, name, original in originals:
            setattr(owner, name, original)
    leave()


# Functions that the consecutive faults replace.
REPLACED: list[tuple[Any, str]] = [(gradients, "named_gradients"), (dist, "all_reduce")]

if __name__ == "__main__":
    if "RANK" in os.environ:
        faults, folder, *given = sys.argv[1:]
        one_after_another(faults.split(","), given, Path(folder))
    else:
        all_at_once(json.loads(sys.argv[2]), Path(sys.argv[1]))
