"""Nsight Systems on demand (gpufleet:nsight): torchrun starts with the variables that make nsys trace a process.

``nsys launch`` gives them to the command that it starts. On SIGTERM it ends at once, with status 0, while its command
goes on (measured with 2022.4.2, docs/operations.md). So nsys starts a process that only waits, and torchrun, with the
variables of that process, stays the agent's own: neither signals nor exit statuses pass through nsys. The commands:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from bootstrap.agent.commands import start_as
from bootstrap.agent.messages import log
from bootstrap.agent.settings import Settings, user_of
from bootstrap.contract.trace import NSYS, NSYS_SESSION

TRACED = "cuda,nvtx,osrt"
# nsys 2022.4.2 starts in 0.2 s and ends in less.
START_LIMIT_S = 30.0
END_LIMIT_S = 5.0
# Writes its environment, which may have tokens, to a file that its user alone reads. Ends with the agent, which holds
# the other end of its standard input.
HOLDER = (
    "import os, pathlib, sys; os.umask(0o077); new = pathlib.Path(sys.argv[1] + '.new'); "
    "new.write_bytes(pathlib.Path('/proc/self/environ').read_bytes()); new.rename(sys.argv[1]); sys.stdin.read()"
)


class Nsight:
    """Session of nsys, which collects nothing until a person asks (training/tracer.py); one an agent."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session = f"gpufleet-{os.getpid()}"
        self._is_wanted = settings.nsight and not settings.image
        self._process: subprocess.Popen[bytes] | None = None
        self._variables: dict[str, str] = {}

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Start the session the first time, and return what torchrun needs beside ``environment``; empty without it."""
        if self._is_wanted:
            self._is_wanted = False
            self._variables = self._start(environment)
        return {} if self.has_ended() else self._variables

    def has_ended(self) -> bool:
        """True where the session is gone: a process started with its variables would end with 1."""
        return self._process is not None and self._process.poll() is not None

    def close(self) -> None:
        """End the session."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self, environment: Mapping[str, str]) -> dict[str, str]:
        settings = self._settings
        program = find_nsys(settings.root, environment["PATH"])
        if not program:
            log("gpufleet:nsight: no nsys on PATH or below /opt/nvidia; training without it")
            return {}
        file = settings.run_dir / "nsight-environment"
        file.unlink(missing_ok=True)
        words = [program, "launch", f"--session-new={self._session}", f"--trace={TRACED}", "--wait=primary"]
        words += ["--show-output=false", settings.python, "-c", HOLDER, str(file)]
        try:
            self._process = start_as(
                user_of(settings.train_user), words, environment, settings.train_dir, stdin=subprocess.PIPE
            )
        except OSError as error:
            log(f"gpufleet:nsight: {program} does not start: {error}; training without it")
            return {}
        until = time.monotonic() + START_LIMIT_S
        while not file.exists():
            if self.has_ended() or time.monotonic() >= until:
                self.close()
                log(f"gpufleet:nsight: {program} does not start; training without it")
                return {}
            time.sleep(0.1)
        log(f"gpufleet:nsight: session {self._session} of {program}")
        pairs = file.read_text(encoding="utf-8", errors="surrogateescape").split("\0")
        given = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        added = {name: value for name, value in given.items() if environment.get(name) != value}
        return {**added, NSYS: program, NSYS_SESSION: self._session}


def find_nsys(root: Path, path: str) -> str:
    """Path of nsys: on PATH, else the newest one below /opt/nvidia; empty where there is none.

    NVIDIA's packages install there: https://docs.nvidia.com/nsight-systems/InstallationGuide/index.html
    """
    installed = root.glob("opt/nvidia/nsight-systems*/*/bin/nsys")
    newest = max(installed, key=lambda file: [int(number) for number in re.findall(r"\d+", file.parts[-3])], default="")
    return shutil.which("nsys", path=path) or str(newest)
