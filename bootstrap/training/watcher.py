"""Watches for the notices that this machine will be taken away, in a thread that never raises into training.

A notice either asks to stop (spot interruption, Auto Scaling termination, SIGTERM, SIGINT, drain file) or to save
and keep going (rebalance recommendation: early and often false). An unreachable metadata service is neither.

- spot/instance-action, two minutes ahead at best:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- events/recommendations/rebalance: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
- autoscaling/target-lifecycle-state:
  https://docs.aws.amazon.com/autoscaling/ec2/userguide/retrieving-target-lifecycle-state-through-imds.html
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bootstrap.training.environment import seconds_from_environment
from bootstrap.training.imds import Imds, ImdsError

logger = logging.getLogger(__name__)

# Of the two minutes of a spot notice, five seconds are affordable; three small requests to the host cost nothing.
POLL_INTERVAL_S = 5.0
POLL_VARIABLE = "GPUFLEET_IMDS_POLL_S"
# Where nobody answers (a machine outside EC2) it asks less often, and still often enough for a two-minute notice.
UNREACHABLE_FACTOR = 4
DRAIN_FILE_POLL_INTERVAL_S = 0.5
DRAIN_FILE_VARIABLE = "GPUFLEET_DRAIN_FILE"
# The same switch as the AWS SDKs.
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"

SPOT_PATH = "spot/instance-action"
REBALANCE_PATH = "events/recommendations/rebalance"
LIFECYCLE_PATH = "autoscaling/target-lifecycle-state"
# States in which Auto Scaling stops the machine; Detached and Standby leave it running.
LEAVING_STATES = frozenset({"Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated"})


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One reason to act.

    Attributes:
        source: the metadata path, the signal's name or ``drain-file``.
        detail: what came with it, for the log.
    """

    source: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source} ({self.detail})" if self.detail else self.source


class Watcher:
    """Collects notices in the background; training asks it at step boundaries.

    Args:
        imds: metadata client, or None not to ask the metadata service.
        poll_interval_s: seconds between two polls of the metadata service.
        drain_file: launch.sh creates this file to ask for a stop, and learns from it that this machine is leaving.
        signals: take SIGTERM and SIGINT as a request to stop (main thread only); a second SIGINT raises
            KeyboardInterrupt.
    """

    def __init__(
        self,
        imds: Imds | None,
        *,
        poll_interval_s: float = POLL_INTERVAL_S,
        drain_file: Path | None = None,
        signals: bool = True,
    ) -> None:
        self._imds = imds
        self._poll_interval_s = poll_interval_s
        self._drain_file = drain_file
        self._signals = signals
        self._stop: Notice | None = None
        self._save: Notice | None = None
        self._rebalance_seen = ""
        self._unreachable = ""
        self._garbled: set[str] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    @classmethod
    def from_environment(cls) -> Watcher:
        """Watcher of this process; local rank 0 alone asks the metadata service, as every rank learns of a stop."""
        disabled = os.environ.get(DISABLED_VARIABLE, "").lower() == "true"
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        drain = os.environ.get(DRAIN_FILE_VARIABLE)
        return cls(
            Imds() if first and not disabled else None,
            poll_interval_s=seconds_from_environment(POLL_VARIABLE) or POLL_INTERVAL_S,
            drain_file=Path(drain) if drain else None,
        )

    def start(self) -> None:
        """Install the signal handlers and start polling."""
        if self._signals and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._look_at_drain_file()
        if self._imds is not None or self._drain_file is not None:
            self._thread = threading.Thread(target=self._watch, name="interruption-watcher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop polling and put the signal handlers back."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    @property
    def stop_notice(self) -> Notice | None:
        """The first notice that asked to stop, or None."""
        return self._stop

    @property
    def save_notice(self) -> Notice | None:
        """A notice that asks for a checkpoint now, until ``save_done``."""
        return self._save

    def save_done(self) -> None:
        """A checkpoint was taken after ``save_notice``."""
        self._save = None

    def announce_saved(self) -> None:
        """Tell launch.sh that this machine's share of the state is safe and torchrun may be ended."""
        if self._drain_file is not None and self._drain_file.exists():
            self._drain_file.with_suffix(".saved").touch()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._stop is not None and self._stop.source == "SIGINT":
            raise KeyboardInterrupt
        # No logging here: a handler may run inside the logger's own lock.
        self._stop = self._stop or Notice(source=name, detail="")

    def _watch(self) -> None:
        next_poll = 0.0
        while not self._closing.is_set():
            try:
                self._look_at_drain_file()
                if self._imds is not None and time.monotonic() >= next_poll:
                    reached = self.poll_imds(self._imds)
                    next_poll = time.monotonic() + self._poll_interval_s * (1 if reached else UNREACHABLE_FACTOR)
            except Exception:
                logger.exception("interruption watcher failed once; it goes on watching")
            wait_s = DRAIN_FILE_POLL_INTERVAL_S if self._drain_file else self._poll_interval_s
            self._closing.wait(min(wait_s, self._poll_interval_s))

    def poll_imds(self, imds: Imds) -> bool:
        """Ask each path once; returns whether the service answered."""
        reached = True
        for path, take in (
            (SPOT_PATH, self._take_spot),
            (LIFECYCLE_PATH, self._take_lifecycle),
            (REBALANCE_PATH, self._take_rebalance),
        ):
            try:
                value = imds.get(path)
            except ImdsError as error:
                reached = False
                if str(error) != self._unreachable:
                    self._unreachable = str(error)
                    logger.warning("metadata service: %s; not taken as an interruption", error)
                continue
            if value is not None:
                take(value)
        if reached and self._unreachable:
            self._unreachable = ""
            logger.info("metadata service answers again")
        return reached

    def _take_spot(self, value: str) -> None:
        action = _json_field(value, "action")
        if action is None:
            # Something is there and cannot be read: a checkpoint costs little, stopping for nonsense would loop.
            self._ask_save_once(SPOT_PATH, value)
            return
        self._ask_stop(Notice(source=SPOT_PATH, detail=f"{action} at {_json_field(value, 'time') or 'unknown time'}"))

    def _take_lifecycle(self, value: str) -> None:
        if value in LEAVING_STATES:
            self._ask_stop(Notice(source=LIFECYCLE_PATH, detail=value))

    def _take_rebalance(self, value: str) -> None:
        noticed = _json_field(value, "noticeTime") or value
        if noticed != self._rebalance_seen:
            self._rebalance_seen = noticed
            logger.warning("rebalance recommendation of %s: saving a checkpoint and going on", noticed)
            self._save = Notice(source=REBALANCE_PATH, detail=noticed)

    def _ask_save_once(self, path: str, value: str) -> None:
        if value not in self._garbled:
            self._garbled.add(value)
            logger.error("%s says %r, which is not its format: saving a checkpoint and going on", path, value[:200])
            self._save = Notice(source=path, detail="unreadable notice")

    def _ask_stop(self, notice: Notice) -> None:
        if self._stop is None:
            self._stop = notice
            logger.warning("interruption notice: %s", notice)
            if self._drain_file is not None:
                self._drain_file.parent.mkdir(parents=True, exist_ok=True)
                self._drain_file.write_text(f"{notice}\n", encoding="utf-8")

    def _look_at_drain_file(self) -> None:
        if self._stop is None and self._drain_file is not None and self._drain_file.exists():
            self._stop = Notice(source="drain-file", detail=str(self._drain_file))


def _json_field(text: str, field: str) -> str | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    found = value.get(field) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None
