"""``gpufleet resume``: let the controller start the nodes again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from infra.naming import Names
from optimizer.aws import clients, errors
from optimizer.aws.actuals import read_groups
from optimizer.aws.drain import RAISING_PROCESSES
from optimizer.commands.asking import dry_run_option, end_dry_run
from optimizer.commands.options import one_stack_options
from optimizer.commands.output import say
from optimizer.commands.stack_file import read_asked, read_stack, read_state, resolve_names
from optimizer.commands.stop import ask
from optimizer.contract.errors import DataMissingError, GpufleetError

# Without it no node starts, by phase.
_NEEDED = {
    "over-budget": "`pulumi config set gpufleet:ceilingUsd USD && pulumi up`",
    "block-ended": "a new plan: gpufleet stack set PLAN, pulumi up",
}


@click.command(
    epilog="""\b
Example:
  gpufleet resume --stack dev
"""
)
@one_stack_options
@dry_run_option
def command(stack: str | None, directory: Path) -> None:
    """Start a stopped, failed or finished run anew, from its last checkpoint.

    Writes control/request.json in the stack's bucket; the controller starts the nodes within a minute or two. The
    ceiling still binds: a fleet that stopped at it needs a higher gpufleet:ceilingUsd, and `pulumi up`, first.
    """
    file = read_stack(stack, directory)
    stack = file.stack
    names = resolve_names(file)
    request, state = read_asked(names), read_state(names)
    if request and request.moved_to:
        raise GpufleetError(
            f"the run of stack {stack} moved to stack {request.moved_to}",
            why="two stacks that train the same job would each spend up to the ceiling",
            next_step=f"gpufleet move {names.region} --stack {request.moved_to} brings it back",
        )
    end_dry_run(f"the controller of stack {stack} would start {file.plan.fleet} again")
    if let_run(names):
        say(f"asked stack {stack} to run; gpufleet status --stack {stack} follows it")
    if state is None or state.is_silent(datetime.now(UTC)):
        last = "never ticked" if state is None else f"last ticked {state.updated_at:%Y-%m-%d %H:%M:%SZ}"
        say(
            f"note: the controller {last}, and nothing starts without it; `pulumi up --stack {stack}` puts it back",
            err=True,
        )
    elif needed := _NEEDED.get(state.phase):
        say(f"note: the stack is {state.phase}, with {state.spent_usd:,.2f} USD spent; first {needed}", err=True)


def let_run(names: Names, **move: Any) -> bool:
    """Let the groups grow, and ask the controller to run; ``move`` and the answer are as of ``ask``."""
    autoscaling = clients.autoscaling(names.region)
    with errors.explained(f"stack {names.stack} cannot be resumed"):
        groups = read_groups(autoscaling, names.groups)
        if not groups:
            raise DataMissingError(
                f"stack {names.stack} has no Auto Scaling group {names.group} in {names.region}",
                why="there is nothing to start",
                next_step=f"pulumi up --stack {names.stack}",
            )
        # `gpufleet stop` suspends them where no controller answers.
        for group in groups:
            autoscaling.resume_processes(AutoScalingGroupName=group.name, ScalingProcesses=RAISING_PROCESSES)
    return ask(names, "run", **move)
