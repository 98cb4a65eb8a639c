"""Rendezvous of a gang: every node picks the same host by itself."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Set
from dataclasses import dataclass

from bootstrap.agent.commands import AgentError, log
from bootstrap.agent.group import Instance
from bootstrap.agent.node import SupervisedNode

# Doublings of the pause, at most, while AWS does not answer: it may throttle the calls of many fleets.
MOST_DOUBLINGS = 2
# Random part of a pause: nodes that start together should not ask together.
JITTER = 0.25


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address where the nodes meet, and this node's own."""

    host_ip: str
    own_ip: str
    is_host: bool
    own_id: str = ""  # of the instance
    members: frozenset[str] = frozenset()  # ids of all


def meet(node: SupervisedNode, without: Set[str] = frozenset()) -> Rendezvous | None:
    """Wait until all nodes have joined, except the bad hosts in ``without``; None where this node was told to leave."""
    if not node.group.instance_id():
        raise AgentError("without its instance id this node cannot find itself among the others")
    deadline = time.monotonic() + node.settings.limits.join_limit_s
    silent = 0
    while True:
        found = None
        if (instances := node.group.in_service(node.settings.node_count)) is None:
            silent = min(silent + 1, MOST_DOUBLINGS)
            log(f"cannot list the nodes of {node.settings.group_name}; trying again")
        else:
            silent, found = 0, _in_group(node, instances, without)
            if found is None and len(instances) >= node.settings.node_count:
                # A complete gang waits for the controller, or for the replacement of a bad host, not for nodes to come.
                deadline = time.monotonic() + node.settings.limits.join_limit_s
        if found is not None or node.leaving() is not None:
            return found
        if time.monotonic() >= deadline:
            raise AgentError(f"the fleet was not complete within {node.settings.limits.join_limit_s:g} s")
        node.rest(node.settings.limits.join_poll_s * 2**silent * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311


def wait_until_chosen(node: SupervisedNode) -> None:
    """Wait until the controller lets the group of a lone node train, or a notice ends the node."""
    while not node.group.is_chosen() and node.leaving() is None:
        node.rest(node.settings.limits.join_poll_s)


def _in_group(node: SupervisedNode, instances: list[Instance], without: Set[str]) -> Rendezvous | None:
    """Pick the oldest node, of equals the lower id.

    A replacement is always younger, so it joins where the survivors wait; by the id alone, a replacement could found a
    second group.
    """
    settings, own_id = node.settings, node.group.instance_id()
    if len(instances) >= settings.node_count and not node.group.is_chosen():
        log(f"{settings.group_name} is complete; waiting for the controller, which moves the gang here")
        return None
    instances = [instance for instance in instances if instance.id not in without]
    own_ip = next((instance.private_ip for instance in instances if instance.id == own_id), "")
    if len(instances) < settings.node_count or not own_ip:
        log(
            f"{len(instances)} of {settings.node_count} nodes of {settings.group_name} are in service; waiting for the "
            "rest"
        )
        return None
    return Rendezvous(
        host_ip=instances[0].private_ip, own_ip=own_ip, is_host=instances[0].id == own_id, own_id=own_id,
        members=frozenset(instance.id for instance in instances),
    )  # fmt: skip


def listens(host: str, port: int) -> bool:
    """Return whether a program answers there."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True
