"""Python programs run in forks of a process that has done the imports, which take a process 12 s of a processor.

``Warm.start`` forks a process for the arguments of an interpreter. Each ``subprocess`` call in that process and in its
descendants that starts the same interpreter forks too. Parents, process ids, sessions, signals, open files, arguments
and environment are those of a started interpreter. The imports and the hash seed are not: some tests start real ones,
and a program that replaces itself with ``os.exec`` does.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import inspect
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from bootstrap.processes import descendants
from bootstrap.training.standby import MODULES, TRAINER_MODULES, run_command

ROOT = Path(__file__).parents[1]
TORCHRUN = (*MODULES, "torch.distributed.run")
TRAINER = (*TORCHRUN, *TRAINER_MODULES, "peft")
# A request; the environment is most of it.
REQUEST_BYTES = 2**17
WAIT_S = 200.0


class Started:
    """Process with the methods of ``subprocess.Popen`` that the tests use."""

    def __init__(self, arguments: Sequence[str], status: socket.socket) -> None:
        self.args, self._status = arguments, status
        self.returncode: int | None = None
        status.settimeout(WAIT_S)
        self.pid = int(status.recv(64) or self._is_gone())

    def poll(self) -> int | None:
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._read(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def abort(self) -> None:
        """Have this process and those below it write where their threads are, and kill them."""
        for number in (signal.SIGUSR2, signal.SIGKILL):
            for pid in (*descendants(self.pid), self.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(1.0)
        self.wait(WAIT_S)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.recv(64) or self._is_gone())
            self._status.close()
        return self.returncode

    def _is_gone(self) -> NoReturn:
        raise AssertionError(f"the process that forks is gone; it should have run {self.args}")


class Warm:
    """Process that does imports once and forks."""

    def __init__(self) -> None:
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[bytes],
        cwd: Path = ROOT,
        modules: Sequence[str] = TORCHRUN,
    ) -> Started:
        """Run ``python ARGUMENTS`` as the leader of a new session, after ``modules`` are imported."""
        if self._requests is None:
            self._begin()
        assert self._requests is not None
        request = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd), "modules": list(modules)}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [output.fileno(), theirs.fileno()])
        return Started(arguments, ours)

    def run(self, folder: Path, arguments: Sequence[str], *, modules: Sequence[str] = TORCHRUN, **more: str) -> str:
        """Run ``python ARGUMENTS`` in ``folder`` with ``more`` variables to its end, status 0; returns its output."""
        path, env = folder / "output.txt", {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
        with path.open("wb") as output:
            started = self.start(arguments, env=env, output=output, cwd=folder, modules=modules)
        try:
            status = started.wait(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            started.abort()
            raise AssertionError(f"{arguments} has not ended in {WAIT_S} s: {_text(path)}") from None
        finally:
            started.terminate()
        assert status == 0, _text(path)[-4000:]
        return _text(path)

    def torchrun(self, folder: Path, ranks: int, *arguments: str, **options: Any) -> str:
        """Run ranks of ``python -m ARGUMENTS`` as ``run`` does."""
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *arguments]
        return self.run(folder, command, **options)

    def close(self) -> None:
        """End the process that forks."""
        if self._requests is not None and self._process is not None:
            self._requests.close()
            self._process.kill()
            self._process.wait()

    def _begin(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Variables that libraries read while they are imported.
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                cwd=ROOT, env=os.environ | environment, pass_fds=[theirs.fileno()],
            )  # fmt: skip


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def serve(requests: socket.socket) -> None:
    """Fork for each request until the other end is closed."""
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    statuses: dict[int, socket.socket] = {}
    while True:
        ready = select.select([requests, ended], [], [])[0]
        if ended in ready:
            ended.recv(4096)
            while statuses and (one := os.waitpid(-1, os.WNOHANG))[0]:
                with statuses.pop(one[0]) as status:
                    status.send(str(os.waitstatus_to_exitcode(one[1])).encode())
        if requests in ready:
            data, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 2)
            if not data:
                return
            request = json.loads(data)
            for name in request["modules"]:
                importlib.import_module(name)
            threads = list(Path("/proc/self/task").iterdir())
            assert threading.active_count() == len(threads) == 1, "a fork copies no other thread"
            if not (pid := os.fork()):
                os.setsid()
                os.chdir(request["cwd"])
                with Path(os.devnull).open("rb") as nothing:
                    os.dup2(nothing.fileno(), 0)
                for descriptor in (1, 2):
                    os.dup2(files[0], descriptor)
                popen: Any = subprocess.Popen
                popen.__init__ = _forking(popen.__init__)
                become(request["arguments"], request["env"])
            os.close(files[0])
            statuses[pid] = socket.socket(fileno=files[1])
            statuses[pid].send(str(pid).encode())


def _forking(start: Any) -> Any:
    """Popen's constructor, with a fork where this interpreter would be started."""

    def init(self: Any, args: Any, *more: Any, **options: Any) -> None:
        command = [] if isinstance(args, (str, bytes, os.PathLike)) else [os.fspath(one) for one in args]
        arguments = command[2:] if command[1:2] == ["-u"] else command[1:]
        if command[:1] == [sys.executable] and arguments and (arguments[0] == "-m" or arguments[0][0] != "-"):
            environment = dict(os.environ if options.get("env") is None else options["env"])
            keep = options.get("pass_fds", ())
            # The child runs this when all but the environment is as it will be.
            options["preexec_fn"] = partial(become, arguments, environment, keep)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        start(self, args, *more, **options)

    return init


def become(arguments: Sequence[str], environment: Mapping[str, str], keep: Sequence[int] = ()) -> NoReturn:
    """Run ``python ARGUMENTS`` in this fork and end it as an interpreter ends."""
    code: Any = 1
    try:
        _forget_parent({0, 1, 2, *keep})
        _name_frames()
        faulthandler.register(signal.SIGUSR2)
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [str(Path.cwd()), *filter(None, paths), *LIBRARIES]
        sys.orig_argv = [sys.executable, *arguments]
        try:
            run_command(arguments, environment)
            code = 0
        except Exception:  # noqa: BLE001 - the hook is what an interpreter calls
            sys.excepthook(*sys.exc_info())
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    finally:
        # Ends as multiprocessing ends a fork, with the functions that imports registered too.
        private: Any = threading
        private._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code & 0xFF)


def _name_frames() -> None:
    """Say which module the frames below belong to, and runpy's.

    torchrun's rendezvous asks ``inspect.stack`` in each step, which looks through all modules for each frame of none:
    0.1 s of a processor a step, and a busy machine's nodes took each other for dead.
    """
    modules: dict[str, str] = vars(inspect)["modulesbyfile"]
    modules["<frozen runpy>"] = "runpy"
    frame = inspect.currentframe()
    while frame is not None:
        modules.setdefault(frame.f_code.co_filename, __name__)
        frame = frame.f_back


def _forget_parent(keep: set[int]) -> None:
    # Objects of the warm process are neither collected nor finalized here.
    gc.freeze()
    gc.enable()
    for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - keep:
        with suppress(OSError):  # the listing's own
            os.close(descriptor)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # torchrun's.
    for logger, level in ((logging.getLogger(), logging.WARNING), (logging.getLogger("bootstrap"), logging.NOTSET)):
        logger.handlers.clear()
        logger.setLevel(level)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), encoding="utf-8", write_through=True)


LIBRARIES = [path for path in sys.path if path and Path(path).resolve() != ROOT]

if __name__ == "__main__":
    # Forks find these functions by this module's name, in whatever way it was started.
    serve(socket.socket(fileno=int(sys.argv[1])))
