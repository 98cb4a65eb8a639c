"""Ask EC2 for a gang's start reservation, and read the stack's. Nothing here decides; ``reservations.py`` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.start_reservation import LASTS, STACK_TAG, START_TAG, read_reservations, start_token
from bootstrap.contract.state import ControllerState, StartReservation
from bootstrap.controller.activities import to_failed_launch
from bootstrap.controller.clients import Clients, error_code, to_seconds
from bootstrap.controller.observation import FailedLaunch, Reservation
from bootstrap.controller.reservations import to_token

# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
_DENIED = ("UnauthorizedOperation", "AccessDenied")
_PASSING = ("RequestLimitExceeded", "Throttling", "InternalError", "ServiceUnavailable", "Unavailable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Start reservations of the stack, EC2's refusal of another, and free instances of the owned reservation."""

    reservations: tuple[Reservation, ...] = ()
    refused: FailedLaunch | None = None
    owned_free: int | None = None


def reserve(
    clients: Clients,
    settings: ControllerSettings,
    state: ControllerState | None,
    tags: Mapping[str, str],
    now: datetime,
    problems: list[str],
) -> Answer:
    """Read the stack's reservations, and make the one that the written state asks for, with the group's ``tags``.

    The state came first: whichever tick dies after the request, the next one finds the reservation by its tags.
    """
    asked = state.reservation if state and state.reservation and state.reservation.is_asked else None
    try:
        entries = list(read_reservations(clients.ec2))
    except ClientError as error:
        if error_code(error) not in _DENIED:
            raise
        # A permissions boundary may lack the call. Without it no reservation is made.
        problems.append(f"no start reservations: {error}")
        return Answer(refused=_refusal(settings, asked, error, now) if asked else None)
    found = [_parse(token, entry) for entry in entries if (token := start_token(entry, settings.stack))]
    answer = Answer(reservations=tuple(found), owned_free=_count_free(settings, entries))
    if asked is None or any(one.token == to_token(settings, asked) for one in found):
        return answer
    try:
        return replace(answer, reservations=(*found, _create(clients, settings, asked, tags)))
    except (ClientError, BotoCoreError) as error:
        # Without an answer it may have been made: the next tick finds it.
        if isinstance(error, ClientError) and error_code(error) not in _PASSING:
            return replace(answer, refused=_refusal(settings, asked, error, now))
        problems.append(f"no start reservation yet: {error}")
    return answer


def _count_free(settings: ControllerSettings, entries: Iterable[Any]) -> int | None:
    """Count the free instances of the owned reservation: none of one that has ended; None where no node is owned."""
    if settings.owned is None:
        return None
    own = [entry for entry in entries if entry["CapacityReservationId"] == settings.owned.reservation_id]
    return sum(int(entry["AvailableInstanceCount"]) for entry in own if entry["State"] == "active")


def _refusal(settings: ControllerSettings, asked: StartReservation, error: ClientError, now: datetime) -> FailedLaunch:
    subnet = next((subnet for subnet, zone_id in settings.zones.items() if zone_id == asked.zone_id), "")
    failed = to_failed_launch(str(error), at=now, began_at=asked.asked_at, subnet=subnet)
    return replace(failed, instance_type=asked.instance_type)


def _parse(token: str, entry: Any) -> Reservation:
    return Reservation(
        reservation_id=entry["CapacityReservationId"],
        token=token,
        instance_type=entry["InstanceType"],
        created_at=to_seconds(entry["CreateDate"]),
        # "Billing starts as soon as the Capacity Reservation is provisioned":
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-pricing-billing.html
        active=entry["State"] == "active",
        total=entry["TotalInstanceCount"],
        unused=entry["AvailableInstanceCount"],
    )


def _create(
    clients: Clients, settings: ControllerSettings, asked: StartReservation, group_tags: Mapping[str, str]
) -> Reservation:
    assert settings.reserved_start
    token = to_token(settings, asked)
    # The user's tags (gpufleet:tags) come from the group: the function's variables have no room for them.
    tags = {**group_tags, "Name": settings.group, STACK_TAG: settings.stack, START_TAG: token}
    request: Any = {
        "ClientToken": token,
        "InstanceType": asked.instance_type,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZoneId": asked.zone_id,
        "InstanceCount": asked.node_count or settings.node_count,
        "EbsOptimized": True,
        # No other instance of the account takes a place.
        "InstanceMatchCriteria": "targeted",
        "EndDateType": "limited",
        "EndDate": asked.asked_at + LASTS,
        "TagSpecifications": [
            {
                "ResourceType": "capacity-reservation",
                # Tags are sorted: EC2 refuses a repeated token whose parameters differ.
                "Tags": [{"Key": key, "Value": value} for key, value in sorted(tags.items())],
            }
        ],
    }
    if settings.reserved_start.placement_group_arn:
        # Instances of a cluster placement group use no capacity from outside:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
        request["PlacementGroupArn"] = settings.reserved_start.placement_group_arn
    return _parse(token, clients.ec2.create_capacity_reservation(**request)["CapacityReservation"])
