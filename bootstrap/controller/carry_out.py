"""Carry out actions on the Auto Scaling groups, and publish a tick's metrics."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from bootstrap.contract.ending import calls
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState
from bootstrap.controller.actions import GroupAction, ResumeProcesses, SetGroup
from bootstrap.controller.clients import Clients, error_code


def carry_out(clients: Clients, settings: ControllerSettings, asked: GroupAction) -> None:
    """Carry out an action on a group; a repetition changes nothing."""
    group, action = settings.group_of(asked.group), asked.action
    if isinstance(action, SetGroup):
        _set_group(clients, group, action)
        return
    if isinstance(action, ResumeProcesses):
        clients.autoscaling.resume_processes(AutoScalingGroupName=group, ScalingProcesses=list(action.names))
        return
    for operation, parameters in calls(
        action, group=group, launch_hook=settings.launch_hook, terminate_hook=settings.terminate_hook
    ):
        try:
            getattr(clients.autoscaling, operation)(**parameters)
        except ClientError as error:
            # The node, or its hook's timeout, was faster.
            if error_code(error) != "ValidationError" or "No active Lifecycle Action" not in str(error):
                raise


def _set_group(clients: Clients, group: str, action: SetGroup) -> None:
    desired: Any = {} if action.desired is None else {"DesiredCapacity": action.desired}
    if action.min_size is None or action.max_size is None:
        clients.autoscaling.set_desired_capacity(AutoScalingGroupName=group, HonorCooldown=False, **desired)
        return
    clients.autoscaling.update_auto_scaling_group(
        AutoScalingGroupName=group, MinSize=action.min_size, MaxSize=action.max_size, **desired
    )


def publish_metrics(
    clients: Clients, settings: ControllerSettings, state: ControllerState, before: ControllerState | None
) -> None:
    """Publish one minute's metrics, with the counts since ``before``, so that sums over time are true."""
    known = before if before and before.run_started_at == state.run_started_at else None
    metrics: dict[str, tuple[float, str]] = {
        "SpentUsd": (state.spent_usd, "None"),
        "UsdPerHour": (state.usd_per_hour, "None"),
        "NodesInService": (state.nodes.in_service, "Count"),
        "NodesWanted": (state.nodes.wanted, "Count"),
    }
    counts = (("Interruptions", "interruptions"), ("FailedLaunches", "failed_launches"), ("UnfitNodes", "unfit_nodes"))
    for name, count in counts:
        # Never below 0: unfit nodes are counted in a row.
        added = max(0, getattr(state, count) - (getattr(known, count) if known else 0))
        metrics[name] = added, "Count"
    data = [
        {"MetricName": name, "Value": value, "Unit": unit, "Timestamp": state.updated_at}
        for name, (value, unit) in metrics.items()
    ]
    clients.cloudwatch.put_metric_data(Namespace=settings.metric_namespace, MetricData=data)
