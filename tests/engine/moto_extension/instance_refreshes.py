"""Instance refreshes, which moto 5.2 lacks: a request is answered as one that is over at once; no instance changes.

https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_StartInstanceRefresh.html
"""

from __future__ import annotations

import uuid

from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult

from tests.engine.moto_extension.teaching import teach


def install() -> None:
    """Put the action into moto's Auto Scaling."""
    teach(AutoScalingResponse, start_instance_refresh)


def start_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    """StartInstanceRefresh."""
    return ActionResult({"InstanceRefreshId": str(uuid.uuid4())})
