"""Auto Scaling: lifecycle hooks as given, the group's role, updates that keep the rest, deletion with instances.

moto 5.2 answers each hook with a made-up notification target and role, drops the hooks of CreateAutoScalingGroup,
always names the account's default service-linked role, drops the warm-up and the maintenance policy, forgets the mixed
instances policy on an update without one, on DeleteAutoScalingGroup leaves protected instances running, and shows no
policy as enabled. What hooks do to instances is in lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moto.autoscaling.exceptions import AutoscalingClientError
from moto.autoscaling.models import AutoScalingBackend, LifecycleHook
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult, EmptyResult

from tests.engine.moto_extension.teaching import teach

DEFAULT_HEARTBEAT_S = 3600
MAX_GLOBAL_TIMEOUT_S = 172_800
# ForceDelete answers, and the group is gone, before its instances have ended; P5 takes up to half an hour for it.
SHUTDOWN_S = 20

Action = Callable[[AutoScalingResponse], ActionResult]

_create_group: Action = AutoScalingResponse.create_auto_scaling_group
_update_group: Action = AutoScalingResponse.update_auto_scaling_group
_delete_group: Action = AutoScalingResponse.delete_auto_scaling_group
_put_policy: Action = AutoScalingResponse.put_scaling_policy


def install() -> None:
    """Put the methods below into moto's Auto Scaling."""
    teach(
        AutoScalingResponse,
        put_lifecycle_hook,
        create_auto_scaling_group,
        update_auto_scaling_group,
        delete_auto_scaling_group,
        put_scaling_policy,
    )


def put_hook(backend: AutoScalingBackend, group: str, request: dict[str, Any]) -> None:
    """Create a hook, or change what ``request`` names of an existing one.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutLifecycleHook.html
    """
    name = request["LifecycleHookName"]
    hook = next(iter(backend.describe_lifecycle_hooks(group, [name])), None)
    if hook is None:
        if not request.get("LifecycleTransition"):
            raise AutoscalingClientError("ValidationError", "LifecycleTransition is required for a new lifecycle hook")
        hook = backend.create_lifecycle_hook(name, group, request["LifecycleTransition"], None, "ABANDON")
        hook.heartbeat_timeout = DEFAULT_HEARTBEAT_S
        request = {"RoleARN": None, "NotificationTargetARN": None, **request}  # none unless given
    _change(hook, request)


def _change(hook: LifecycleHook, request: dict[str, Any]) -> None:
    attributes = {
        "LifecycleTransition": "lifecycle_transition",
        "DefaultResult": "default_result",
        "RoleARN": "role_arn",
        "NotificationTargetARN": "notification_target_arn",
        "NotificationMetadata": "notification_metadata",
    }
    for parameter, attribute in attributes.items():
        if parameter in request:
            setattr(hook, attribute, request[parameter] or None)  # an empty text takes the value away
    if "HeartbeatTimeout" in request:
        hook.heartbeat_timeout = int(request["HeartbeatTimeout"])
    # "The maximum is 172800 seconds (48 hours) or 100 times HeartbeatTimeout, whichever is smaller":
    # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LifecycleHook.html
    hook.global_timeout = min(MAX_GLOBAL_TIMEOUT_S, 100 * hook.heartbeat_timeout)


def put_lifecycle_hook(self: AutoScalingResponse) -> ActionResult:
    """PutLifecycleHook."""
    request = self._get_params()
    put_hook(self.autoscaling_backend, request["AutoScalingGroupName"], request)
    return EmptyResult()


def create_auto_scaling_group(self: AutoScalingResponse) -> ActionResult:
    """CreateAutoScalingGroup with LifecycleHookSpecificationList and what moto drops of a group.

    The hooks come first, as they hold the very first instances.
    """
    request = self._get_params()
    for hook in request.get("LifecycleHookSpecificationList") or []:
        put_hook(self.autoscaling_backend, request["AutoScalingGroupName"], hook)
    result = _create_group(self)
    _set_dropped(self, request)
    return result


def update_auto_scaling_group(self: AutoScalingResponse) -> ActionResult:
    """UpdateAutoScalingGroup with what moto drops of a group; a parameter that is left out changes nothing.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    """
    request = self._get_params()
    if request.get("DesiredCapacityType") == "":
        # https://github.com/hashicorp/terraform-provider-aws/issues/37523
        raise AutoscalingClientError(
            "ValidationError",
            "1 validation error detected: Value '' at 'desiredCapacityType' failed to satisfy constraint: Member must "
            "have length greater than or equal to 1",
        )
    group = self.autoscaling_backend.autoscaling_groups.get(request["AutoScalingGroupName"])
    policy = group.mixed_instances_policy if group else None
    result = _update_group(self)
    if group is not None and not {"MixedInstancesPolicy", "LaunchTemplate", "LaunchConfigurationName"} & set(request):
        group.mixed_instances_policy = policy
    _set_dropped(self, request)
    return result


DROPPED = {
    "CapacityRebalance": "capacity_rebalance",
    "DefaultInstanceWarmup": "default_instance_warmup",
    "InstanceMaintenancePolicy": "instance_maintenance_policy",
    "ServiceLinkedRoleARN": "service_linked_role_arn",
}
"""Request parameters that moto does not store, and the attributes its serializer answers from."""


def _set_dropped(response: AutoScalingResponse, request: dict[str, Any]) -> None:
    group = response.autoscaling_backend.autoscaling_groups[request["AutoScalingGroupName"]]
    for parameter, attribute in DROPPED.items():
        if parameter in request:
            setattr(group, attribute, request[parameter])


def delete_auto_scaling_group(self: AutoScalingResponse) -> ActionResult:
    """DeleteAutoScalingGroup: refused while there are instances, unless ForceDelete takes them along.

    Neither scale-in protection nor a hook protects from it:
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DeleteAutoScalingGroup.html
    """
    backend = self.autoscaling_backend
    name = self._get_param("AutoScalingGroupName")
    group = backend.autoscaling_groups.get(name)
    if group is not None and group.instance_states:
        if not self._get_bool_param("ForceDelete", False):
            raise AutoscalingClientError(
                "ResourceInUse",
                "You cannot delete an AutoScalingGroup while there are instances or pending Spot instance request(s) "
                "still in the group.",
            )
        for state in group.instance_states:
            state.protected_from_scale_in, state.lifecycle_state = False, "InService"
            state.instance.shuts_down_s = SHUTDOWN_S  # type: ignore[attr-defined]  # read by instances.py
    for hook in list(backend.describe_lifecycle_hooks(name)):
        backend.delete_lifecycle_hook(name, hook.name)
    return _delete_group(self)


def put_scaling_policy(self: AutoScalingResponse) -> ActionResult:
    """PutScalingPolicy with Enabled; a policy without predictive scaling shows none."""
    result = _put_policy(self)
    policy: Any = self.autoscaling_backend.policies[self._get_param("PolicyName")]
    policy.enabled = self._get_bool_param("Enabled", True)
    policy.predictive_scaling_configuration = policy.predictive_scaling_configuration or None
    return result
