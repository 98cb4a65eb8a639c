"""torchrun of a node: ``python -m bootstrap.training.torchrun`` takes torchrun's arguments, and adds six things.

A worker that ends with ``EXIT_AT_FAULT`` ends torchrun with the same status, without a restart. A node that leaves with
its state saved joins no further round. Processes that have done the imports already take a failed worker's place
(standby.py), and new ones find its memory, with the last checkpoint (host_buffer.py). Each round of workers meets at a
store of its own. And each line of output is marked with its rank (rank_lines.py): torchrun's own --tee passes the
output through files, which fill the disk and which no standby process has.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Collection
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.training import rank_lines
from bootstrap.training.errors import EXIT_INTERRUPTED, ConfigurationError
from bootstrap.training.host_buffer import make_kept
from bootstrap.training.notices import NoticeFiles
from bootstrap.training.rank_group import OWN_STORE_VARIABLE
from bootstrap.training.rank_lines import RankLines
from bootstrap.training.standby import Standby

run: Any = importlib.import_module("torch.distributed.run")
# torchrun names no place for an agent or a handler of one's own; these modules have the names by which it finds both.
api: Any = importlib.import_module("torch.distributed.launcher.api")
handlers: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.handlers")
logger = logging.getLogger("bootstrap.training.torchrun")
LEAVING_POLL_S = 0.1
# From SIGTERM to SIGKILL for workers of a round that has failed. Those that wait for a dead peer in NCCL react to no
# signal: torchrun's 30 s were most of a restart. A manifest can still be written; a save that lacks the dead
# rank's word cannot become a checkpoint however long its peers live. Workers that leave after a notice have the 30 s.
STOP_S = 1
# After a rank's fault a launcher ends the others, DeepSpeed's each in turn for 30 s, and then itself
# (https://github.com/deepspeedai/DeepSpeed/blob/v0.18.2/deepspeed/launcher/launch.py). One that lives longer has
# handled it, as a program that tries other settings, and what ends it later is another matter.
FAULT_S = 300.0


class FleetAgent(LocalElasticAgent):
    """torchrun's agent; restarts nothing that would fail in the same way."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if is_at_fault(result.failures.values()):
            self._remaining_restarts = 0
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> Any:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        end_workers = context.close

        def close(*signals: Any) -> None:
            # After a worker's failure the context closes itself, and names neither a signal nor a limit:
            # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/elastic/multiprocessing/api.py#L974
            workers = [handler.proc for handler in context.subprocess_handlers.values()]
            notices = NoticeFiles.from_environment()
            # Code without bootstrap.training may end with any status after its save.
            has_notice = notices is not None and notices.read_stop() is not None
            has_notice |= any(worker.poll() == EXIT_INTERRUPTED for worker in workers)
            end_workers(*signals) if signals or has_notice else end_workers(timeout=STOP_S)
            for worker in workers if any(worker.poll() for worker in workers) else ():
                # Each worker leads a session. What a killed one forked holds its port and its memory on the GPU.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)

        context.close = close
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._pcontext is not None:
            self._pcontext.close()
        super()._stop_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        notices = NoticeFiles.from_environment()
        # The agent ends torchrun in a moment. Peers wait a minute for the ranks of a node that has joined and is gone,
        # and then fail: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/elastic/utils/store.py
        while notices is not None and notices.saved.exists():
            time.sleep(LEAVING_POLL_S)
        super()._restart_workers(worker_group)


def is_at_fault(failures: Collection[ProcessFailure]) -> bool:
    """Return whether another start would fail alike: by a worker's status, or by the file of a program's own rank."""
    files = NoticeFiles.from_environment() if failures and "bootstrap.launchers" in sys.argv else None
    with contextlib.suppress(FileNotFoundError):
        if files is not None and time.time() - files.at_fault.stat().st_mtime < FAULT_S:
            return True
    return any(failure.exitcode == EXIT_AT_FAULT for failure in failures)


def worker_handler(standby: Standby | None, *, has_ranks: bool = True) -> type[SubprocessHandler]:
    """Make the class that starts torchrun's workers, from the processes that stand by where one is ready.

    Without ``has_ranks`` lines are not marked: the worker is a program whose own launcher gives the ranks.
    """

    kept: dict[str, int] = {}

    class WorkerHandler(SubprocessHandler):
        def close(self, death_sig: signal.Signals | None = None) -> None:
            # The group has the data loaders' processes too, and the steps before the save still need their batches.
            if self._is_python and death_sig != signal.SIGKILL:
                self.proc.send_signal(death_sig or signal.SIGTERM)
            else:
                super().close(death_sig)

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
            self._is_python = has_ranks and args[0] == sys.executable
            if env["LOCAL_RANK"] not in kept:
                kept[env["LOCAL_RANK"]] = make_kept(env["LOCAL_RANK"])
            process, is_redirected = None, self._stdout is not None or self._stderr is not None
            if standby is not None:
                if not is_redirected:
                    process = standby.take(args, env)
                standby.started(int(env["LOCAL_WORLD_SIZE"]))
            if process is None and not is_redirected:
                with RankLines(env["RANK"] if has_ranks else "") as lines:
                    self._stdout = self._stderr = lines.end
                    process = super()._popen(args, env)
                self._stdout = self._stderr = None
            return process or super()._popen(args, env)

    return WorkerHandler


def main() -> None:
    """Run torchrun; exits with ``EXIT_AT_FAULT`` where a worker did."""
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("%(asctime)s torchrun %(message)s"))
    ours = logging.getLogger("bootstrap")
    ours.addHandler(console)
    ours.setLevel(logging.INFO)
    api.LocalElasticAgent = FleetAgent
    options = run.parse_args(sys.argv[1:])  # includes torchrun's variables PET_*
    # By default torchrun reuses the store of the first round of workers in all later rounds.
    if options.rdzv_backend == "static" and options.nnodes in ("1", "1:1"):
        sys.argv.insert(1, "--standalone")
    # A round would find the addresses of the round before in torchrun's store: with torch 2.11 after kill -9, 11 of 19
    # restarts hung or failed, and with this 0 of 10.
    os.environ.setdefault(OWN_STORE_VARIABLE, "1")
    try:
        standby = Standby.from_environment(sys.argv[1:])
    except ConfigurationError as error:
        logger.error("%s", error)
        sys.exit(EXIT_AT_FAULT)
    handlers.SubprocessHandler = worker_handler(standby, has_ranks="bootstrap.launchers" not in sys.argv)
    try:
        run.main()
    except SignalException as error:
        logger.warning("%s", error)  # the agent ends torchrun so, once the state is saved
        sys.exit(1)
    except ChildFailedError as error:
        if not is_at_fault(error.failures.values()):
            raise
        logger.error("a worker ended with %d: its settings are at fault, see its last lines", EXIT_AT_FAULT)
        sys.exit(EXIT_AT_FAULT)
    finally:
        if standby is not None:
            standby.close()
        rank_lines.flush()


if __name__ == "__main__":
    main()
