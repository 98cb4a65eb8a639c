"""A pretended node: the bootstrap's scripts, fake tools, and a folder for the file system's root."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BOOTSTRAP = HERE.parents[1] / "bootstrap"
HEALTHY = HERE / "healthy"

# Tools that would touch the machine, AWS or the network.
FAKES = (
    "apt-get", "apt-mark", "aws", "blkid", "chown", "curl", "df", "dmesg", "docker", "dpkg", "dpkg-query",
    "fi_info", "gpg", "id", "iptables", "logger", "lsblk", "mdadm", "mkfs.xfs", "modprobe", "mount", "mount.lustre",
    "mountpoint", "nvidia-ctk", "nvidia-smi", "python3", "sha256sum", "shutdown", "snap", "systemctl", "timedatectl",
    "uname", "useradd", "wipefs",
)  # fmt: skip
# Harmless tools. No other tool is on PATH: a script that calls one fails its case.
REAL = (
    "awk", "basename", "bash", "cat", "chmod", "cp", "date", "dirname", "env", "find", "flock", "grep", "gzip", "head",
    "install", "mkdir", "mktemp", "mv", "rm", "sed", "setsid", "sleep", "sort", "tail", "tar", "tee", "timeout",
    "touch", "tr", "uniq", "wc",
)  # fmt: skip


def in_order(folder: str) -> list[str]:
    """The scripts of a folder that node_init.sh runs, in its order."""
    texts = {path.stem: path.read_text() for path in (BOOTSTRAP / folder).glob("*.sh")}
    orders = {name: re.findall(r"^# Order: (\d+)$", text, re.MULTILINE) for name, text in texts.items()}
    numbers = {int(order[0]): name for name, order in orders.items() if order}
    assert len(numbers) == sum(map(bool, orders.values())), f"two scripts of {folder}/ have one number"
    return [numbers[number] for number in sorted(numbers)]


@dataclass(frozen=True)
class Ended:
    """Exit code and output (stdout and stderr together) of one run."""

    exit_code: int
    output: str


class Node:
    """A node in ``folder``, healthy but for what ``case`` overlays (its input/ folder)."""

    def __init__(
        self,
        folder: Path,
        case: Path,
        *,
        node_env: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
        real: Sequence[str] = (),
        absent: Sequence[str] = (),
        mounted: Sequence[str] = (),
    ) -> None:
        self.root, self.state, self._case = folder / "root", folder / "state", case
        self.bootstrap = self.root / "opt/gpufleet/bootstrap"
        self.calls_file = self.state / "calls"
        self._bin = folder / "bin"
        for new in (self.state, self._bin):
            new.mkdir(parents=True)
        shutil.copytree(HEALTHY / "root", self.root)
        for path in without:
            shutil.rmtree(self.root / path) if (self.root / path).is_dir() else (self.root / path).unlink()
        if (case / "input/root").is_dir():
            shutil.copytree(case / "input/root", self.root, dirs_exist_ok=True)
        self._copy_bootstrap()
        self._write_node_env(node_env or {})
        self.calls_file.touch()
        (self.state / "services").touch()
        (self.state / "mounts").write_text("".join(f"{self.root}/{path}\n" for path in mounted))
        for tool in FAKES:
            if tool not in (*real, *absent):
                (self._bin / tool).symlink_to(HERE / "fake.sh")
        for tool in (*REAL, *real):
            # Not a version manager's shim, which needs more tools.
            program = os.path.realpath(sys.executable) if tool == "python3" else shutil.which(tool)
            assert program, f"these tests need {tool}"
            (self._bin / tool).symlink_to(program)

    def _copy_bootstrap(self) -> None:
        self.bootstrap.mkdir(parents=True)
        for path in BOOTSTRAP.iterdir():
            if path.is_file():
                shutil.copy(path, self.bootstrap)
        for name in ("agent", "contract", "steps", "checks", "training"):
            shutil.copytree(BOOTSTRAP / name, self.bootstrap / name, ignore=shutil.ignore_patterns("__pycache__"))

    def _write_node_env(self, changes: Mapping[str, str]) -> None:
        lines = dict(line.split("=", 1) for line in (HEALTHY / "node.env").read_text().splitlines())
        lines |= changes
        etc = self.root / "etc/gpufleet"
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "node.env").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))

    def replace(self, script: str, body: str) -> None:
        """Replace ``script``, in the same place of the order."""
        path = self.bootstrap / script
        order = re.findall(r"^# Order: .*$", path.read_text() if path.exists() else "", re.MULTILINE)
        path.write_text("\n".join(["#!/usr/bin/env bash", *order, body, ""]))
        path.chmod(0o755)

    def command(self, command: str) -> list[str]:
        """Argument list of a script of the bootstrap with its arguments."""
        script, *arguments = command.split()
        return [str(self.bootstrap / script), *arguments]

    def environment(self, settings: Mapping[str, str] | None = None) -> dict[str, str]:
        """Whole environment of a run; this process gives the folder for temporary files only."""
        return {
            "PATH": str(self._bin),
            "ROOT": str(self.root),
            "GPUFLEET_INSTANCE_ID": "i-0123456789abcdef0",
            "RETRY_DELAY_S": "0",
            "LEAVE_LIMIT_S": "60",
            "FAKE_CALLS": str(self.calls_file),
            "FAKE_CASE": str(self._case),
            "FAKE_HEALTHY": str(HEALTHY),
            "FAKE_STATE": str(self.state),
            "FAKE_SCRIPT": str(HERE / "fake.sh"),
            "FAKE_PYTHON": sys.executable,
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            **(settings or {}),
        }

    def run(self, command: str, settings: Mapping[str, str] | None = None) -> Ended:
        """Run ``command`` as root would."""
        done = subprocess.run(
            self.command(command),
            env=self.environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return Ended(done.returncode, done.stdout)

    def kill_leftovers(self) -> None:
        """Kill the remains of a killed run until none holds node_init.sh's lock, as after a reboot. One look at /proc
        is not enough: the environment of a process that is just starting reads as empty."""
        mark = f"FAKE_STATE={self.state}".encode()
        lock = self.root / "var/lib/gpufleet/lock"
        while subprocess.run(["flock", "--nonblock", lock, "true"]).returncode:
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if mark in (process / "environ").read_bytes().split(b"\0"):
                        handle = os.pidfd_open(int(process.name))
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                        os.close(handle)

    @property
    def calls(self) -> list[str]:
        """Calls of the fake tools, in order, with a real node's paths."""
        return self.calls_file.read_text().replace(str(self.root), "").splitlines()
