"""Watches for the notices that this machine will be taken away, in a thread that never raises into training.

A notice either asks to stop (spot interruption, Auto Scaling termination, SIGTERM, SIGINT, drain file) or to save
and keep going (rebalance recommendation: early and often false). An unreachable metadata service is neither.

On a node one process asks the metadata service, whatever is trained and even where nothing is: launch.sh (and before it
node_init.sh) starts this module as a program, which writes the drain file; training processes read it. Started without
launch.sh, a training process asks the service by itself.

- spot/instance-action, two minutes ahead at best:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- events/recommendations/rebalance: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
- autoscaling/target-lifecycle-state:
  https://docs.aws.amazon.com/autoscaling/ec2/userguide/retrieving-target-lifecycle-state-through-imds.html
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from bootstrap.training.drain import SPOT_RESERVE_S, DrainFile, Notice, hook_limit_s, notice_limit_s
from bootstrap.training.environment import seconds_from_environment
from bootstrap.training.imds import Imds, ImdsError

logger = logging.getLogger(__name__)

# Of the two minutes of a spot notice, five seconds are affordable; three small requests to the host cost nothing.
POLL_INTERVAL_S = 5.0
POLL_VARIABLE = "GPUFLEET_IMDS_POLL_S"
# Where nobody answers (a machine outside EC2) it asks less often, and still often enough for a two-minute notice.
UNREACHABLE_FACTOR = 4
DRAIN_FILE_POLL_INTERVAL_S = 0.5
# The same switch as the AWS SDKs.
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"

SPOT_PATH = "spot/instance-action"
REBALANCE_PATH = "events/recommendations/rebalance"
LIFECYCLE_PATH = "autoscaling/target-lifecycle-state"
# States in which Auto Scaling ends the machine. Detached and Standby leave it running, and Warmed:Stopped is what a new
# node of the warm pool is set up for: none goes back there after it has trained (infra/fleet.py).
LEAVING_STATES = frozenset({"Terminated", "Warmed:Terminated"})


class Watcher:
    """Collects notices in the background; training asks it at step boundaries.

    Args:
        imds: metadata client, or None not to ask the metadata service.
        poll_interval_s: seconds between two polls of the metadata service.
        drain_file: notes shared by the processes of this node; with ``imds`` notices are written there, without it they
            are read there.
        answers: this process tells in the drain file when its state is saved; one process a node does.
        signals: take SIGTERM and SIGINT as a request to stop (main thread only); a second SIGINT raises
            KeyboardInterrupt.
    """

    def __init__(
        self,
        imds: Imds | None,
        *,
        poll_interval_s: float = POLL_INTERVAL_S,
        drain_file: DrainFile | None = None,
        answers: bool = False,
        signals: bool = True,
    ) -> None:
        self._imds = imds
        self._poll_interval_s = poll_interval_s
        self._drain_file = drain_file
        self._answers = answers and drain_file is not None
        self._signals = signals
        self._stop: Notice | None = None
        self._save: Notice | None = None
        self._save_seen: Notice | None = None
        self._rebalance_seen = ""
        self._unreachable = ""
        self._garbled: set[str] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    @classmethod
    def from_environment(cls) -> Watcher:
        """Watcher of a training process: of launch.sh's drain file, or of the metadata service where there is none.

        Local rank 0 alone asks the service, as every rank learns of a stop.
        """
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        drain_file = DrainFile.from_environment()
        return cls(
            own_imds() if first and drain_file is None else None,
            poll_interval_s=poll_interval_s(),
            drain_file=drain_file,
            answers=first,
        )

    def start(self) -> None:
        """Install the signal handlers and start polling."""
        if self._signals and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._look_at_drain_file()
        if self._drain_file is not None and self._answers:
            self._drain_file.listen()
        if self._imds is not None or self._drain_file is not None:
            self._thread = threading.Thread(
                target=self.watch, args=(self._closing.is_set,), name="interruption-watcher", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop polling and put the signal handlers back."""
        self._closing.set()
        if self._drain_file is not None and self._answers:
            self._drain_file.stop_listening()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    @property
    def stop_notice(self) -> Notice | None:
        """What asked to stop, or None; of several the one that leaves the least time."""
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
        if self._drain_file is not None and self._answers:
            self._drain_file.saved()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._stop is not None and self._stop.source == "SIGINT":
            raise KeyboardInterrupt
        # No logging here: a handler may run inside the logger's own lock.
        self._stop = self._stop or Notice(source=name, detail="", save_by=time.time() + notice_limit_s())

    def watch(self, until: Callable[[], bool]) -> None:
        """Poll in the calling thread until told to end."""
        next_poll = 0.0
        while not until():
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
        action, when = _json_field(value, "action"), _json_field(value, "time")
        if action is None:
            # Something is there and cannot be read: a checkpoint costs little, stopping for nonsense would loop.
            self._ask_save_once(SPOT_PATH, value)
            return
        save_by = min(time.time() + notice_limit_s(), _unix_seconds(when) - SPOT_RESERVE_S)
        self._ask_stop(Notice(source=SPOT_PATH, detail=f"{action} at {when or 'unknown time'}", save_by=save_by))

    def _take_lifecycle(self, value: str) -> None:
        if value in LEAVING_STATES:
            self._ask_stop(Notice(source=LIFECYCLE_PATH, detail=value, save_by=time.time() + hook_limit_s()))

    def _take_rebalance(self, value: str) -> None:
        noticed = _json_field(value, "noticeTime") or value
        if noticed != self._rebalance_seen:
            self._rebalance_seen = noticed
            logger.warning("rebalance recommendation of %s: saving a checkpoint and going on", noticed)
            self._ask_save(Notice(source=REBALANCE_PATH, detail=noticed))

    def _ask_save_once(self, path: str, value: str) -> None:
        if value not in self._garbled:
            self._garbled.add(value)
            logger.error("%s says %r, which is not its format: saving a checkpoint and going on", path, value[:200])
            self._ask_save(Notice(source=path, detail="unreadable notice"))

    def _ask_save(self, notice: Notice) -> None:
        self._save = self._save_seen = notice
        if self._drain_file is not None:
            self._drain_file.ask_save(notice)

    def _ask_stop(self, notice: Notice) -> None:
        before = self._stop
        # The same notice at every poll must not push its own limit on; a spot notice after a scale-in shortens it.
        if before is not None and (before.source == notice.source or before.save_by <= notice.save_by):
            return
        self._stop = notice
        logger.warning("interruption notice: %s", notice)
        if self._drain_file is not None:
            self._drain_file.ask(notice)

    def _look_at_drain_file(self) -> None:
        if self._drain_file is None or self._imds is not None:
            return
        stop, save = self._drain_file.read(), self._drain_file.read_save()
        if stop is not None and (self._stop is None or stop.save_by < self._stop.save_by):
            self._stop = stop
        if save is not None and save != self._save_seen:
            self._save = self._save_seen = save


def own_imds() -> Imds | None:
    """This machine's metadata service, or None where it is not to be asked."""
    return None if os.environ.get(DISABLED_VARIABLE, "").lower() == "true" else Imds()


def poll_interval_s() -> float:
    """Seconds between two looks at the metadata service."""
    return seconds_from_environment(POLL_VARIABLE) or POLL_INTERVAL_S


def _json_field(text: str, field: str) -> str | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    found = value.get(field) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _unix_seconds(text: str | None) -> float:
    """Time of a spot notice, like 2026-11-21T16:02:00Z; infinite where it is not one."""
    try:
        return datetime.fromisoformat((text or "").replace("Z", "+00:00")).timestamp()
    except ValueError:
        return float("inf")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m bootstrap.training.watcher``."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.training.watcher",
        description="Writes the drain file when this node is taken away; ends with the process that started it.",
    )
    parser.add_argument("drain_file", type=Path)
    parser.add_argument("--once", action="store_true", help="end when a stop is asked for")
    parser.add_argument("--ask", metavar="WHY", help="ask for a stop now, and end")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="watcher: %(message)s")
    drain_file = DrainFile(options.drain_file)
    if options.ask:
        drain_file.ask(Notice(source=options.ask, detail="", save_by=time.time() + notice_limit_s()))
        return 0
    imds = own_imds()
    if imds is None:
        logger.warning("%s is true: nobody watches for notices", DISABLED_VARIABLE)
        return 0
    watcher = Watcher(imds, poll_interval_s=poll_interval_s(), drain_file=drain_file, signals=False)
    parent = os.getppid()
    watcher.watch(lambda: os.getppid() != parent or (options.once and watcher.stop_notice is not None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
