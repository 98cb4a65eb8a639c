"""The supervised node: what every part of the agent needs while it waits; its reports to the controller."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bootstrap.agent.commands import BOOTSTRAP, log, output_of
from bootstrap.agent.credentials import TrainingCredentials
from bootstrap.agent.group import GroupClient
from bootstrap.agent.settings import Settings
from bootstrap.training.notices import Notice, NoticeFiles
from bootstrap.training.watcher import own_imds

POLL_S = 0.5
# Until a watcher that ended is started again: not twice a second where it cannot run.
WATCH_AGAIN_S = 5.0
STATSD = ("127.0.0.1", 8125)
INTERVAL_S = 60.0
# Disk space of the output; the CloudWatch agent is at most this far behind.
LOG_BYTES = 2**30


class Telemetry:
    """Once a minute: the job's speed for the CloudWatch agent (../cloudwatch-agent.json), and a limit for the output.

    Whatever fails in it stops nothing.
    """

    def __init__(self, progress_file: Path, log_file: Path) -> None:
        self._progress_file, self._log_file = progress_file, log_file
        self._last: tuple[float, float] | None = None
        self._next_at = time.monotonic() + INTERVAL_S

    def tick(self) -> None:
        """Do the work where a minute is over."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + INTERVAL_S
        if (speed := self.tokens_per_second()) is not None:
            with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as client:
                client.sendto(f"TokensPerSecond:{speed:.6g}|g".encode(), STATSD)
        shorten(self._log_file)

    def tokens_per_second(self) -> float | None:
        """Rate of whole steps since the last call, from the progress file, which rank 0's node has.

        None without a new step, or with unknown tokens (format: training/progress.py).
        """
        try:
            document = json.loads(self._progress_file.read_text(encoding="utf-8"))
            at, tokens = float(document["at"]), float(document["tokens"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        last, self._last = self._last, (at, tokens)
        # Fewer tokens than before: training went back to a checkpoint, and lost steps are no speed.
        if last is None or at <= last[0] or tokens < last[1]:
            return None
        return (tokens - last[1]) / (at - last[0])


def shorten(log_file: Path) -> None:
    """Free the older part of a file that takes twice ``LOG_BYTES``; readers keep their place, as its size stays."""
    with suppress(OSError):
        status = log_file.stat()
        if status.st_blocks * 512 > 2 * LOG_BYTES:
            # https://man7.org/linux/man-pages/man1/fallocate.1.html
            hole = ["--punch-hole", "--offset", "0", "--length", str(status.st_size - LOG_BYTES)]
            output_of(["fallocate", *hole, str(log_file)], 60.0)


class Reports:
    """Sends the node's newest state until the controller's store has it; an older state never follows a newer."""

    def __init__(self, group: GroupClient, delay_s: float) -> None:
        self._group, self._delay_s = group, delay_s
        self._changed = threading.Condition()
        self._newest: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        threading.Thread(target=self._work, name="reports", daemon=True).start()

    def tell(self, name: str, exit_status: int, step: str = "", *, done_steps: int | None = None) -> None:
        """Queue a report for the controller without waiting."""
        with self._changed:
            self._newest = {"state": name, "exit_status": exit_status, "step": step}
            if done_steps is not None:
                self._newest["done_steps"] = done_steps
            self._changed.notify_all()

    def wait(self, limit_s: float) -> None:
        """Return when the newest state is told, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest == self._told, timeout=limit_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest != self._told)
                report = self._newest
            state = report["state"]
            if self._group.report(report):
                if self._told.get("state") != state:
                    log(f"the controller knows that this node is {state}")
                with self._changed:
                    self._told = report
                    self._changed.notify_all()
            else:
                log(f"the controller could not be told that this node is {state}; trying again in {self._delay_s:g} s")
                time.sleep(self._delay_s)


class SupervisedNode:
    """Settings, group, reports and notices of this node; the watcher of notices runs until ``close``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notices = NoticeFiles(settings.run_dir / "drain")
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        if settings.user:
            # Sticky, as /tmp is: the training writes files of its own, and cannot remove or redirect the agent's
            # (https://docs.kernel.org/admin-guide/sysctl/fs.html#protected-symlinks).
            settings.run_dir.chmod(0o1777)
        # Left by an earlier start.
        self.notices.clear()
        settings.progress_file.unlink(missing_ok=True)
        self.group = GroupClient(settings)
        self.credentials = TrainingCredentials(settings, self.group)
        self.reports = Reports(self.group, settings.limits.tell_delay_s)
        self._telemetry = Telemetry(settings.progress_file, settings.log_file)
        self._watcher: subprocess.Popen[bytes] | None = None
        self._watch_again_at = 0.0
        self._keep_watching()

    def close(self) -> None:
        """End the watcher of notices."""
        if self._watcher is not None:
            self._watcher.terminate()
            self._watcher.wait()

    def leaving(self) -> Notice | None:
        """Notice that this node ends."""
        return self.notices.read_stop()

    def tick(self, seconds: float = POLL_S) -> None:
        """Wait, with a watcher of notices."""
        self._keep_watching()
        self._telemetry.tick()
        time.sleep(seconds)

    def rest(self, seconds: float) -> None:
        """Wait until a notice ends this node, at most ``seconds``."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.leaving() is None:
            self.tick(min(POLL_S, left))

    def _keep_watching(self) -> None:
        # A process of its own: a fault in it cannot reach the training.
        if own_imds() is None or (self._watcher is not None and self._watcher.poll() is None):
            return
        if time.monotonic() < self._watch_again_at:
            return
        self._watch_again_at = time.monotonic() + WATCH_AGAIN_S
        try:
            self._watcher = subprocess.Popen(
                ["python3", "-m", "bootstrap.training.watcher", str(self.notices.path)],
                env={**os.environ, "PYTHONPATH": str(BOOTSTRAP.parent)}, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            log(f"the watcher of notices does not start: {error}")
