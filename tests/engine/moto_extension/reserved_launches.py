"""Auto Scaling groups that launch into a capacity reservation, whose specification moto 5.2 drops.

https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CapacityReservationSpecification.html
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from moto.autoscaling.models import FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult

from tests.engine.moto_extension.activities import fail_launch
from tests.engine.moto_extension.capacity_reservations import CapacityReservation, reservations
from tests.engine.moto_extension.teaching import teach

ONLY = "capacity-reservations-only"


def install() -> None:
    """Put the specification into moto's groups, over what other modules have put there."""
    launch = FakeAutoScalingGroup.replace_autoscaling_group_instances
    update = AutoScalingResponse.update_auto_scaling_group

    def update_auto_scaling_group(self: AutoScalingResponse) -> ActionResult:
        """UpdateAutoScalingGroup; the specification holds for the launches of the same call."""
        request = self._get_params()
        group = self.autoscaling_backend.autoscaling_groups.get(request["AutoScalingGroupName"])
        if group is not None and "CapacityReservationSpecification" in request:
            group.__dict__["capacity_reservation_specification"] = request["CapacityReservationSpecification"]
        return update(self)

    def launch_reserved(self: FakeAutoScalingGroup, count_needed: int, propagated_tags: dict[str, str]) -> None:
        """Launch instances, where the group says so only as many as the reservation has room for."""
        reservation, possible = find(self), count_needed
        if specification(self).get("CapacityReservationPreference") == ONLY:
            possible = min(count_needed, reservation.available_instance_count) if reservation else 0
        before = {one.instance_id for one in self.instance_states}
        if possible:
            launch(self, possible, propagated_tags)
        for one in self.instance_states:
            if one.instance_id not in before:
                one.instance.__dict__["reservation"] = reservation
        if possible < count_needed:
            fail_launch(self, datetime.now(UTC), "ReservationCapacityExceeded: the reservation has no room.")

    teach(AutoScalingResponse, update_auto_scaling_group)
    FakeAutoScalingGroup.replace_autoscaling_group_instances = launch_reserved  # type: ignore[method-assign]


def specification(group: FakeAutoScalingGroup) -> dict[str, Any]:
    """The group's specification."""
    return group.__dict__.get("capacity_reservation_specification") or {}


def find(group: FakeAutoScalingGroup) -> CapacityReservation | None:
    """The active reservation that the group targets."""
    ids = specification(group).get("CapacityReservationTarget", {}).get("CapacityReservationIds", [])
    known = reservations(group.ec2_backend)
    return next((known[key] for key in ids if key in known and known[key].state == "active"), None)
