"""LaunchInstances, which moto 5.2 lacks: the nodes at once, or a part of them and typed errors.

https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchInstances.html
https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-instances-synchronously.html
"""

from __future__ import annotations

from typing import Any

from moto.autoscaling.exceptions import AutoscalingClientError
from moto.autoscaling.models import FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult

from tests.engine.moto_extension.teaching import teach

MOST_INSTANCES = 100


def install() -> None:
    """Put the action into moto's Auto Scaling."""
    teach(AutoScalingResponse, launch_instances)


def rooms(group: FakeAutoScalingGroup) -> dict[str, str | int]:
    """``nodes`` that the group's pool has, and the error's ``code``; a test sets them, and others have room."""
    found: dict[str, str | int] = group.__dict__.setdefault("launch_rooms", {})
    return found


def launch_instances(self: AutoScalingResponse) -> ActionResult:
    """LaunchInstances with RetryStrategy none: once a token; the size grows by what came."""
    request = self._get_params()
    group = self.autoscaling_backend.autoscaling_groups.get(request["AutoScalingGroupName"])
    if group is None:
        raise AutoscalingClientError("ValidationError", "Group name not found - null")
    answered: dict[str, Any] = group.__dict__.setdefault("launch_answers", {})
    token = request["ClientToken"]
    if token in answered:
        known, answer = answered[token]
        if known != request:
            raise AutoscalingClientError("IdempotentParameterMismatch", "The parameters differ from the first call's")
        return ActionResult(answer)
    _check(group, request)
    wanted = int(request["RequestedCapacity"])
    room = int(rooms(group).get("nodes", MOST_INSTANCES))
    before = {state.instance_id for state in group.instance_states}
    if came := max(0, min(wanted, room - len(group.active_instances()))):
        group.replace_autoscaling_group_instances(came, group.get_propagated_tags())
        group.desired_capacity = (group.desired_capacity or 0) + came
    ids = [state.instance_id for state in group.instance_states if state.instance_id not in before]
    place = {"InstanceType": _instance_type(group), "MarketType": _market(group), "SubnetId": _subnet(group, request)}
    error = {**place, "ErrorCode": rooms(group).get("code", "InsufficientInstanceCapacity")}
    answer = {
        "AutoScalingGroupName": group.name,
        "ClientToken": token,
        "Instances": [{**place, "InstanceIds": ids}] if ids else [],
        "Errors": [{**error, "ErrorMessage": "There is no capacity."}] if came < wanted else [],
    }
    answered[token] = request, answer
    return ActionResult(answer)


def _check(group: FakeAutoScalingGroup, request: dict[str, Any]) -> None:
    wanted = int(request["RequestedCapacity"])
    problem = ""
    if (group.desired_capacity or 0) + wanted > (group.max_size or 0):
        problem = "The requested capacity is above the group's maximum size"
    elif wanted > MOST_INSTANCES:
        problem = f"At most {MOST_INSTANCES} instances are launched at once"
    elif "," in (group.vpc_zone_identifier or "") and len(request.get("SubnetIds") or []) != 1:
        problem = "One Availability Zone must be given"
    elif _market(group) == "mixed":
        problem = "Mixed policies combining both On-Demand and Spot Instances are not supported"
    if problem:
        raise AutoscalingClientError("ValidationError", problem)


def _market(group: FakeAutoScalingGroup) -> str:
    distribution = (group.mixed_instances_policy or {}).get("InstancesDistribution")
    if distribution is None:
        return "on-demand"
    base, above = (
        int(distribution.get(key) or 0) for key in ("OnDemandBaseCapacity", "OnDemandPercentageAboveBaseCapacity")
    )
    return "mixed" if base else "on-demand" if above == 100 else "spot"


def _instance_type(group: FakeAutoScalingGroup) -> str:
    overrides = (group.mixed_instances_policy or {}).get("LaunchTemplate", {}).get("Overrides") or []
    return str(overrides[0]["InstanceType"] if overrides else group.instance_type)


def _subnet(group: FakeAutoScalingGroup, request: dict[str, Any]) -> str:
    (subnet,) = request.get("SubnetIds") or (group.vpc_zone_identifier or "").split(",")
    return str(subnet)
