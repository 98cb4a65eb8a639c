"""Questions to a person before a command spends or deletes."""

from __future__ import annotations

import sys

import click

from optimizer.contract.errors import GpufleetError, InvalidInputError


def require_terminal(*, why: str, next_step: str) -> None:
    """Raise InvalidInputError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise InvalidInputError("nobody can be asked: standard input is no terminal", why=why, next_step=next_step)


def confirm(question: str, *, nothing_was: str, next_step: str = "") -> None:
    """Ask; raise GpufleetError where the answer is no."""
    if not click.confirm(question, err=True):
        raise GpufleetError(f"not confirmed; nothing was {nothing_was}", next_step=next_step)
