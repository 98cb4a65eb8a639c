"""A mixed instances policy that is updated in part: moto 5.2 wants the launch template again, AWS keeps it.

"This parameter is required when creating an Auto Scaling group with a mixed instances policy, but is not required when
updating the group": https://docs.aws.amazon.com/sdkforruby/api/Aws/AutoScaling/Types/MixedInstancesPolicy.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moto.autoscaling.models import FakeAutoScalingGroup

_update: Callable[..., None] = FakeAutoScalingGroup.update


def install() -> None:
    """Let moto's groups keep their template."""
    FakeAutoScalingGroup.update = update  # type: ignore[method-assign]


def update(self: FakeAutoScalingGroup, *args: Any, **given: Any) -> None:
    """Update a group; a policy without a launch template keeps the group's."""
    present = self.mixed_instances_policy
    policy = given.get("mixed_instances_policy") or next((argument for argument in args[10:] if argument), None)
    if policy and present and "LaunchTemplateSpecification" not in policy.get("LaunchTemplate", {}):
        kept = present["LaunchTemplate"]
        specification = dict(kept["LaunchTemplateSpecification"])
        # Described with both, taken with one.
        specification.pop("LaunchTemplateName", None)
        given_template = policy.get("LaunchTemplate", {})
        policy["LaunchTemplate"] = {**kept, **given_template, "LaunchTemplateSpecification": specification}
    if policy and present:
        policy.setdefault("InstancesDistribution", present.get("InstancesDistribution"))
    _update(self, *args, **given)
