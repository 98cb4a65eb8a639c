"""Auto Scaling groups that launch into a capacity reservation, whose specification moto 5.2 drops.

https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CapacityReservationSpecification.html
"""

from __future__ import annotations

from typing import Any

from moto.autoscaling.models import FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult

from tests.engine.moto_extension.capacity_reservations import CapacityReservation, reservations
from tests.engine.moto_extension.teaching import teach


def install() -> None:
    """Put the specification into moto's groups, over what other modules have put there."""
    launch = FakeAutoScalingGroup.replace_autoscaling_group_instances
    create = AutoScalingResponse.create_auto_scaling_group
    update = AutoScalingResponse.update_auto_scaling_group

    def create_auto_scaling_group(self: AutoScalingResponse) -> ActionResult:
        """CreateAutoScalingGroup of a group without instances yet."""
        answer = create(self)
        _keep(self)
        return answer

    def update_auto_scaling_group(self: AutoScalingResponse) -> ActionResult:
        """UpdateAutoScalingGroup; the specification holds for the launches of the same call."""
        _keep(self)
        return update(self)

    def launch_reserved(self: FakeAutoScalingGroup, count_needed: int, propagated_tags: dict[str, str]) -> None:
        """Launch instances, those that the group's reservations have room for in them."""
        places = [one for one in find(self) for _ in range(one.available_instance_count)]
        before = {one.instance_id for one in self.instance_states}
        launch(self, count_needed, propagated_tags)
        launched = [one.instance for one in self.instance_states if one.instance_id not in before]
        for instance, reservation in zip(launched, places, strict=False):
            instance.__dict__ |= {"reservation": reservation, "capacity_reservation_id": reservation.id}

    teach(AutoScalingResponse, create_auto_scaling_group, update_auto_scaling_group)
    FakeAutoScalingGroup.replace_autoscaling_group_instances = launch_reserved  # type: ignore[method-assign]


def specification(group: FakeAutoScalingGroup) -> dict[str, Any]:
    """The group's specification."""
    return group.__dict__.get("capacity_reservation_specification") or {}


def find(group: FakeAutoScalingGroup) -> list[CapacityReservation]:
    """The active reservations that the group targets."""
    ids = specification(group).get("CapacityReservationTarget", {}).get("CapacityReservationIds", [])
    known = reservations(group.ec2_backend)
    return [known[key] for key in ids if key in known and known[key].state == "active"]


def _keep(response: AutoScalingResponse) -> None:
    request = response._get_params()
    group = response.autoscaling_backend.autoscaling_groups.get(request["AutoScalingGroupName"])
    if group is not None and "CapacityReservationSpecification" in request:
        group.__dict__["capacity_reservation_specification"] = request["CapacityReservationSpecification"]
