"""``gpufleet logs``: the training's output, of every node, also of nodes that are gone."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import click

from optimizer.aws import clients, errors
from optimizer.aws.log_group import LogReader
from optimizer.commands.options import Hours, one_stack_options
from optimizer.commands.stack_file import read_stack, resolve_names
from optimizer.commands.status.ranks import node_id, node_ids
from optimizer.contract.errors import DataMissingError

POLL_S = 5


@click.command(
    epilog="""\b
Example:
  gpufleet logs -f
  gpufleet logs --rank 0 --since 30min --stack dev
  gpufleet logs --node i-0123456789abcdef0 --since 2d
""",
)
@one_stack_options
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="One process: its GPU's rank (RANK).")
@click.option("--node", metavar="NODE", help="One node: its rank, or its instance id where it is gone.")
@click.option("--since", type=Hours(), default="1h", show_default=True, help="How far back (30min, 2h, 3d).")
def command(
    stack: str | None,
    directory: Path,
    follow: bool,
    rank: int | None,
    node: str | None,
    since: float,
) -> None:
    """Print what the training command writes, as the nodes stream it to CloudWatch Logs.

    Each line has its node's rank, or the id of a node that is not in service any more, the time (UTC), and the rank of
    the process that wrote it; without one it is torchrun's or the node's agent's. Lines come about ten seconds late,
    are kept for 30 days, and outlive their node. Needs logs:FilterLogEvents on the stack's log
    group.
    """
    names = resolve_names(read_stack(stack, directory))
    reader = LogReader(
        client=clients.logs(names.region),
        group=names.log_group,
        node=node_id(names, node) if node else "",
        since=datetime.fromtimestamp(max(0.0, time.time() - since * 3600), UTC),
        rank=rank,
    )
    ranks: dict[str, str] = {}
    try:
        while True:
            for line in reader.read():
                if line.node not in ranks:  # the first line, or a replacement came
                    ranks |= {node: str(number) for number, node in enumerate(node_ids(names))}
                    ranks.setdefault(line.node, line.node)
                at = datetime.fromtimestamp(line.at_ms / 1000, UTC)
                click.echo(f"[{ranks[line.node]}] {at:%H:%M:%S} {line.text}")
            if not follow:
                return
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
    except errors.AWS_ERRORS as error:
        if errors.is_not_found(error):
            raise DataMissingError(
                f"stack {names.stack} has no log group {names.log_group} in {names.region}",
                next_step=f"gpufleet status --stack {names.stack}",
            ) from error
        with errors.explained("the log cannot be read", next_step=f"allow logs:FilterLogEvents on {names.log_group}"):
            raise
