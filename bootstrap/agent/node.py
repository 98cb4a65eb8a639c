"""The supervised node: what every part of the agent needs while it waits; its reports to the controller."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from types import TracebackType
from typing import Any

from bootstrap.agent.commands import BOOTSTRAP
from bootstrap.agent.credentials import TrainingCredentials
from bootstrap.agent.group import GroupClient
from bootstrap.agent.messages import log
from bootstrap.agent.settings import Settings
from bootstrap.agent.telemetry import Telemetry
from bootstrap.training.notices import Notice, NoticeFiles
from bootstrap.training.watcher import own_imds

POLL_S = 0.5
# Until a watcher that ended is started again: not twice a second where it cannot run.
WATCH_AGAIN_S = 5.0


class Reports:
    """The newest state, told again and again until that succeeds; an older one never follows a newer."""

    def __init__(self, group: GroupClient, delay_s: float) -> None:
        self._group, self._delay_s = group, delay_s
        self._changed = threading.Condition()
        self._newest: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        threading.Thread(target=self._work, name="reports", daemon=True).start()

    def tell(self, name: str, exit_status: int, step: str = "", *, done_steps: int | None = None) -> None:
        """Have the controller told; returns at once."""
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
    """Settings, group, reports and notices of this node. A context: the watcher of notices runs in it."""

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

    def __enter__(self) -> SupervisedNode:
        self._keep_watching()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.terminate()
            self._watcher.wait()

    def leaving(self) -> Notice | None:
        """Notice that this node ends."""
        return self.notices.read_stop()

    def tick(self) -> None:
        """Wait half a second, with a watcher of notices."""
        self._keep_watching()
        self._telemetry.tick()
        time.sleep(POLL_S)

    def rest(self, seconds: float) -> None:
        """Wait until a notice ends this node, at most ``seconds``."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.leaving() is None:
            self._keep_watching()
            time.sleep(min(POLL_S, left))

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
