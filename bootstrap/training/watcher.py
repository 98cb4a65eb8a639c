"""Watcher for notices that this node ends, in a thread that never raises into training.

On a node one process of node_init.sh, then of the agent, asks the metadata service and writes the notice files, which
training processes read. The notices:

- https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html (early and often false)
- https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/viewing_scheduled_events.html (days ahead; the controller replaces
  the node)
- https://docs.aws.amazon.com/autoscaling/ec2/userguide/retrieving-target-lifecycle-state-through-imds.html
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
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from bootstrap.training.environment import positive_number
from bootstrap.training.imds import Imds, ImdsError
from bootstrap.training.notices import NEVER, SPOT_RESERVE_S, Notice, NoticeFiles, hook_limit_s, notice_limit_s

logger = logging.getLogger(__name__)

# Poll every 5 s: a spot notice comes 2 min before the end.
POLL_INTERVAL_S = 5.0
POLL_VARIABLE = "GPUFLEET_IMDS_POLL_S"
FILE_POLL_INTERVAL_S = 0.5
# The AWS SDKs' own switch.
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"

SPOT_PATH = "spot/instance-action"
REBALANCE_PATH = "events/recommendations/rebalance"
MAINTENANCE_PATH = "events/maintenance/scheduled"
LIFECYCLE_PATH = "autoscaling/target-lifecycle-state"
# State in which Auto Scaling ends the machine. Detached and Standby leave it running.
LEAVING_STATE = "Terminated"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_mask = threading.local()  # signals that a thread blocked before its fork


@dataclass(eq=False)
class Watcher:
    """Collects notices in the background; training asks for them at step boundaries.

    Args:
        files: notice files of this node; written with ``imds``, read without.
        answers: this process confirms its save in ``files``; one process a node does.
        signals: SIGTERM and SIGINT ask to stop (main thread only); a second SIGINT raises KeyboardInterrupt.
    """

    imds: Imds | None
    _: KW_ONLY
    poll_interval_s: float = POLL_INTERVAL_S
    files: NoticeFiles | None = None
    answers: bool = False
    signals: bool = True
    stop_notice: Notice | None = field(default=None, init=False)
    save_notice: Notice | None = field(default=None, init=False)
    _last_save_notice: Notice | None = field(default=None, init=False)
    _last_advance: dict[str, str] = field(default_factory=dict, init=False)
    _problem: str = field(default="", init=False)
    _closing: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _previous_handlers: dict[int, Any] = field(default_factory=dict, init=False)
    _pid: int = field(default_factory=os.getpid, init=False)

    @classmethod
    def from_environment(cls) -> Watcher:
        """Watcher of the agent's notice files; without them local rank 0 watches the metadata service."""
        _ = notice_limit_s(), hook_limit_s()  # a wrong value is an error now, and would be one amid a notice
        is_first, files = os.environ.get("LOCAL_RANK", "0") == "0", NoticeFiles.from_environment()
        imds = own_imds() if is_first and files is None else None
        return cls(imds, poll_interval_s=poll_interval_s(), files=files, answers=is_first)

    def start(self) -> None:
        """Install the signal handlers and start polling."""
        self._pid = os.getpid()  # a launcher may have forked since the watcher was made
        if self.signals and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._read_files()
        if self.files is not None and self.answers:
            self.files.path.parent.mkdir(parents=True, exist_ok=True)
            self.files.listener.touch()
        if self.imds is not None or self.files is not None:
            self._thread = threading.Thread(
                target=self.watch, args=(self._closing.is_set,), name="interruption-watcher", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop polling and restore the signal handlers."""
        self._closing.set()
        if self.files is not None and self.answers:
            self.files.listener.unlink(missing_ok=True)
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._previous_handlers.clear()

    def announce_saved(self) -> None:
        """Tell the agent that this node's share of the state is saved: torchrun may end."""
        if self.files is not None and self.answers and self.files.path.exists():
            self.files.saved.touch()

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Poll in the calling thread until ``is_over``."""
        next_poll = 0.0
        while not is_over():
            try:
                self._read_files()
                if self.imds is not None and time.monotonic() >= next_poll:
                    self.poll_imds(self.imds)
                    next_poll = time.monotonic() + self.poll_interval_s
            except Exception:
                logger.exception("interruption watcher failed once; it goes on watching")
            wait_s = FILE_POLL_INTERVAL_S if self.files else self.poll_interval_s
            self._closing.wait(min(wait_s, self.poll_interval_s))

    def poll_imds(self, imds: Imds) -> None:
        """Ask for each path once."""
        problem = ""
        for path in (SPOT_PATH, LIFECYCLE_PATH, REBALANCE_PATH, MAINTENANCE_PATH):
            try:
                value = imds.get(path)
            except ImdsError as error:
                problem = str(error)
                continue
            if value is not None:
                self._take(path, value)
        if problem and problem != self._problem:
            logger.warning("metadata service: %s; not taken as an interruption", problem)
        self._problem = problem

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._pid:  # called by a handler that a forked child has kept
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and self.stop_notice is not None and self.stop_notice.source == "SIGINT":
            raise KeyboardInterrupt
        # No logging here: a handler may run inside the logger's own lock.
        self.stop_notice = self.stop_notice or Notice(source=name, detail="", save_by=time.time() + notice_limit_s())

    def _take(self, path: str, value: str) -> None:
        """Stop for a notice that ends the node; for a notice that does not, save once and go on."""
        try:
            document = json.loads(value)
        except ValueError:
            document = None
        fields = document if isinstance(document, dict) else {}
        if path == LIFECYCLE_PATH:
            if value == LEAVING_STATE:
                self._ask_stop(Notice(source=path, detail=value, save_by=time.time() + hook_limit_s()))
            return
        if path == SPOT_PATH and isinstance(action := fields.get("action"), str):
            when = str(fields.get("time") or "unknown time")
            save_by = min(time.time() + notice_limit_s(), _unix_seconds(when) - SPOT_RESERVE_S)
            self._ask_stop(Notice(source=path, detail=f"{action} at {when}", save_by=save_by))
            return
        # After a spot notice in no known format torchrun would start a run that ended here again and again.
        detail = str(fields.get("noticeTime") or repr(value[:200]))
        if path == MAINTENANCE_PATH:
            events = [event for event in document if isinstance(event, dict)] if isinstance(document, list) else []
            active = [event for event in events if event.get("State") == "active"]
            detail = "; ".join(f"{event.get('Code')} from {event.get('NotBefore')}" for event in active)
        if detail and detail != self._last_advance.get(path):
            self._last_advance[path] = detail
            logger.warning("%s says %s: saving a checkpoint and going on", path, detail)
            self._ask_save(Notice(source=path, detail=detail))

    def _ask_save(self, notice: Notice) -> None:
        self.save_notice = self._last_save_notice = notice
        if self.files is not None and self.imds is not None:
            self.files.write_save(notice)

    def _ask_stop(self, notice: Notice) -> None:
        # A later poll must not extend a notice's limit; a spot notice after a scale-in shortens it.
        if self.stop_notice is not None and self.stop_notice.save_by <= notice.save_by:
            return
        self.stop_notice = notice
        logger.warning("interruption notice: %s", notice)
        if self.files is not None and self.imds is not None:
            self.files.write_stop(notice)

    def _read_files(self) -> None:
        if self.files is None or self.imds is not None:
            return
        if (stop := self.files.read_stop()) is not None:
            self._ask_stop(stop)
        if (save := self.files.read_save()) is not None and save != self._last_save_notice:
            self._ask_save(save)


def _hold_signals() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _give_handlers_back() -> None:
    """Give a forked child the signal handlers from before the watcher's.

    ``Process.terminate`` and a leaving ``multiprocessing.Pool`` send their children SIGTERM and wait for their end.
    """
    for number in _SIGNALS:
        handler: Any = signal.getsignal(number)
        while isinstance(watcher := getattr(handler, "__self__", None), Watcher):
            handler = watcher._previous_handlers.get(number)
            signal.signal(number, handler or signal.SIG_DFL)
    _release_signals()


# Blocked meanwhile, so that a signal to a child of some microseconds finds the right handler too.
os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_give_handlers_back)


def own_imds() -> Imds | None:
    """This machine's metadata service, or None where it is switched off."""
    return None if os.environ.get(DISABLED_VARIABLE, "").lower() == "true" else Imds()


def poll_interval_s() -> float:
    """Seconds between two polls of the metadata service."""
    return positive_number(POLL_VARIABLE) or POLL_INTERVAL_S


def _unix_seconds(text: str) -> float:
    """Unix seconds of a spot notice's time, like 2026-11-21T16:02:00Z; NEVER of another text."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return NEVER


def main(arguments: list[str] | None = None) -> int:
    """Run as ``python -m bootstrap.training.watcher``."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.training.watcher",
        description="Writes the drain file when this node is about to end; exits with the process that started it.",
    )
    parser.add_argument("drain_file", type=Path)
    parser.add_argument("--once", action="store_true", help="exit after a notice that asks to stop")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="watcher: %(message)s")
    files = NoticeFiles(options.drain_file)
    imds = own_imds()
    if imds is None:
        logger.warning("%s is true: nobody watches for notices", DISABLED_VARIABLE)
        return 0
    watcher = Watcher(imds, poll_interval_s=poll_interval_s(), files=files, signals=False)
    parent = os.getppid()
    watcher.watch(lambda: os.getppid() != parent or (options.once and watcher.stop_notice is not None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
