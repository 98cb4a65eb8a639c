"""Progress on standard error: a bar or a spinner in a terminal, elsewhere one plain line an event."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Shorter work says nothing.
PATIENCE_S = 2.0


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports one of ``total`` steps done; threads may call it.

    Elsewhere than on a terminal, steps of the first ``PATIENCE_S`` print nothing.
    """
    if not sys.stderr.isatty():
        done, begin = count(1), time.monotonic() + PATIENCE_S

        def tell(event: str) -> None:
            number = next(done)
            if time.monotonic() >= begin:
                click.echo(f"{title}, {number} of {total}: {event}", err=True)

        yield tell
        return
    with _bar(title, total, ticks=False) as (bar, task):
        yield lambda event: bar.update(task, advance=1, description=f"{title}, {event}", refresh=True)


@contextmanager
def relayed(title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line of another's progress; a terminal shows the time gone below the lines."""
    if not sys.stderr.isatty():
        yield lambda line: click.echo(line, err=True)
        return
    with _bar(title, None, ticks=True) as (bar, _):
        yield lambda line: bar.console.print(line, markup=False, highlight=False)


@contextmanager
def _bar(title: str, total: int | None, *, ticks: bool, redirect: bool = True) -> Iterator[tuple[Progress, TaskID]]:
    """Draw a bar with the time left, or without a ``total`` a spinner, both with the time gone.

    Without ``ticks`` no thread redraws it, so that a fork is safe. Lines that are printed meanwhile go above it by
    rich's stand-ins for the streams (``redirect``), which have no file below them, as click.echo needs.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = Progress.get_default_columns() if total else (SpinnerColumn(), "{task.description}")
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=ticks,
        redirect_stdout=redirect,
        redirect_stderr=redirect,
    ) as bar:
        yield bar, bar.add_task(title, total=total)


@contextmanager
def patience(title: str) -> Iterator[None]:
    """Say what is worked on where it takes longer than ``PATIENCE_S``."""
    begun = time.monotonic()  # rich's clock too
    with ExitStack() as stack:

        def say() -> None:
            if not sys.stderr.isatty():
                click.echo(f"{title} ...", err=True)
                return
            bar, task = stack.enter_context(_bar(title, None, ticks=True, redirect=False))
            bar.tasks[task].start_time = begun

        timer = threading.Timer(PATIENCE_S, say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
