"""Instance refreshes, which moto 5.2 lacks: a request is recorded as finished, and no instance changes.

https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_StartInstanceRefresh.html
"""

from __future__ import annotations

import uuid
from typing import Any

from moto.autoscaling.exceptions import AutoscalingClientError
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult
from moto.core.utils import utcnow

from tests.engine.moto_extension.teaching import teach


def install() -> None:
    """Put the actions into moto's Auto Scaling."""
    teach(AutoScalingResponse, start_instance_refresh, describe_instance_refreshes, cancel_instance_refresh)


def _refreshes(response: AutoScalingResponse) -> list[dict[str, Any]]:
    """Refreshes of the request's group, the latest first."""
    name = response._get_param("AutoScalingGroupName")
    group = response.autoscaling_backend.autoscaling_groups.get(name)
    if group is None:
        raise AutoscalingClientError("ValidationError", f"AutoScalingGroup name not found - {name}")
    kept: list[dict[str, Any]] = group.__dict__.setdefault("refreshes", [])
    return kept


def start_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    """StartInstanceRefresh."""
    refresh = {
        "InstanceRefreshId": str(uuid.uuid4()),
        "AutoScalingGroupName": self._get_param("AutoScalingGroupName"),
        "Status": "Successful",
        "StartTime": utcnow(),
        "EndTime": utcnow(),
        "PercentageComplete": 100,
        "InstancesToUpdate": 0,
        "Preferences": self._get_params().get("Preferences") or {},
    }
    _refreshes(self).insert(0, refresh)
    return ActionResult({"InstanceRefreshId": refresh["InstanceRefreshId"]})


def describe_instance_refreshes(self: AutoScalingResponse) -> ActionResult:
    """DescribeInstanceRefreshes."""
    wanted = self._get_param("InstanceRefreshIds", [])
    refreshes = [item for item in _refreshes(self) if not wanted or item["InstanceRefreshId"] in wanted]
    return ActionResult({"InstanceRefreshes": refreshes})


def cancel_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    """CancelInstanceRefresh: there is never one under way."""
    _refreshes(self)
    raise AutoscalingClientError("ActiveInstanceRefreshNotFound", "No in progress or pending Instance Refresh found")
