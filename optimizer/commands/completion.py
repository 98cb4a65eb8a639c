"""``gpufleet completion``: the script that completes commands, flags, models, instance types and regions in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

# Click derives it from the program's name: https://click.palletsprojects.com/en/stable/shell-completion/
VARIABLE = "_GPUFLEET_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="""\b
Example:
  source <(gpufleet completion bash)
  gpufleet completion zsh >> ~/.zshrc
  gpufleet completion fish > ~/.config/fish/completions/gpufleet.fish
"""
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of a shell.

    It completes commands, flags, model presets, instance types, regions and stacks. Bash needs 4.4 or newer.
    """
    complete = get_completion_class(shell)
    assert complete is not None  # one of click's own
    click.echo(complete(click.get_current_context().find_root().command, {}, "gpufleet", VARIABLE).source())
