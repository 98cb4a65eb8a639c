"""Writes docs/cli.md from the commands' own help; ``--check`` fails where the file has drifted."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.cli import cli
from optimizer.commands.long_help import SHOWS_ALL
from tools.generated import write_or_check

REFERENCE = Path(__file__).parent.parent / "docs" / "cli.md"
HEADER = "# Command reference\n\nGenerated from the commands' help by `make docs`; do not edit.\n"


def reference() -> str:
    """The whole reference as Markdown."""
    parts = [HEADER, *_command(cli, click.Context(cli, info_name="gpufleet"))]
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context) -> list[str]:
    # A fixed width: the reference must not depend on the terminal it is made in.
    context.meta[SHOWS_ALL] = True
    context.terminal_width = context.max_content_width = 100
    parts = [f"## {context.command_path}\n", "```text", command.get_help(context).rstrip(), "```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            parts += _command(child, click.Context(child, info_name=name, parent=context))
    return parts


def main() -> None:
    """Write the reference, or with --check compare it."""
    write_or_check(REFERENCE, reference(), source="the commands' help")


if __name__ == "__main__":
    main()
