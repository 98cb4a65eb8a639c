"""Hosts of a test: network namespaces on one bridge, each with its own address, links to slow and to cut.

https://man7.org/linux/man-pages/man8/ip-netns.8.html
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"
# So slow that the link sets the pace, and not a machine that runs other tests too.
USUAL_MBIT_PER_S = 200.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def missing() -> str:
    """Say what this machine lacks to make hosts; empty where it lacks nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "there is no ip and tc (iproute2)"
    try:
        with hosts(1) as (only,):
            only.limit_towards(only, 1)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class Host:
    """One host; ``outside`` is the bridge's end of its link."""

    namespace: str
    outside: str
    address: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def connect(self) -> None:
        self._tc("qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "htb", "default", "1")
        self.limit(USUAL_MBIT_PER_S)

    def limit(self, mbit_per_s: float) -> None:
        """Limit what this host sends (https://man7.org/linux/man-pages/man8/tc-htb.8.html)."""
        self._set_class("1:1", mbit_per_s)

    def limit_towards(self, other: Host, mbit_per_s: float) -> None:
        """Limit what this host sends to one other."""
        self._set_class("1:2", mbit_per_s)
        match = ("match", "ip", "dst", f"{other.address}/32", "flowid", "1:2")
        self._tc("filter", "add", "dev", INTERFACE, "parent", "1:", "protocol", "ip", "u32", *match)

    def _set_class(self, name: str, mbit_per_s: float) -> None:
        rate = ("htb", "rate", f"{mbit_per_s}mbit", "burst", "16k")
        self._tc("class", "replace", "dev", INTERFACE, "parent", "1:", "classid", name, *rate)

    def _tc(self, *arguments: str) -> None:
        run(*self.command("tc", *arguments))

    def cut(self) -> None:
        """Take the link down: what is sent is lost, and nobody is told."""
        run("ip", "link", "set", self.outside, "down")


@contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Make the hosts, and remove them with all that runs on their links."""
    mark = f"g{os.getpid() % 100000}"
    made = tuple(Host(f"{mark}-{i}", f"{mark}v{i}", f"10.213.7.{i + 1}") for i in range(count))
    bridge = f"{mark}br"
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for host in made:
            run("ip", "netns", "add", host.namespace)
            run("ip", "link", "add", host.outside, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
            run("ip", "link", "set", host.outside, "master", bridge, "up")
            run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
            run(*host.command("ip", "link", "set", INTERFACE, "up"))
            run(*host.command("ip", "link", "set", "lo", "up"))
            host.connect()
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)
            subprocess.run(["ip", "link", "delete", host.outside], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)
