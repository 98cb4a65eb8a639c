"""``gpufleet launch-config``: a plan in another training engine's own format."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.options import OutputFile, plan_arguments, read_plan_argument
from optimizer.commands.output import write_notes
from optimizer.launch_config import ENGINES, launch_config

# The names of optimizer.launch_config.ENGINES, without its imports.
ENGINE_NAMES = ("torchtitan", "accelerate", "deepspeed", "megatron-core")


@click.command(
    name="launch-config",
    epilog="""\b
Example:
  gpufleet launch-config plans.json --engine torchtitan --out gpufleet_plan.py
  gpufleet launch-config plans.json --plan 2 --engine megatron-core > gpufleet_plan.sh
""",
)
@plan_arguments
@click.option("--engine", type=click.Choice(ENGINE_NAMES), required=True, help="Training engine.")
@click.option(
    "--out",
    type=OutputFile(),
    help="File to write.  [default: standard output]",
)
def command(plan: str, plan_number: int, engine: str, out: Path | None) -> None:
    """Write PLAN as another training engine's configuration.

    PLAN is a plan that recommend wrote; - reads standard input. The configuration has the plan's layout, batch,
    activation checkpointing, precision, optimizer, steps and checkpoint interval. The lines that start the engine are
    comments in it, and go to standard error where the format has no comments. An engine that cannot carry out a part
    of the plan is refused, with the engines that can (docs/engines.md).
    """
    chosen = read_plan_argument(plan, plan_number)
    file_name = out.name if out else f"gpufleet_plan{ENGINES[engine].suffix}"
    text, lines = launch_config(chosen, engine, file_name)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
    if out is not None or not ENGINES[engine].comment:
        write_notes(lines)
