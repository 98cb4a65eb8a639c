"""``python -m bootstrap.logs.relay INSTANCE`` passes standard input on, line by line, and sends it to the log stream.

For what a node does before gpufleet-logs.service runs: its lines come where the training's will.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from bootstrap.logs.journal import Line
from bootstrap.logs.upload import GROUP_VARIABLE, LogStream
from bootstrap.service import REGION_VARIABLE, log_to_journal, make_client

logger = logging.getLogger(__name__)


def main() -> int:
    """Relay to the end of the input; after a failed call, pass on only: a node's set-up never waits for its log."""
    log_to_journal()
    group, instance = os.environ.get(GROUP_VARIABLE, ""), sys.argv[1]
    sends = bool(group and instance)
    stream = None
    for text in sys.stdin:
        sys.stdout.write(text)
        sys.stdout.flush()
        if not sends:
            continue
        try:
            if stream is None:
                region = os.environ[REGION_VARIABLE]
                client = make_client("logs", region, connect_timeout_s=3, read_timeout_s=5, attempts=3)
                stream = LogStream.of_node(client, group, instance)
            stream.put([Line(text=text.rstrip("\n"), at_ms=time.time_ns() // 10**6, cursor="")])
        except Exception as error:  # noqa: BLE001 - no network, throttled, no permission
            sends = False
            logger.warning("lines are no longer sent to %s: %s: %s", group, type(error).__name__, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
