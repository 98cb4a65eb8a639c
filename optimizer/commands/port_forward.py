"""``gpufleet port-forward``: a port of a node on this machine, through Session Manager."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import one_stack_options
from optimizer.commands.ssh import start_session
from optimizer.commands.status.ranks import node_id, stack_names

PORT = click.IntRange(1, 65535)


@click.command(
    epilog="""\b
Example:
  gpufleet port-forward 0 6006
  gpufleet port-forward 1 6006 --local-port 8006 --stack dev
"""
)
@click.argument("rank")
@click.argument("port", type=PORT)
@one_stack_options
@click.option("--local-port", type=PORT, help="Port of this machine.  [default: PORT]")
def command(rank: str, port: int, stack: str | None, directory: Path, local_port: int | None) -> None:
    """Make a PORT of the node with this RANK, or of an instance id, a port of this machine, until Ctrl-C.

    As gpufleet ssh: through AWS's Session Manager, with its document AWS-StartPortForwardingSession.
    """
    names = stack_names(stack, directory)
    ports = {"portNumber": [str(port)], "localPortNumber": [str(local_port or port)]}
    start_session(
        names.region,
        node_id(names, rank),
        *("--document-name", "AWS-StartPortForwardingSession", "--parameters", json.dumps(ports)),
    )
