"""Writes docs/cli.md from the commands' own help; ``--check`` fails where the file has drifted."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from optimizer.cli import cli

REFERENCE = Path(__file__).parent.parent / "docs" / "cli.md"
HEADER = "# Command reference\n\nGenerated from the commands' help by `make docs`; do not edit.\n"


def reference() -> str:
    """The whole reference as Markdown."""
    parts = [HEADER, *_command(cli, click.Context(cli, info_name="gpufleet"))]
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context) -> list[str]:
    # A fixed width: the reference must not depend on the terminal it is made in.
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
    text = reference()
    if "--check" in sys.argv[1:]:
        if not REFERENCE.exists() or REFERENCE.read_text(encoding="utf-8") != text:
            sys.exit(f"{REFERENCE.name} has drifted from the commands' help: run `make docs` and commit it")
        return
    REFERENCE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
