"""Meeting of a gang's nodes: each learns the addresses of all, over one connection to the first node."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

# torchrun starts the workers of all nodes within seconds of each other.
LIMIT_S = 120.0
RETRY_S = 0.2
# A stranger's connection may not hold up the others.
HELLO_S = 5.0


class Line:
    """Connection that carries JSON messages, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        # A host that vanished says nothing: found within 10 s (https://man7.org/linux/man-pages/man7/tcp.7.html).
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 4), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._file = connection.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message; nothing where the other side is gone."""
        with self._lock, suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Wait for a message; None where the other side is gone, or sends something else."""
        try:
            return json.loads(self._file.readline())
        except (OSError, ValueError):
            return None

    def set_limit(self, seconds: float | None) -> None:
        """Limit the wait for each message."""
        self._connection.settimeout(seconds)


@dataclass(frozen=True)
class Meeting:
    """Address and free port of each node by its rank; lines to the others, of a guest to the first node only."""

    addresses: list[tuple[str, int]]
    lines: list[Line]


def meet(environ: Mapping[str, str], rank: int, count: int) -> Meeting:
    """Wait for all nodes.

    Raises:
        TimeoutError: one is missing.
    """
    port = _free_port()
    if count == 1:
        return Meeting([("127.0.0.1", port)], [])
    run, master = environ["TORCHELASTIC_RUN_ID"], (environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    deadline = time.monotonic() + LIMIT_S
    if rank > 0:
        line = _connect(master, deadline)
        line.send({"run": run, "rank": rank, "port": port})
        told = line.receive()
        if told is None:
            raise TimeoutError(f"the first node, {master[0]}, did not name the others")
        line.set_limit(None)
        return Meeting([(address, number) for address, number in told], [line])
    found: dict[int, tuple[Line, tuple[str, int]]] = {}
    # torchrun found the port free; the program gets another.
    with closing(socket.create_server(("", master[1]))) as server:
        while len(found) < count - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            connection, (peer, *_) = server.accept()
            line = Line(connection)
            line.set_limit(HELLO_S)
            match line.receive():
                case {"run": theirs, "rank": int(other), "port": int(number)} if theirs == run and 0 < other < count:
                    found[other] = (line, (peer, number))
    lines = [found[other][0] for other in range(1, count)]
    addresses = [(master[0], port), *(found[other][1] for other in range(1, count))]
    for line in lines:
        line.set_limit(None)
        line.send(addresses)
    return Meeting(addresses, lines)


def _connect(master: tuple[str, int], deadline: float) -> Line:
    while True:
        try:
            return Line(socket.create_connection(master, timeout=max(0.01, deadline - time.monotonic())))
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)


def _free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port
