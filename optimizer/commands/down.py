"""``gpufleet down``: save, end every node, and destroy all that costs by the hour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import click

from bootstrap.contract.shared_ceiling import SharedCeiling
from bootstrap.contract.words import counted
from infra.naming import Names
from infra.settings import read_shared_ceiling
from optimizer.aws import clients, control, errors
from optimizer.aws.actuals import read_groups
from optimizer.commands.asking import confirm, consent_options
from optimizer.commands.move import others_of_job
from optimizer.commands.options import one_stack_options, repeat_command
from optimizer.commands.output import say
from optimizer.commands.pulumi_engine import deletes_checkpoints, require_pulumi, take_down
from optimizer.commands.stack_file import StackFile, read_asked, read_stack, resolve_names
from optimizer.commands.stop import end_nodes
from optimizer.contract.errors import GpufleetError


@click.command(
    epilog="""\b
Example:
  gpufleet down
  gpufleet down --stack dev --yes
  gpufleet down --stack dev --no-save
  gpufleet down --stack dev-us-west-2 --everywhere --yes
"""
)
@one_stack_options
@click.option("--everywhere", is_flag=True, help="End also the stacks of other regions that train the same job.")
@consent_options
@click.option("--save/--no-save", default=True, show_default=True, help="First save a checkpoint and end the nodes.")
def command(stack: str | None, directory: Path, everywhere: bool, yes: bool, save: bool) -> None:
    """End a fleet: save a checkpoint, end every node, destroy the stack's resources.

    Nodes end as with gpufleet stop; then pulumi destroy --exclude-protected runs (needs the Pulumi CLI) and
    waits until the last instance is gone, which takes many minutes for large GPU nodes. The bucket with the checkpoints
    and its key stay, and are named, unless the last pulumi up had gpufleet:forceDestroy; gpufleet up goes on from them.
    --everywhere ends all stacks of gpufleet up --regions, or of a run that moved.
    """
    require_pulumi()
    file = read_stack(stack, directory)
    whole = (file, *(others_of_job(file, directory) if everywhere else []))
    running = {stack_file.stack: _count_nodes(stack_file, save=save) for stack_file in whole}
    # The stack with the nodes comes last: its meter counts the others until they end.
    files = [read_stack(name, directory) for name in sorted(running, key=lambda name: running[name])]
    if not yes:
        _ask(files, directory, running, save=save)
    for stack_file in files:
        if save and running[stack_file.stack]:
            end_nodes(stack_file)
        moved_to = _follow_moves(stack_file, directory)
        _write_left(take_down(stack_file.stack, directory), stack_file.stack)
        if shared := read_shared_ceiling(str(stack_file.config.get("gpufleet:sharedCeiling", ""))):
            _end_rows(stack_file, shared)
        if moved_to is not None:
            to, ended = moved_to.stack, stack_file.stack
            with errors.explained(f"stack {to} still counts the cost of {ended}: its bucket cannot be written"):
                s3 = clients.s3(moved_to.region)
                control.end_spend(s3, moved_to.bucket, moved_to.control_prefix, stack=ended, now=datetime.now(UTC))
            say(f"the meter of stack {to} counts nothing more of {ended}")


def _count_nodes(file: StackFile, *, save: bool) -> int:
    """Count the stack's nodes; where AWS does not tell, a GpufleetError if they are to save a checkpoint, else 0."""
    names = resolve_names(file)
    unknown = errors.explained(
        f"whether nodes of stack {file.stack} run is unknown",
        why="they would end without a checkpoint",
        next_step=f"gpufleet down --stack {file.stack}, again, or with --no-save",
    )
    with unknown if save else suppress(*errors.AWS_ERRORS):
        groups = read_groups(clients.autoscaling(names.region), names.groups)
        return sum(max(group.wanted, len(group.nodes)) for group in groups)
    return 0


def _ask(files: Sequence[StackFile], directory: Path, running: Mapping[str, int], *, save: bool) -> None:
    stack = files[-1].stack
    for file in files:
        count = running[file.stack]
        saves = "save a checkpoint and " if save else ""
        nodes = f"{counted(count, 'node')} to {saves}end" if count else "no node runs"
        kept = "DELETES its checkpoints" if deletes_checkpoints(file.stack, directory) else "its checkpoints stay"
        say(f"stack {file.stack} in {file.plan.region}: {nodes}; {kept}")
    confirm(
        "Destroy it?" if len(files) == 1 else "Destroy them?",
        why="the fleet's resources are deleted",
        again=repeat_command({"stack": ["--stack", stack]}),
        nothing_was="changed",
        next_step=f"gpufleet status --stack {stack}",
    )


def _follow_moves(file: StackFile, directory: Path) -> Names | None:
    """Return the stack that counts this one's cost: where its run goes on after moves, as far as a key is usable."""
    found, seen = None, {file.stack}
    while True:
        try:
            request = read_asked(resolve_names(file))
        except GpufleetError as error:
            if not (error.__cause__ and errors.is_key_unusable(error.__cause__)):
                raise
            return found
        if request is None or not request.moved_to or request.moved_to in seen:
            return found
        seen.add(request.moved_to)
        file = read_stack(request.moved_to, directory)
        found = resolve_names(file)


def _end_rows(file: StackFile, shared: SharedCeiling) -> None:
    place = f"s3://{shared.bucket}/{shared.key}"
    try:
        with errors.explained(f"{place} cannot be written"):
            control.end_rows(
                clients.s3(file.plan.region), shared, f"{file.plan.region}/{file.stack}", datetime.now(UTC)
            )
        say(f"stack {file.stack} costs nothing more under the ceiling in {place}")
    except GpufleetError as error:  # other stacks are still to be destroyed
        say(f"note: the stack's row counts on, until you set its stack_usd_per_hour to 0: {error}", err=True)


def _write_left(left: list[str], stack: str) -> None:
    if not left:
        say(f"nothing of stack {stack} is left (its KMS key ends after its waiting period)")
        return
    for resource in left:
        say(f"left: {resource}")
    say(
        f"no hourly cost is left: checkpoints are billed by the GB, their key by the month. gpufleet up PLAN --stack "
        f"{stack} goes on from them; docs/infrastructure.md, 'Checkpoints outlive the fleet', says how to delete them"
    )
