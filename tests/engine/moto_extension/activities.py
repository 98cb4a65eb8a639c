"""Auto Scaling's activities, which moto 5.2 does not record."""

from __future__ import annotations

from datetime import datetime

from moto.autoscaling.exceptions import AutoscalingClientError
from moto.autoscaling.models import FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult

from tests.engine.moto_extension.teaching import teach


def install() -> None:
    """Put the action into moto's Auto Scaling."""
    teach(AutoScalingResponse, describe_scaling_activities)


def record(group: FakeAutoScalingGroup, description: str, start: datetime, end: datetime | None, **more: str) -> None:
    """Record an activity; without an end it is in progress."""
    activities = group.__dict__.setdefault("activities", [])
    activity = {
        "ActivityId": f"{len(activities):08d}-0000-0000-0000-000000000000",
        "AutoScalingGroupName": group.name,
        "Cause": "an instance was started in response to a difference between desired and actual capacity",
        "Description": description,
        "StartTime": start,
        "Progress": 50 if end is None else 100,
        "StatusCode": "InProgress" if end is None else "Successful",
        **more,
    }
    activities.insert(0, activity if end is None else activity | {"EndTime": end})


def describe_scaling_activities(self: AutoScalingResponse) -> ActionResult:
    """DescribeScalingActivities of one group, the latest first, at most 100 a page.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DescribeScalingActivities.html
    """
    group = self.autoscaling_backend.autoscaling_groups.get(self._get_param("AutoScalingGroupName"))
    if group is None:
        raise AutoscalingClientError("ValidationError", "Group name not found - null")
    activities = group.__dict__.get("activities", [])
    if not self._get_bool_param("IncludeDeletedGroups"):
        # Earlier activities belong to a deleted group of the same name.
        created = datetime.fromisoformat(group.created_time).astimezone()
        activities = [activity for activity in activities if activity["StartTime"] >= created]
    # "Activities still in progress are described first."
    activities = sorted(activities, key=lambda activity: "EndTime" in activity)
    begin = int(self._get_param("NextToken") or 0)
    end = begin + int(self._get_param("MaxRecords") or 100)
    more = {"NextToken": str(end)} if end < len(activities) else {}
    return ActionResult({"Activities": activities[begin:end], **more})
