"""Questions to a person before a command spends or deletes, and ``--dry-run``, which ends it there."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from optimizer.commands.options import F
from optimizer.commands.output import say
from optimizer.contract.errors import GpufleetError, InvalidInputError

# Key of a context's meta.
_DRY_RUN = "optimizer.commands.asking.dry_run"


# The command only reads, until ``confirm`` or ``end_dry_run`` ends it.
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, is_given: context.meta.update({_DRY_RUN: is_given}),
    help="Say what it would do, and change nothing.",
)


def consent_options(function: F) -> F:
    """Add ``--dry-run`` and ``--yes``, passed to the command as ``yes``; a dry run goes before a yes."""
    return click.option(
        "--yes",
        is_flag=True,
        callback=lambda _, __, is_given: is_given and not is_dry_run(),
        help="Do not ask.",
    )(dry_run_option(function))


def is_dry_run() -> bool:
    """Return whether the running command was given ``--dry-run``."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_DRY_RUN))


def end_dry_run(summary: str) -> None:
    """End a dry run with exit status 0 and a line that sums it up."""
    if is_dry_run():
        say(f"dry run: {summary}")
        click.get_current_context().exit()


def choose_folder(directory: Path) -> Path:
    """Return the folder for the files that a command keeps: in a dry run a temporary one."""
    if not is_dry_run():
        return directory
    return Path(click.get_current_context().with_resource(tempfile.TemporaryDirectory()))


def require_terminal(*, why: str, next_step: str) -> None:
    """Raise InvalidInputError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise InvalidInputError("nobody can be asked: standard input is no terminal", why=why, next_step=next_step)


def confirm(question: str, *, why: str, again: str, nothing_was: str, next_step: str = "") -> None:
    """Ask, where somebody can be asked; raise GpufleetError where the answer is no, and end a dry run."""
    end_dry_run(f"{question} Not asked; nothing was {nothing_was}")
    require_terminal(why=why, next_step=f"{again} --yes")
    if not click.confirm(question, err=True):
        raise GpufleetError(f"not confirmed; nothing was {nothing_was}", next_step=next_step)
