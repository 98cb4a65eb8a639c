"""Service Quotas that bound a fleet: the quota of each instance type, its value, and its use.

https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizer.aws import errors
from optimizer.aws.paging import filters, instances, pages

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client


SERVICE = "ec2"


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota of vCPUs."""

    code: str
    name: str

    def increase(self, value: float, region: str) -> str:
        """Return the command that asks AWS for ``value``."""
        return (
            f"aws service-quotas request-service-quota-increase --region {region} --service-code {SERVICE} "
            f"--quota-code {self.code} --desired-value {math.ceil(value)}"
        )


# By the first letters of a type.
_ON_DEMAND = {
    "p": Quota("L-417A185B", "Running On-Demand P instances"),
    "g": Quota("L-DB2E81BA", "Running On-Demand G and VT instances"),
}
_SPOT = {
    "p4": Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    "p5": Quota("L-C4BD4855", "All P5 Spot Instance Requests"),
    "g": Quota("L-3819A6DF", "All G and VT Spot Instance Requests"),
}


def _group(instance_type: str) -> str:
    letters = "".join(re.findall(r"^[a-z]+", instance_type))
    return "g" if letters in ("gr", "vt") else letters


def on_demand(instance_type: str) -> Quota | None:
    """Return the quota of a type's on-demand instances; None where a stack never starts its family."""
    return _ON_DEMAND.get(_group(instance_type))


def spot(instance_type: str) -> Quota | None:
    """Return the quota of a type's spot instances; None where AWS's page names none (P6, on 2026-11-21)."""
    group, generation = _group(instance_type), instance_type[:2]
    if group == "p":
        group = "p4" if generation in ("p2", "p3") else generation
    return _SPOT.get(group)


def limit(client: Any, quota: Quota) -> float:
    """Return the account's value of ``quota``, or AWS's default; an UnusableAnswerError where AWS has neither:
    https://docs.aws.amazon.com/servicequotas/2019-06-24/apireference/API_GetServiceQuota.html
    """
    names = {"ServiceCode": SERVICE, "QuotaCode": quota.code}
    try:
        answer = client.get_service_quota(**names)
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        answer = client.get_aws_default_service_quota(**names)
    actual = answer["Quota"]
    if actual.get("ErrorReason"):
        raise errors.UnusableAnswerError(f"Service Quotas does not know {quota.code}: {actual['ErrorReason']}")
    return float(actual["Value"])


def is_block(reservation: Mapping[str, Any]) -> bool:
    """Return whether a reservation is a Capacity Block."""
    return reservation.get("ReservationType") == "capacity-block"


def unused(reservation: Mapping[str, Any]) -> int:
    """Count a reservation's unused instances: all of them before it starts."""
    return int(reservation[f"{'Available' if reservation['State'] == 'active' else 'Total'}InstanceCount"])


def used_vcpus(client: EC2Client, account_id: str, owns: Callable[[Mapping[str, Any]], bool]) -> Counter[Quota]:
    """Sum the vCPUs in use by quota: of instances and unused reservations; without what ``owns`` has.

    Reservations that another account shares with ``account_id`` are not counted:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-reservations.html#capacity-reservations-limits
    """
    counts: Counter[tuple[Quota | None, str]] = Counter()
    for instance in instances(client, Filters=filters({"instance-state-name": ["pending", "running"]})):
        lifecycle, name = instance.get("InstanceLifecycle"), instance["InstanceType"]
        # An instance in a Capacity Block counts as the block.
        if lifecycle != "capacity-block" and not owns(instance):
            counts[spot(name) if lifecycle == "spot" else on_demand(name), name] += 1
    held = filters({"state": ["assessing", "scheduled", "pending", "active", "delayed"]})
    for reservation in pages(client, "describe_capacity_reservations", "CapacityReservations", Filters=held):
        name = reservation["InstanceType"]
        if reservation.get("OwnerId", account_id) != account_id:
            continue
        if not is_block(reservation) and not owns(reservation):
            counts[on_demand(name), name] += unused(reservation)
    # An instance with fewer cores than its type counts as its type: too much is safer than too little.
    types = {name for quota, name in counts if quota}
    infos = pages(client, "describe_instance_types", "InstanceTypes", Filters=filters({"instance-type": types}))
    vcpus = {info["InstanceType"]: int(info["VCpuInfo"]["DefaultVCpus"]) for info in (infos if types else ())}
    used: Counter[Quota] = Counter()
    for (quota, name), count in counts.items():
        if quota:
            used[quota] += count * vcpus[name]
    return used
