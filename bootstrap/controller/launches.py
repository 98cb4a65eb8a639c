"""Ask Auto Scaling for a gang's nodes, all in one zone and at once, and classify its answers.

LaunchInstances answers with the nodes or with errors: https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-instances-synchronously.html
It cannot launch nodes of two markets, and does not say that it heeds a group's capacity reservations, as it does a
launch template's (https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchInstances.html). So nodes of two
markets are in two groups, and the reservation is in the template. Workers alone come by their group's size, which
policies move.
"""

from __future__ import annotations

import re
from dataclasses import replace
from http import HTTPStatus
from itertools import product
from typing import Any

import botocore
from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import LaunchRequest
from bootstrap.controller.clients import Clients, error_code
from bootstrap.controller.observation import LaunchAnswer

# Nodes a call (the first page above).
MOST_NODES = 100
# EC2 itself has no node of the type in the zone, at the price, whoever asks: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
POOL_EMPTY = frozenset({
    "InsufficientHostCapacity", "InsufficientInstanceCapacity", "SpotMaxPriceTooLow", "UnfulfillableCapacity",
    "Unsupported",
})  # fmt: skip
# The account's quota, subnet or reservation has no room:
# https://github.com/aws/karpenter-provider-aws/blob/main/pkg/errors/errors.go
_NO_ROOM = re.compile(r"\w+(Limit|Count|Capacity)Exceeded|InsufficientFreeAddressesInSubnet")
# AWS has not decided whether nodes come, as with every server error: the same token asks again.
_PASSING = frozenset({"IdempotentCallInProgress", "RequestLimitExceeded", "Throttling", "ThrottlingException"})


class OldBotocoreError(BotoCoreError):
    """Lambda's runtime has an old SDK: https://docs.aws.amazon.com/lambda/latest/dg/python-package.html."""

    fmt = "botocore {version} of the function's runtime has no LaunchInstances: add a layer with boto3 1.44 or newer"


def is_refusal(code: str) -> bool:
    """Return whether nodes lack now, and another place or a later time may have them."""
    return code in POOL_EMPTY or _NO_ROOM.fullmatch(code) is not None


def launch(clients: Clients, settings: ControllerSettings, request: LaunchRequest) -> LaunchAnswer | None:
    """Launch the nodes of a request; None where AWS has yet to answer.

    The ClientToken makes a repetition the same launch. A place's first group is filled as far as AWS has nodes for it,
    and the place's own takes the rest. A lone node is asked for in one zone of its place after another.
    """
    if not hasattr(clients.launching, "launch_instances"):
        raise OldBotocoreError(version=botocore.__version__)
    launched, part = list[str](), LaunchAnswer(ids=())
    place, nodes, first = settings.places[request.place], request.nodes, request.first
    # By group: launched nodes below which it is not asked, and nodes with which it is done.
    asks = [(key, 0, nodes if key == request.place else first) for key in settings.keys_of(request.place)]
    if place.first and not place.first.reservation_id:
        # Spot comes before the nodes on demand beside it: it is refused more often, and a refusal then bills none.
        rest = nodes - first
        asks = [(request.place, 0, rest), (asks[0][0], rest, nodes), (request.place, rest, nodes)]
    for (key, least, wanted), (number, subnet) in product(asks, enumerate(place.subnets.split(","))):
        if len(launched) < least:
            break
        group = settings.group_of(key)
        while (missing := min(wanted - len(launched), MOST_NODES)) > 0:
            token = f"{request.asked_at.timestamp():.0f}-{group}-{number}-{len(launched)}"
            answer = _ask(clients, group, missing, subnet, token)
            if answer is None:
                return None
            part = answer
            launched += part.ids
            if part.message:
                break
        if part.code and not is_refusal(part.code):
            break
    return LaunchAnswer(ids=tuple(launched)) if len(launched) >= nodes else replace(part, ids=tuple(launched))


def _ask(clients: Clients, group: str, nodes: int, subnet: str, token: str) -> LaunchAnswer | None:
    try:
        answer: Any = clients.launching.launch_instances(
            AutoScalingGroupName=group,
            RequestedCapacity=nodes,
            ClientToken=token,
            SubnetIds=[subnet],
            RetryStrategy="none",
        )
    except ClientError as refused:
        code, status = error_code(refused), refused.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        # To EC2 a lack of capacity is a server's error, too (POOL_EMPTY's page).
        if code in _PASSING or (status >= HTTPStatus.INTERNAL_SERVER_ERROR and not is_refusal(code)):
            return None
        return LaunchAnswer(ids=(), code=code, message=str(refused), subnet=subnet)
    came = tuple(key for of in answer.get("Instances", []) for key in of["InstanceIds"])
    if len(came) >= nodes:
        return LaunchAnswer(ids=came)
    error: Any = next(iter(answer.get("Errors", [])), {})
    return LaunchAnswer(
        ids=came,
        message=error.get("ErrorMessage", "") or f"{len(came)} of {nodes} nodes came",
        code=error.get("ErrorCode", ""),
        subnet=error.get("SubnetId", "") or subnet,
    )
