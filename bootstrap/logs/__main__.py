"""Entry point of gpufleet-logs.service: sends new lines every five seconds, and the last ones when it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from bootstrap.logs.journal import read_journal
from bootstrap.logs.upload import BATCH_EVENTS, LogStream, batches
from bootstrap.training.imds import Imds, ImdsError

logger = logging.getLogger(__name__)

UNIT = "gpufleet-train.service"
POLL_S = 5.0
GROUP_VARIABLE = "GPUFLEET_LOG_GROUP"
REGION_VARIABLE = "GPUFLEET_REGION"
# systemd makes the folder and names it: StateDirectory= in the unit.
STATE_VARIABLE = "STATE_DIRECTORY"


class Sender:
    """Sends a unit's lines to a stream, and remembers in a file how far it came."""

    def __init__(self, stream: LogStream, cursor: Path) -> None:
        self._stream, self._cursor = stream, cursor
        self._problem = ""

    def send_new(self) -> None:
        """Send all lines after the last ones; failures are logged once a cause, and the lines stay in the journal."""
        try:
            while lines := read_journal(UNIT, after=self._read_cursor(), limit=BATCH_EVENTS):
                for batch in batches(lines):
                    self._stream.put(batch)
                self._write_cursor(lines[-1].cursor)
        except Exception as error:  # noqa: BLE001 - no network, throttled, no permission: nothing ends the service
            if (problem := f"{type(error).__name__}: {error}") != self._problem:
                logger.warning("the training's output is not sent; the journal keeps it: %s", problem)
                self._problem = problem
            return
        if self._problem:
            logger.info("the training's output is sent again")
            self._problem = ""

    def _read_cursor(self) -> str:
        return self._cursor.read_text(encoding="utf-8") if self._cursor.exists() else ""

    def _write_cursor(self, cursor: str) -> None:
        new = self._cursor.with_suffix(".new")
        new.write_text(cursor, encoding="utf-8")
        new.replace(self._cursor)


def cloudwatch_logs(region: str) -> Any:
    """CloudWatch Logs client whose calls end well within the unit's TimeoutStopSec."""
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=3, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 2})
    return boto3.client("logs", region_name=region, config=config)


def main() -> int:
    """Send until the service is stopped; 0 at once without a log group."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("botocore").setLevel(logging.WARNING)
    group = os.environ.get(GROUP_VARIABLE, "")
    if not group:
        logger.info("no log stream: %s is empty", GROUP_VARIABLE)
        return 0
    try:
        instance = Imds().get("instance-id")
    except ImdsError as error:
        logger.error("the metadata service does not name this instance: %s", error)
        return 1  # systemd starts the service again
    stream = LogStream(cloudwatch_logs(os.environ[REGION_VARIABLE]), group, f"train/{instance}")
    sender = Sender(stream, Path(os.environ[STATE_VARIABLE]) / "logs-cursor")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    while not stopped.wait(POLL_S):
        sender.send_new()
    sender.send_new()  # the unit is stopped after the training's
    return 0


if __name__ == "__main__":
    sys.exit(main())
