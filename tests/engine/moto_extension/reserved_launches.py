"""Auto Scaling groups whose launch template targets a capacity reservation, which moto 5.2 drops.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CapacityReservationTarget.html
"""

from __future__ import annotations

from moto.autoscaling.models import FakeAutoScalingGroup

from tests.engine.moto_extension.capacity_reservations import reservations
from tests.engine.moto_extension.instances import template_data


def install() -> None:
    """Put the reservation into what moto's groups launch."""
    launch = FakeAutoScalingGroup.replace_autoscaling_group_instances

    def launch_reserved(self: FakeAutoScalingGroup, count_needed: int, propagated_tags: dict[str, str]) -> None:
        """Launch instances, in the reservation of their template as far as it has room."""
        before = {state.instance_id for state in self.instance_states}
        launch(self, count_needed, propagated_tags)
        for instance in (state.instance for state in self.instance_states if state.instance_id not in before):
            target = template_data(instance).get("CapacityReservationSpecification", {})
            reservation = reservations(self.ec2_backend).get(
                target.get("CapacityReservationTarget", {}).get("CapacityReservationId", "")
            )
            if reservation and reservation.state == "active" and reservation.available_instance_count:
                instance.__dict__ |= {"reservation": reservation, "capacity_reservation_id": reservation.id}

    FakeAutoScalingGroup.replace_autoscaling_group_instances = launch_reserved  # type: ignore[method-assign]
