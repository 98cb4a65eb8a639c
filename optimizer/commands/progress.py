"""Progress on standard error: plain lines, none for work shorter than ``PATIENCE_S``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import click

# Shorter work says nothing.
PATIENCE_S = 2.0


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports one of ``total`` steps done; threads may call it."""
    done, begin = count(1), time.monotonic() + PATIENCE_S

    def report(event: str) -> None:
        number = next(done)
        if time.monotonic() >= begin:
            click.echo(f"{title}, {number} of {total}: {event}", err=True)

    yield report


@contextmanager
def patience(title: str) -> Iterator[None]:
    """Say what is worked on where it takes longer than ``PATIENCE_S``."""
    timer = threading.Timer(PATIENCE_S, click.echo, (f"{title} ...",), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
