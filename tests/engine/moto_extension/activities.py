"""Auto Scaling's activities, which moto 5.2 does not record: there are none."""

from __future__ import annotations

from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult

from tests.engine.moto_extension.teaching import teach


def install() -> None:
    """Put the action into moto's Auto Scaling."""
    teach(AutoScalingResponse, describe_scaling_activities)


def describe_scaling_activities(self: AutoScalingResponse) -> ActionResult:
    """DescribeScalingActivities, which the provider calls while it waits for a group."""
    return ActionResult({"Activities": []})
