"""``gpufleet ssh``: a shell on a node, or a port of it, through Session Manager."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import click

from optimizer.commands.options import one_stack_options
from optimizer.commands.stack_file import read_stack, resolve_names
from optimizer.commands.status.ranks import node_id
from optimizer.contract.errors import GpufleetError

PORT = click.IntRange(1, 65535)


@click.command(
    epilog="""\b
Example:
  gpufleet ssh 0
  gpufleet ssh i-0123456789abcdef0 --stack dev
  gpufleet ssh 0 --port 6006 --local-port 8006
"""
)
@click.argument("rank")
@one_stack_options
@click.option("--port", type=PORT, metavar="PORT", help="Make this port of the node one of this machine, until Ctrl-C.")
@click.option("--local-port", type=PORT, metavar="PORT", help="Port of this machine.  [default: that of --port]")
def command(rank: str, stack: str | None, directory: Path, port: int | None, local_port: int | None) -> None:
    """Open a shell on the node with this RANK, or on an instance id.

    Ranks count the nodes in service from 0, as torchrun does (GROUP_RANK). The session goes through AWS's Session
    Manager: no key, no open port. Needs the AWS CLI with its Session Manager plugin, and ssm:StartSession; --port also
    its document AWS-StartPortForwardingSession.
    """
    if local_port and not port:
        raise click.UsageError("--local-port goes with --port")
    if shutil.which("aws") is None:
        raise GpufleetError(
            "no aws is on PATH",
            why="Session Manager needs the AWS CLI; the nodes take no connection from outside",
            next_step="install it: https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
        )
    names = resolve_names(read_stack(stack, directory))
    ports = {"portNumber": [str(port)], "localPortNumber": [str(local_port or port)]}
    document = ("--document-name", "AWS-StartPortForwardingSession", "--parameters", json.dumps(ports))
    # https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-sessions-start.html
    session = ["aws", "ssm", "start-session", "--region", names.region, "--target", node_id(names, rank)]
    os.execvp("aws", [*session, *(document if port else ())])  # noqa: S606 - Ctrl-C belongs to the session
