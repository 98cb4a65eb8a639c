"""Processes that stand by for a failed worker: their imports are done, which take most of a restart.

torchrun starts them a while after its workers and in the same way. Each waits for a command on a pipe and then runs it
as ``python`` would. Nothing is forked, so neither CUDA nor threads are in the way.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
import runpy
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from bootstrap.training.environment import positive_number
from bootstrap.training.host_buffer import available_bytes
from bootstrap.training.ledger import STARTED_VARIABLE
from bootstrap.training.rank_lines import RankLines

logger = logging.getLogger(__name__)

STANDBY_VARIABLE = "GPUFLEET_STANDBY"
DELAY_VARIABLE = "GPUFLEET_STANDBY_DELAY_S"
# Workers import, compile and load in the first minute, and want the processors for themselves.
DEFAULT_DELAY_S = 60.0
# A process holds 0.35 GiB of its own (torch 2.11, 2026-11-23); FREE_BYTES are the training's.
PROCESS_BYTES, FREE_BYTES = 2**29, 4 * 2**30
STANDS = "stands by for a worker"
TAKES = "takes the place of rank"
TRAINER = "bootstrap.trainer"
# An optimizer's constructor imports torch._dynamo, and that sympy: together as long as torch itself.
MODULES = ("torch", "torch._dynamo", "torch.distributed.fsdp", "bootstrap.training.run")
TRAINER_MODULES = ("bootstrap.trainer.run", "transformers.models.auto.modeling_auto", "peft")


@dataclass
class _Waiting:
    process: Popen[bytes]
    command: int
    lines: RankLines


class Standby:
    """Waiting processes of one torchrun, as many as it has workers."""

    def __init__(self, modules: Sequence[str], *, delay_s: float) -> None:
        self._modules, self._delay_s = tuple(modules), delay_s
        self._waiting: list[_Waiting] = []
        self._lock, self._is_closed = threading.Lock(), False
        self._timer: threading.Timer | None = None

    @classmethod
    def from_environment(cls, arguments: Sequence[str]) -> Standby | None:
        """Processes for a torchrun with these arguments; None where they are off.

        The reference trainer has them. A script of one's own asks for them with ``GPUFLEET_STANDBY=1``: a variable that
        it sets before it imports torch would come too late for torch.
        """
        asked = os.environ.get(STANDBY_VARIABLE, "").strip()
        is_trainer = any(pair == ("-m", TRAINER) for pair in itertools.pairwise(arguments))
        if asked == "0" or (asked != "1" and not is_trainer):
            return None
        delay_s = positive_number(DELAY_VARIABLE) or DEFAULT_DELAY_S
        return cls((*MODULES, *(TRAINER_MODULES if is_trainer else ())), delay_s=delay_s)

    def take(self, arguments: tuple[str, ...], environment: Mapping[str, str]) -> Popen[bytes] | None:
        """Give a command to a waiting process, which becomes that worker; None where none can."""
        if arguments[:2] != (sys.executable, "-u"):
            return None
        command = {"arguments": list(arguments[1:]), "environment": {**environment, STARTED_VARIABLE: str(time.time())}}
        with self._lock:
            while self._waiting:
                standby = self._waiting.pop(0)
                standby.lines.rank = environment["RANK"]
                with contextlib.suppress(BrokenPipeError), os.fdopen(standby.command, "wb") as pipe:
                    pipe.write(json.dumps(command).encode())
                    pipe.flush()
                    if standby.process.poll() is None:
                        logger.info("standby: process %d %s %s", standby.process.pid, TAKES, environment["RANK"])
                        return standby.process
        return None

    def started(self, workers: int) -> None:
        """Note that a worker of ``workers`` was started: later, so many processes stand by."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            for standby in [standby for standby in self._waiting if standby.process.poll() is not None]:
                self._waiting.remove(standby)
                os.close(standby.command)
            self._timer = threading.Timer(self._delay_s, self._fill, (workers,))
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """End the waiting processes."""
        with self._lock:
            self._is_closed = True
            for standby in self._waiting:
                standby.process.kill()
                standby.process.wait()

    def _fill(self, workers: int) -> None:
        """Start processes, until a worker is started again."""
        while self._timer is threading.current_thread() and len(self._waiting) < workers:
            free, where = available_bytes()
            if free < FREE_BYTES + PROCESS_BYTES * len(self._waiting):
                logger.warning("no process stands by: %.1f GiB are free (%s)", free / 2**30, where)
                return
            command_end, command = os.pipe()
            arguments = [sys.executable, "-u", "-m", "bootstrap.training.standby", str(command_end), *self._modules]
            with self._lock, RankLines() as lines:
                if self._is_closed:
                    return
                process = Popen(
                    arguments, pass_fds=(command_end,), start_new_session=True, stdout=lines.end, stderr=lines.end
                )
                self._waiting.append(_Waiting(process=process, command=command, lines=lines))
            # A drain ends them with the workers, and the agent waits until torchrun's children are gone.
            threading.Thread(target=process.wait, name="standby-reaper", daemon=True).start()
            os.close(command_end)
            logger.info("standby: process %d %s", process.pid, STANDS)


def wait_for_command(command: int, modules: Sequence[str]) -> None:
    """Import, wait, and run the command that comes; return where torchrun is gone."""
    for name in modules:
        with contextlib.suppress(Exception):  # the command's own import of it gives the error
            importlib.import_module(name)
    with os.fdopen(command, "rb") as pipe:
        text = pipe.read()
    if not text:
        return
    given = json.loads(text)
    sys.orig_argv = [sys.executable, *given["arguments"]]
    run_command(given["arguments"][1:], given["environment"])  # after -u, as this process has it


def run_command(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run ``python ARGUMENTS`` in this process: a module or a script."""
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    wait_for_command(int(sys.argv[1]), sys.argv[2:])
