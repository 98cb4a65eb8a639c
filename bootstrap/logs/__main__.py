"""Entry point of gpufleet-logs.service: sends new lines every five seconds, and the last ones when it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from bootstrap.logs.journal import read_journal
from bootstrap.logs.ranks import Ranks
from bootstrap.logs.upload import BATCH_EVENTS, GROUP_VARIABLE, LogStream, batches
from bootstrap.service import REGION_VARIABLE, Failures, log_to_journal, make_client
from bootstrap.training.imds import Imds, ImdsError

logger = logging.getLogger(__name__)

UNIT = "gpufleet-train.service"
POLL_S = 5.0
# systemd makes the folder and names it: StateDirectory= in the unit.
STATE_VARIABLE = "STATE_DIRECTORY"


class Sender:
    """Sends a unit's lines to a stream, and remembers in a file how far it came."""

    def __init__(self, stream: LogStream, cursor: Path) -> None:
        self._stream, self._cursor, self._ranks = stream, cursor, Ranks()
        self._failures = Failures(
            logger,
            failing="the training's output is not sent; the journal keeps it",
            again="the training's output is sent again",
        )

    def send_new(self) -> None:
        """Send all lines after the last ones; failures are logged once a cause, and the lines stay in the journal."""
        with self._failures.caught():
            while lines := read_journal(UNIT, after=self._read_cursor(), limit=BATCH_EVENTS):
                told = [replace(line, text=self._ranks.prefixed(line.text, line.process)) for line in lines]
                for batch in batches(told):
                    self._stream.put(batch)
                self._write_cursor(lines[-1].cursor)

    def _read_cursor(self) -> str:
        return self._cursor.read_text(encoding="utf-8") if self._cursor.exists() else ""

    def _write_cursor(self, cursor: str) -> None:
        new = self._cursor.with_suffix(".new")
        new.write_text(cursor, encoding="utf-8")
        new.replace(self._cursor)


def main() -> int:
    """Send until the service is stopped; 0 at once without a log group."""
    log_to_journal()
    group = os.environ.get(GROUP_VARIABLE, "")
    if not group:
        logger.info("no log stream: %s is empty", GROUP_VARIABLE)
        return 0
    try:
        instance = Imds().get("instance-id") or ""
    except ImdsError as error:
        logger.error("the metadata service does not name this instance: %s", error)
        return 1  # systemd starts the service again
    # Calls end well within the unit's TimeoutStopSec.
    client = make_client("logs", os.environ[REGION_VARIABLE], connect_timeout_s=3, read_timeout_s=5, attempts=2)
    sender = Sender(LogStream.of_node(client, group, instance), Path(os.environ[STATE_VARIABLE]) / "logs-cursor")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    while not stopped.wait(POLL_S):
        sender.send_new()
    sender.send_new()  # the unit is stopped after the training's
    return 0


if __name__ == "__main__":
    sys.exit(main())
