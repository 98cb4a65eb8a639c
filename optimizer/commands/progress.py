"""Progress on standard error: a bar or a spinner in a terminal, elsewhere one plain line an event."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import click

# Shorter work says nothing.
PATIENCE_S = 2.0


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports one of ``total`` steps done; threads may call it."""
    if not sys.stderr.isatty():
        done = count(1)
        yield lambda event: click.echo(f"{title}, {next(done)} of {total}: {event}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda event: bar.update(task, advance=1, description=f"{title}, {event}")


@contextmanager
def patience(title: str, *, after_s: float = PATIENCE_S) -> Iterator[None]:
    """Say what is worked on where it takes longer than ``after_s``."""
    with ExitStack() as stack:

        def say() -> None:
            if not sys.stderr.isatty():
                click.echo(f"{title} ...", err=True)
                return
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(title))

        timer = threading.Timer(after_s, say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
