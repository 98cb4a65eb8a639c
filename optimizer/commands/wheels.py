"""``gpufleet stack wheels``: pack the Python packages that a stack's nodes install offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from infra.images import brings_torch
from infra.settings import ConfigError
from infra.wheels import Wanted, pack, wheels_needed
from optimizer.commands.options import one_stack_options
from optimizer.commands.output import say
from optimizer.commands.preflight import read_settings
from optimizer.commands.stack_file import WHEELS_KEY, StackFile, change_stack_file, read_stack
from optimizer.contract.errors import GpufleetError, InvalidInputError


@click.command(
    epilog="""\b
Example:
  gpufleet stack wheels --stack dev
  pulumi config set gpufleet:requirements requirements.txt --stack dev && gpufleet stack wheels --stack dev
"""
)
@one_stack_options
@click.option("--force", is_flag=True, help="Pack also where the image has all that the nodes need.")
def command(stack: str | None, directory: Path, force: bool) -> None:
    """Download the wheels that a stack's nodes need beyond their image, and name the archive in gpufleet:wheels.

    Nodes in private subnets reach no package index: they install the reference trainer's libraries and the packages of
    gpufleet:requirements from this archive, which `pulumi up` uploads, each wheel by its hash. torch comes with the
    image of most types; where it does not, its CUDA libraries are packed too (gigabytes). Needs a package index and
    pip, and no account. Run again after a change of gpufleet:requirements, of the instance type or of gpufleet.
    """
    file = read_stack(stack, directory)
    if pack_wheels(file, force=force):
        say(f"next: pulumi up --stack {file.stack}")
    else:
        say("no wheels are needed: the image has what the nodes' command needs, as far as gpufleet knows")


def pack_wheels(file: StackFile, *, force: bool = False) -> bool:
    """Pack and name the archive; False where the stack's nodes need none."""
    # The archive of before may not suit the plan of now.
    settings = read_settings(replace(file, config={**file.config, WHEELS_KEY: ""}))
    image_torch, own = brings_torch(settings), settings.requirements
    if not (force or wheels_needed(settings, image_torch=image_torch)):
        return False
    wanted = Wanted(
        image_torch=image_torch,
        cpu_architecture=file.plan.node.cpu_architecture,
        own=own and file.path.parent / own,
    )
    out = file.path.with_name(f"wheels-{file.stack}.tar")
    try:
        pack(wanted, out)
    except ConfigError as error:
        raise InvalidInputError(str(error)) from error
    except OSError as error:
        raise GpufleetError(f"the wheels cannot be packed: {error}") from error
    change_stack_file(file.path, {WHEELS_KEY: str(out.resolve())})
    torch = "the image has torch" if image_torch else "torch included"
    say(
        f"{out}: {out.stat().st_size / 2**20:,.0f} MiB for Python {' and '.join(wanted.pythons)} on {wanted.machine}, "
        f"{torch}; {file.path} names it in {WHEELS_KEY}"
    )
    return True
