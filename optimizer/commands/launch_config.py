"""``gpufleet launch-config``: a plan in another training engine's own format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import click

from optimizer.commands.options import OutputFile, parse_plan_argument, plan_arguments
from optimizer.commands.output import write_notes
from optimizer.contract.plan import FleetPlan, PlanError, read_plan
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
    of the plan is refused, with the plans of PLAN and the engines that can (docs/engines.md).
    """
    chosen, answer = parse_plan_argument(
        plan, lambda text, origin: (read_plan(text, plan_number=plan_number, origin=origin), _plans(text))
    )
    file_name = out.name if out else f"gpufleet_plan{ENGINES[engine].suffix}"
    text, lines = launch_config(chosen, engine, file_name, answer)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
    if out is not None or not ENGINES[engine].comment:
        write_notes(lines)


def _plans(text: str) -> Iterator[FleetPlan]:
    """Plans of an answer, read one by one as a refusal asks for them."""
    for number in itertools.count(1):
        try:
            yield read_plan(text, plan_number=number)
        except PlanError:
            return
