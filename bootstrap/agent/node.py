"""The supervised node: what every part of the agent needs while it waits."""

from __future__ import annotations

import os
import subprocess
import time
from types import TracebackType

from bootstrap.agent.commands import BOOTSTRAP
from bootstrap.agent.credentials import TrainingCredentials
from bootstrap.agent.group import GroupClient
from bootstrap.agent.messages import log
from bootstrap.agent.reports import Reports
from bootstrap.agent.settings import Settings
from bootstrap.agent.telemetry import Telemetry
from bootstrap.training.notices import Notice, NoticeFiles
from bootstrap.training.watcher import own_imds

POLL_S = 0.5
# Until a watcher that ended is started again: not twice a second where it cannot run.
WATCH_AGAIN_S = 5.0


class SupervisedNode:
    """Settings, group, reports and notices of this node. A context: the watcher of notices runs in it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notices = NoticeFiles(settings.run_dir / "drain")
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        if settings.train_user:
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
