"""The nodes of a stack by rank, for the commands that take one."""

from __future__ import annotations

from infra.naming import Names
from optimizer.aws import clients, errors
from optimizer.aws.actuals import read_group, read_ranks
from optimizer.contract.errors import DataMissingError, InvalidInputError


def node_ids(names: Names) -> list[str]:
    """Return the ids of the stack's nodes by rank; empty where none is in service."""
    with errors.explained(
        f"the nodes of stack {names.stack} cannot be listed",
        next_step="use credentials with autoscaling:DescribeAutoScalingGroups and ec2:DescribeInstances",
    ):
        group = read_group(clients.autoscaling(names.region), names.groups)
        return read_ranks(clients.ec2(names.region), group) if group else []


def node_id(names: Names, node: str) -> str:
    """Return the id of the node with this rank; an instance id is itself."""
    if node.startswith("i-"):
        return node
    try:
        rank = int(node)
    except ValueError as error:
        raise InvalidInputError(f"node {node}", limit="a rank (0, 1, …) or an instance id (i-…)") from error
    nodes = node_ids(names)
    if not nodes:
        raise DataMissingError(
            f"stack {names.stack} has no node in service", next_step=f"gpufleet status --stack {names.stack}"
        )
    if not 0 <= rank < len(nodes):
        raise InvalidInputError(f"rank {rank}", limit=f"0 to {len(nodes) - 1}: the nodes in service")
    return nodes[rank]
