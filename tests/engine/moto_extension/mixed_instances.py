"""A mixed instances policy that is updated in part: moto 5.2 wants the launch template again, AWS keeps it.

"This parameter is required when creating an Auto Scaling group with a mixed instances policy, but is not required when
updating the group": https://docs.aws.amazon.com/sdkforruby/api/Aws/AutoScaling/Types/MixedInstancesPolicy.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moto.autoscaling.models import FakeAutoScalingGroup

_set: Callable[..., None] = FakeAutoScalingGroup._set_launch_configuration


def install() -> None:
    """Let moto's groups keep their template."""
    FakeAutoScalingGroup._set_launch_configuration = set_launch_configuration  # type: ignore[method-assign, assignment]


def set_launch_configuration(self: FakeAutoScalingGroup, *args: Any, **given: Any) -> None:
    """Set where instances come from; a policy without a launch template keeps the group's."""
    policy = given.get("mixed_instances_policy") or next((found for found in args[2:] if found), None)
    if policy and "LaunchTemplate" not in policy:
        policy["LaunchTemplate"] = (self.mixed_instances_policy or {})["LaunchTemplate"]
    _set(self, *args, **given)
