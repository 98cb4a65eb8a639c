"""``gpufleet stop``: save, end every node, and stay at zero until ``gpufleet resume``."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.request import Want
from bootstrap.contract.words import counted
from infra.naming import Names
from optimizer.aws import clients, control, errors
from optimizer.aws.drain import Drain
from optimizer.commands.asking import dry_run_option, end_dry_run
from optimizer.commands.options import one_stack_options
from optimizer.commands.output import say
from optimizer.commands.stack_file import StackFile, caller_of, read_stack, resolve_names
from optimizer.contract.errors import GpufleetError


def ask(names: Names, want: Want, **move: Any) -> bool:
    """Write a request into the stack's bucket; False without a bucket, as there is no controller either.

    A controller without the bucket's key starts no node again, so that stopping needs no request.

    ``move`` is as of ``write_request``: where the run goes on, what other stacks spent.
    """
    s3, caller, now = clients.s3(names.region), caller_of(names.region)[1], datetime.now(UTC)
    try:
        control.write_request(s3, names.bucket, names.control_prefix, want=want, by=caller, now=now, **move)
    except errors.AWS_ERRORS as error:
        if errors.is_not_found(error) or (want == "stop" and errors.is_key_unusable(error)):
            say(f"note: no controller reads a request in {names.bucket}: {errors.reason(error)}", err=True)
            return False
        raise GpufleetError(
            f"the request cannot be written to s3://{names.bucket}: {errors.reason(error)}",
            why="without it the controller would bring the fleet back to what it was",
            next_step=f"use credentials that may put objects under {names.control_prefix}/ of that bucket",
        ) from error
    return True


@click.command(
    epilog="""\b
Example:
  gpufleet stop --stack dev
  gpufleet stop --stack dev --no-wait
"""
)
@one_stack_options
@dry_run_option
@click.option("--no-wait", is_flag=True, help="Do not follow the drain; without a controller it is followed.")
def command(stack: str | None, directory: Path, no_wait: bool) -> None:
    """Save a checkpoint, end every node, and stay at zero until resume.

    Writes control/request.json in the stack's bucket; the controller lifts the nodes' protection and sets the groups'
    size to 0, each node saves and completes its hook. Where the controller does not answer, or a hook is stuck beyond
    its timeout, this command does the same itself: it always ends. Progress is on standard error.
    """
    file = read_stack(stack, directory)
    minutes, names = file.plan.terminate_timeout_s / 60, resolve_names(file)
    end_dry_run(f"stack {file.stack} would save a checkpoint within {minutes:.0f} min, and end {file.plan.fleet}")
    if ask(names, "stop") and no_wait:
        say(f"asked stack {file.stack} to stop; gpufleet status --stack {file.stack} follows it")
    else:
        follow_drain(names, timedelta(minutes=minutes))
        say(
            "No node runs. The rest of the stack costs by the hour (endpoints, key): `gpufleet down --stack "
            f"{file.stack}` ends that too and keeps the checkpoints; `gpufleet resume --stack {file.stack}` goes on "
            "training."
        )


def end_nodes(file: StackFile, moved_to: str = "") -> Names:
    """Ask a stack to stop, and follow its drain; return its names."""
    names = resolve_names(file)
    ask(names, "stop", moved_to=moved_to)
    follow_drain(names, timedelta(seconds=file.plan.terminate_timeout_s))
    return names


def follow_drain(names: Names, save: timedelta) -> None:
    """Follow a stack's drain until no node is left; ``save`` is the limit of a node's last checkpoint."""
    s3 = clients.s3(names.region)
    drain = Drain(
        client=clients.autoscaling(names.region),
        read_state=lambda: control.read_state(s3, names.bucket, names.control_prefix),
        groups=names.groups,
        launch_hook=names.launch_hook,
        terminate_hook=names.terminate_hook,
        save=save,
        now=lambda: datetime.now(UTC),
        sleep=time.sleep,
        say=lambda line: say(f"{datetime.now(UTC):%H:%M:%SZ} {line}", err=True),
    )
    say(f"nodes save, each within {save.total_seconds() / 60:.0f} min, and end", err=True)
    try:
        drain.run()
    except KeyboardInterrupt as error:
        raise GpufleetError(
            "no longer followed; the request to stop stands",
            next_step=f"gpufleet status --stack {names.stack}, or gpufleet stop again",
        ) from error
    if drain.completed:
        say(
            f"{counted(len(drain.completed), 'node')} did not complete the terminate hook "
            f"({', '.join(drain.completed)}): "
            "steps after the last complete checkpoint are lost",
            err=True,
        )
