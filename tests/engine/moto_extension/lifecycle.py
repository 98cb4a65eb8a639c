"""Auto Scaling lifecycle hooks that hold: an instance waits in one until somebody completes it.

moto 5.2 puts every instance into service at once and ends it at once, hooks or not. Here, as in AWS, a new instance
of a group with a launch hook is Pending:Wait, and one that is scaled in where there is a terminate hook is
Terminating:Wait, still running; nothing times out, so what nobody completes holds for ever:
https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks-overview.html
"""

from __future__ import annotations

from collections.abc import Callable

from moto.autoscaling.exceptions import AutoscalingClientError
from moto.autoscaling.models import FakeAutoScalingGroup, InstanceState, TerminateInstanceActivity
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult, EmptyResult

from tests.engine.moto_extension.teaching import teach

LAUNCHING, TERMINATING = "autoscaling:EC2_INSTANCE_LAUNCHING", "autoscaling:EC2_INSTANCE_TERMINATING"
WAITING = {LAUNCHING: "Pending:Wait", TERMINATING: "Terminating:Wait"}

_launch: Callable[..., None] = FakeAutoScalingGroup.replace_autoscaling_group_instances
_set_desired_capacity: Callable[..., None] = FakeAutoScalingGroup.set_desired_capacity
_terminate: Callable[..., ActionResult] = AutoScalingResponse.terminate_instance_in_auto_scaling_group


def install() -> None:
    """Put hooks into moto's groups."""
    FakeAutoScalingGroup.active_instances = active_instances  # type: ignore[method-assign]
    FakeAutoScalingGroup.replace_autoscaling_group_instances = launch  # type: ignore[method-assign]
    FakeAutoScalingGroup.set_desired_capacity = set_desired_capacity  # type: ignore[method-assign]
    teach(AutoScalingResponse, complete_lifecycle_action, terminate_instance_in_auto_scaling_group)


def active_instances(self: FakeAutoScalingGroup) -> list[InstanceState]:
    """The instances that count towards the desired capacity: those that come, and those that are there."""
    return [state for state in self.instance_states if not state.lifecycle_state.startswith("Terminating")]


def _hooked(group: FakeAutoScalingGroup, transition: str) -> bool:
    hooks = group.autoscaling_backend.describe_lifecycle_hooks(group.name)
    return any(hook.lifecycle_transition == transition for hook in hooks)


def launch(self: FakeAutoScalingGroup, count_needed: int, propagated_tags: dict[str, str]) -> None:
    """Launch instances; a launch hook holds them."""
    before = list(self.instance_states)
    _launch(self, count_needed, propagated_tags)
    if _hooked(self, LAUNCHING):
        for state in self.instance_states:
            if state not in before:
                state.lifecycle_state = WAITING[LAUNCHING]


def set_desired_capacity(self: FakeAutoScalingGroup, new_capacity: int | None) -> None:
    """Launch missing nodes; end surplus nodes that are not protected, which a terminate hook may hold.

    From the first call on, the group has a capacity type that no request set, as AWS may answer:
    https://github.com/terraform-aws-modules/terraform-aws-eks/issues/3723
    """
    self.desired_capacity_type = "units"  # type: ignore[attr-defined]
    wanted = int((self.min_size if new_capacity is None else new_capacity) or 0)
    surplus = len(self.active_instances()) - wanted
    if surplus <= 0 or not _hooked(self, TERMINATING):
        _set_desired_capacity(self, new_capacity)
        return
    self.desired_capacity = wanted
    for state in [state for state in self.active_instances() if not state.protected_from_scale_in][:surplus]:
        state.lifecycle_state = WAITING[TERMINATING]


def _held(response: AutoScalingResponse) -> tuple[FakeAutoScalingGroup, InstanceState]:
    """The group and instance the request names, which must be held by the hook it names."""
    name, instance = response._get_param("AutoScalingGroupName"), response._get_param("InstanceId")
    backend = response.autoscaling_backend
    hooks = backend.describe_lifecycle_hooks(name, [response._get_param("LifecycleHookName")])
    group = backend.autoscaling_groups.get(name)
    for state in group.instance_states if group else []:
        if state.instance_id == instance and any(
            state.lifecycle_state == WAITING[str(hook.lifecycle_transition)] for hook in hooks
        ):
            assert group is not None
            return group, state
    raise AutoscalingClientError("ValidationError", f"No active Lifecycle Action found with instance ID {instance}")


def complete_lifecycle_action(self: AutoScalingResponse) -> ActionResult:
    """CompleteLifecycleAction: into service, or ended; an abandoned launch is replaced.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CompleteLifecycleAction.html
    """
    group, state = _held(self)
    if state.lifecycle_state == WAITING[LAUNCHING] and self._get_param("LifecycleActionResult") == "CONTINUE":
        state.lifecycle_state = "InService"
        return EmptyResult()
    group.instance_states = [other for other in group.instance_states if other is not state]
    group.ec2_backend.terminate_instances([state.instance_id])
    _replace(group)
    return EmptyResult()


def _replace(group: FakeAutoScalingGroup) -> None:
    missing = (group.desired_capacity or 0) - len(group.active_instances())
    if missing > 0:
        launch(group, missing, group.get_propagated_tags())


def terminate_instance_in_auto_scaling_group(self: AutoScalingResponse) -> ActionResult:
    """TerminateInstanceInAutoScalingGroup: protected or not, and a terminate hook holds it all the same.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_TerminateInstanceInAutoScalingGroup.html
    """
    instance = self._get_param("InstanceId")
    for group in self.autoscaling_backend.autoscaling_groups.values():
        for state in group.active_instances():
            if state.instance_id == instance and _hooked(group, TERMINATING):
                wanted = group.desired_capacity or 0
                state.lifecycle_state = WAITING[TERMINATING]
                if self._get_bool_param("ShouldDecrementDesiredCapacity", False):
                    group.desired_capacity = wanted - 1
                _replace(group)
                return ActionResult({"Activity": TerminateInstanceActivity(state.instance, wanted)})
    return _terminate(self)
