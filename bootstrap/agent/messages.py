"""Lines on stderr, which is a file (../gpufleet-train.service), and the error that ends the agent."""

from __future__ import annotations

import sys
import time


class AgentError(Exception):
    """Reason for the agent to end with 1; systemd starts it again."""


def log(message: str) -> None:
    """Write one line with the time in UTC."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} agent: {message}\n")
    sys.stderr.flush()
