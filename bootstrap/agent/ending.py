"""Ends of the agent. In a group the node stays until the group ends it, so that no node waits out a hook."""

from __future__ import annotations

from bootstrap.agent.messages import log
from bootstrap.agent.node import SupervisedNode
from bootstrap.contract.report import EXIT_AT_FAULT

# For the newest report, within the few seconds that the notice leaves.
LAST_REPORT_S = 5.0


def leave(node: SupervisedNode) -> None:
    """Let the group end this node now."""
    node.reports.wait(LAST_REPORT_S)
    node.group.complete_terminate_hook()
    log("this node has left the run")


def finish(node: SupervisedNode, status: int) -> int:
    """Return the exit status after the training; in a group only when the group ends this node."""
    if not node.settings.in_group:
        return status
    if node.settings.mode == "workers":
        node.group.protect_from_scale_in(on=False)
    _stand_by(node)
    return 0


def give_up(node: SupervisedNode, status: int, reason: str) -> int:
    """End a run whose command cannot be started, or fails again and again."""
    log(f"{reason}; giving up: {node.settings.log_file} has its output")
    node.reports.tell("gave-up", status)
    _send_log(node, "training gave up")
    return finish(node, EXIT_AT_FAULT)  # the unit does not restart it


def be_replaced(node: SupervisedNode, fault: str, check: str) -> int:
    """Have the group replace this node, which failed a check: a GPU broke, or the gang test blames it."""
    log(f"this node cannot train any more: {fault}")
    node.reports.tell("sick", 0, check)
    _send_log(node, f"this node failed {check}: {fault}")
    while not node.group.ask_to_be_replaced() and node.leaving() is None:
        log("the group could not be told that this node is unhealthy; trying again")
        node.rest(node.settings.limits.tell_delay_s)
    _stand_by(node)
    return 0


def _stand_by(node: SupervisedNode) -> None:
    log("waiting for the group to end this node, which is paid until then")
    while (notice := node.leaving()) is None:
        node.tick()
    log(f"leaving: {notice}")
    leave(node)


def _send_log(node: SupervisedNode, title: str) -> None:
    """Send the end of the output to the log group, before the node ends: the image may have no CloudWatch agent."""
    if not node.group.send_log("train", title, node.settings.log_file):
        log("the log could not be sent to CloudWatch Logs")
