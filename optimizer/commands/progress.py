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
def steps(title: str, total: int, *, is_patient: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports one of ``total`` steps done; threads may call it.

    Elsewhere than on a terminal, steps of the first ``PATIENCE_S`` are not told where ``is_patient``.
    """
    if not sys.stderr.isatty():
        done, begin = count(1), time.monotonic() + (PATIENCE_S if is_patient else 0.0)

        def tell(event: str) -> None:
            number = next(done)
            if time.monotonic() >= begin:
                click.echo(f"{title}, {number} of {total}: {event}", err=True)

        yield tell
        return
    with _bar(title, total, ticks=False) as (bar, task):
        yield lambda event: bar.update(task, advance=1, description=f"{title}, {event}", refresh=True)


@contextmanager
def relayed(
    title: str, is_done: Callable[[str], bool], count_steps: Callable[[], int]
) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line of another program's progress.

    On a terminal a bar below the lines counts those of which ``is_done`` is true, out of ``count_steps`` (0: unknown).
    """
    if not sys.stderr.isatty():
        yield lambda line: click.echo(line, err=True)
        return
    with _bar(title, count_steps() or None, ticks=True) as (bar, task):

        def show(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False)
            if is_done(line):
                bar.advance(task)

        yield show


@contextmanager
def _bar(title: str, total: int | None, *, ticks: bool) -> Iterator[tuple[Progress, TaskID]]:
    """Draw a bar with the time gone and left; without ``ticks`` no thread redraws it, so that a fork is safe."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, *left, console=console, transient=True, auto_refresh=ticks) as bar:
        yield bar, bar.add_task(title, total=total)


@contextmanager
def patience(title: str) -> Iterator[None]:
    """Say what is worked on where it takes longer than ``PATIENCE_S``."""
    with ExitStack() as stack:

        def say() -> None:
            if not sys.stderr.isatty():
                click.echo(f"{title} ...", err=True)
                return
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(title))

        timer = threading.Timer(PATIENCE_S, say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
