"""EC2 capacity reservations, which moto 5.2 does not have.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateCapacityReservation.html and its neighbours.
"""

from __future__ import annotations

import secrets
from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.responses import EC2Response
from moto.ec2.utils import generic_filter

from tests.engine.moto_extension.teaching import teach


class CapacityReservation(TaggedEC2Resource):
    """One reservation; the attributes are named as moto's serializer finds them for the response's fields."""

    def __init__(self, backend: Any, request: dict[str, Any], tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = self.capacity_reservation_id = f"cr-{secrets.token_hex(8)}1"
        self.owner_id = backend.account_id
        self.capacity_reservation_arn = (
            f"arn:aws:ec2:{backend.region_name}:{backend.account_id}:capacity-reservation/{self.id}"
        )
        self.instance_type = request["InstanceType"]
        self.instance_platform = request["InstancePlatform"]
        self.availability_zone = request.get("AvailabilityZone")
        self.availability_zone_id = request.get("AvailabilityZoneId")
        self.tenancy = request.get("Tenancy") or "default"
        self.total_instance_count = int(request["InstanceCount"])
        self.ebs_optimized = bool(request.get("EbsOptimized", False))
        self.ephemeral_storage = bool(request.get("EphemeralStorage", False))
        self.end_date_type = request.get("EndDateType") or "unlimited"
        self.end_date = request.get("EndDate")
        self.instance_match_criteria = request.get("InstanceMatchCriteria") or "open"
        self.placement_group_arn = request.get("PlacementGroupArn")
        self.outpost_arn = request.get("OutpostArn")
        self.client_token = request.get("ClientToken")
        self.reservation_type = "default"
        self.state = "active"
        self.create_date = self.start_date = utcnow()
        self.add_tags(tags)

    @property
    def available_instance_count(self) -> int:
        """Reserved instances not yet running; ``reserved_launches.py`` says which instances are in it."""
        living = [one for one in self.ec2_backend.all_instances() if one.state in ("pending", "running")]
        return self.total_instance_count - sum(one.__dict__.get("reservation") is self for one in living)

    @property
    def tags(self) -> Any:
        """Tags as the response shows them."""
        return self.get_tags()

    def get_filter_value(self, filter_name: str, method_name: str | None = None) -> Any:
        """Value the filter of DescribeCapacityReservations compares."""
        simple = {"instance-type": self.instance_type, "state": self.state, "availability-zone": self.availability_zone}
        if filter_name in simple:
            return simple[filter_name]
        return super().get_filter_value(filter_name, method_name)


def install() -> None:
    """Put the actions into moto's EC2."""
    teach(EC2Response, create_capacity_reservation, describe_capacity_reservations, cancel_capacity_reservation)


def reservations(backend: Any) -> dict[str, CapacityReservation]:
    """The backend's reservations by id; moto's reset empties them with everything else."""
    kept: dict[str, CapacityReservation] = backend.__dict__.setdefault("capacity_reservations", {})
    return kept


def create_capacity_reservation(self: EC2Response) -> ActionResult:
    """CreateCapacityReservation: all instances or none, and once a ClientToken."""
    request = self._get_params()
    if not request.get("AvailabilityZone") and not request.get("AvailabilityZoneId"):
        raise EC2ClientError("MissingParameter", "The request must contain AvailabilityZone or AvailabilityZoneId")
    known, token = reservations(self.ec2_backend), request.get("ClientToken")
    for one in known.values():
        if token and one.client_token == token:
            return ActionResult({"CapacityReservation": one})
    if (request.get("EndDateType") == "limited") != bool(request.get("EndDate")):
        raise EC2ClientError("InvalidParameterCombination", "EndDate goes with EndDateType limited, and only with it")
    tags = self._parse_tag_specification("capacity-reservation").get("capacity-reservation", {})
    reservation = CapacityReservation(self.ec2_backend, request, tags)
    known[reservation.id] = reservation
    return ActionResult({"CapacityReservation": reservation})


def describe_capacity_reservations(self: EC2Response) -> ActionResult:
    """DescribeCapacityReservations; a cancelled one stays visible, as in AWS for some time."""
    ids = self._get_param("CapacityReservationIds", [])
    known = reservations(self.ec2_backend)
    wanted = [_find(self, id_) for id_ in ids] if ids else list(known.values())
    return ActionResult({"CapacityReservations": generic_filter(self._filters_from_querystring(), wanted)})


def cancel_capacity_reservation(self: EC2Response) -> ActionResult:
    """CancelCapacityReservation."""
    reservation = _find(self, self._get_param("CapacityReservationId"))
    if reservation.state != "active":
        raise EC2ClientError(
            "InvalidCapacityReservationState", f"The capacity reservation {reservation.id} is {reservation.state}"
        )
    reservation.state = "cancelled"
    return ActionResult({"Return": True})


def _find(response: EC2Response, id_: str) -> CapacityReservation:
    known = reservations(response.ec2_backend)
    if id_ not in known:
        raise EC2ClientError(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation ID '{id_}' does not exist"
        )
    return known[id_]
