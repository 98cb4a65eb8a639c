"""Carry out actions on the Auto Scaling group and its reservations, and publish a tick's metrics."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from bootstrap.contract.ending import calls
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.start_reservation import FIRST, ONLY
from bootstrap.contract.state import ControllerState
from bootstrap.controller.actions import LAUNCH, Action, CancelReservation, ResumeProcesses, SetGroup, SuspendLaunches
from bootstrap.controller.clients import Clients, error_code

# The state's counts by metric.
COUNTS = {
    "Interruptions": "interruptions",
    "RebalanceNotices": "rebalance_notices",
    "FailedLaunches": "failed_launches",
    "UnfitNodes": "unfit_nodes",
}


def carry_out(clients: Clients, settings: ControllerSettings, action: Action) -> None:
    """Carry out an action; a repetition changes nothing."""
    if isinstance(action, SetGroup):
        _set_group(clients, settings.group, action)
        return
    if isinstance(action, ResumeProcesses):
        clients.autoscaling.resume_processes(AutoScalingGroupName=settings.group, ScalingProcesses=list(action.names))
        return
    if isinstance(action, SuspendLaunches):
        clients.autoscaling.suspend_processes(AutoScalingGroupName=settings.group, ScalingProcesses=[LAUNCH])
        return
    if isinstance(action, CancelReservation):
        # Free, and "the instances continue to run normally outside of the Capacity Reservation":
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-release.html
        clients.ec2.cancel_capacity_reservation(CapacityReservationId=action.reservation_id)
        return
    for operation, parameters in calls(
        action, group=settings.group, launch_hook=settings.launch_hook, terminate_hook=settings.terminate_hook
    ):
        try:
            getattr(clients.autoscaling, operation)(**parameters)
        except ClientError as error:
            # The node, or its hook's timeout, was faster.
            if error_code(error) != "ValidationError" or "No active Lifecycle Action" not in str(error):
                raise


def _set_group(clients: Clients, group: str, action: SetGroup) -> None:
    changes: dict[str, Any] = {}
    if action.desired is not None:
        changes["DesiredCapacity"] = action.desired
    if changes and action == SetGroup(desired=action.desired):
        clients.autoscaling.set_desired_capacity(AutoScalingGroupName=group, HonorCooldown=False, **changes)
        return
    if action.min_size is not None and action.max_size is not None:
        changes |= {"MinSize": action.min_size, "MaxSize": action.max_size}
    if action.subnets is not None:
        changes["VPCZoneIdentifier"] = action.subnets
    # "All optional properties are left unchanged if not specified", the launch template's specification among them.
    # With it, AWS would check permissions that the controller does not have:
    # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchTemplate.html
    # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-launch-template-permissions.html
    policy: dict[str, Any] = {}
    if action.on_demand_base is not None:
        answer: Any = clients.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])
        present = answer["AutoScalingGroups"][0]["MixedInstancesPolicy"]["InstancesDistribution"]
        policy["InstancesDistribution"] = {**present, "OnDemandBaseCapacity": action.on_demand_base}
    if action.instance_types is not None:
        overrides = [{"InstanceType": name} for name in action.instance_types.split(",")]
        policy["LaunchTemplate"] = {"Overrides": overrides}
    if policy:
        changes["MixedInstancesPolicy"] = policy
    if action.target is not None:
        ids = list(action.target.reservation_ids)
        preference = ONLY if action.target.only else FIRST if ids else "default"
        specification: dict[str, Any] = {"CapacityReservationPreference": preference}
        if ids:
            specification["CapacityReservationTarget"] = {"CapacityReservationIds": ids}
        changes["CapacityReservationSpecification"] = specification
    clients.autoscaling.update_auto_scaling_group(AutoScalingGroupName=group, **changes)


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
    for metric, count in COUNTS.items():
        # Never below 0: unfit nodes are counted in a row.
        metrics[metric] = max(0, getattr(state, count) - (getattr(known, count) if known else 0)), "Count"
    data = [
        {"MetricName": name, "Value": value, "Unit": unit, "Timestamp": state.updated_at}
        for name, (value, unit) in metrics.items()
    ]
    clients.cloudwatch.put_metric_data(Namespace=settings.metric_namespace, MetricData=data)
