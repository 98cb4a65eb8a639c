"""mpirun over the gang without SSH: its remote shell asks the first node, which has the other node run the command.

A guest takes commands over the connection that it made itself to the rendezvous' first node, and nothing listens on it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType

from bootstrap.launchers.meeting import Line, Meeting
from bootstrap.launchers.remote_shell import shell_socket
from bootstrap.processes import descendants

# Exit status of SSH for a connection that failed.
NO_CONNECTION = 255
# Between two looks whether mpirun has ended, s.
POLL_S = 0.2
# Until another node's answer, s.
ANSWER_S = 10.0
# Number of prctl's option in linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36
# From SIGTERM to SIGKILL for what is left of mpirun, s.
END_S = 5.0


class _Guest:
    """Commands that run on another node."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._numbers = itertools.count()
        self._pending: dict[int, Future[int]] = {}
        self._lock, self.is_gone, self._has_failed = threading.Lock(), False, False
        self._has_answered = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, command: str) -> int:
        """Run a command there; returns its exit status."""
        with self._lock:
            if self.is_gone:
                return NO_CONNECTION
            number, ended = next(self._numbers), Future[int]()
            self._pending[number] = ended
        self._line.send({"number": number, "command": command})
        status = ended.result()
        self._has_failed |= status != 0
        return status

    def end(self, status: int) -> None:
        """Tell the guest mpirun's exit status."""
        self._line.send({"end": status})

    def was_there(self) -> bool:
        """Return whether node and daemon lived until mpirun ended; asked once, before ``end``."""
        self._line.send({"alive": True})
        return self._has_answered.wait(ANSWER_S) and not self.is_gone and not self._has_failed

    def _read(self) -> None:
        while (message := self._line.receive()) is not None:
            if "alive" in message:
                self._has_answered.set()
                continue
            with self._lock:
                self._pending.pop(message["number"]).set_result(message["status"])
        with self._lock:
            self.is_gone = True
            for ended in self._pending.values():
                ended.set_result(NO_CONNECTION)
        self._has_answered.set()


def lead(command: Sequence[str], environ: Mapping[str, str], meeting: Meeting) -> int:
    """Run mpirun, and what it asks for on the other nodes; returns its exit status, which the others have too."""
    own, *others = (address for address, _ in meeting.addresses)
    guests = dict(zip(others, map(_Guest, meeting.lines), strict=True))

    class Request(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked = json.loads(self.rfile.readline())
            host, asked_for = asked["host"], asked["command"]
            if host == own:  # Intel MPI asks for its own node too
                status = _run(asked_for, environ)
            else:
                status = guests[host].run(asked_for) if host in guests else NO_CONNECTION
            with suppress(OSError):  # mpirun may have ended its remote shells
                self.wfile.write(f"{status}\n".encode())

    path = shell_socket(environ)
    path.unlink(missing_ok=True)
    _adopt_orphans()
    server = socketserver.ThreadingUnixStreamServer(str(path), Request)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lost: list[str] = []
    process = subprocess.Popen(command, env=environ)
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    # mpirun itself waits for a host that vanished.
    while process.poll() is None and not (lost := [host for host, guest in guests.items() if guest.is_gone]):
        time.sleep(POLL_S)
    status = 1 if lost else _exit_status(process.wait())
    # Open MPI 5.0.11 ends with 0 where it lost a node.
    if status == 0 and (lost := [host for host, guest in guests.items() if not guest.was_there()]):
        status = 1
    if lost:
        sys.stderr.write(f"mpirun lost {', '.join(lost)}\n")
    for guest in guests.values():
        guest.end(status)
    _end_descendants()
    return status


def follow(line: Line, environ: Mapping[str, str]) -> int:
    """Run the first node's commands until its mpirun ends; returns that exit status."""

    def run(number: int, command: str) -> None:
        line.send({"number": number, "status": _run(command, environ)})

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    _adopt_orphans()
    try:
        while (message := line.receive()) is not None:
            if "alive" in message:
                line.send(message)
                continue
            if "end" in message:
                status: int = message["end"]
                return status
            threading.Thread(target=run, args=(message["number"], message["command"]), daemon=True).start()
        sys.stderr.write("the first node, which runs mpirun, is gone\n")
        return 1
    finally:
        _end_descendants()


def _run(command: str, environ: Mapping[str, str]) -> int:
    """Run a command as SSH's server does; what it says is this node's output."""
    done = subprocess.run(["/bin/sh", "-c", command], env=environ, stdin=subprocess.DEVNULL, check=False)
    return _exit_status(done.returncode)


def _exit_status(returned: int) -> int:
    return returned if returned >= 0 else 128 - returned


def _adopt_orphans() -> None:
    """Become the parent of what mpirun or its daemon leave behind: they can die before their ranks."""
    # https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_descendants() -> None:
    """End all processes below this one, with SIGKILL after a while; ranks have sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_S
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.05)
