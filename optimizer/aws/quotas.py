"""Service Quotas that bound a fleet: the quota of each instance type, its value, and its use.

Codes of instances: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html, of networks:
https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html, of volumes:
https://docs.aws.amazon.com/general/latest/gr/ebs-service.html.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from optimizer.aws import errors
from optimizer.aws.paging import filters, instances, pages

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota of Service Quotas, with its instances' market."""

    service: str
    code: str
    name: str
    unit: str
    market: Literal["on-demand", "spot", "capacity-block", ""] = ""

    def increase(self, value: float, region: str) -> str:
        """Return the command that asks AWS for ``value``."""
        return (
            f"aws service-quotas request-service-quota-increase --region {region} --service-code {self.service} "
            f"--quota-code {self.code} --desired-value {math.ceil(value)}"
        )


@dataclass(frozen=True, slots=True)
class Increase:
    """A higher value of a quota."""

    quota: Quota
    value: int


# By the first letters of a type.
_ON_DEMAND = {
    letters: Quota("ec2", code, f"Running On-Demand {name} instances", "vCPUs", "on-demand")
    for letters, name, code in (
        ("p", "P", "L-417A185B"),
        ("g", "G and VT", "L-DB2E81BA"),
        ("standard", "Standard (A, C, D, H, I, M, R, T, Z)", "L-1216C47A"),
    )
}
_STANDARD = frozenset({"a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"})
_SPOT = {
    group: Quota("ec2", code, f"All {name} Spot Instance Requests", "vCPUs", "spot")
    for group, name, code in (
        ("p4", "P4, P3 and P2", "L-7212CCBC"),
        ("p5", "P5", "L-C4BD4855"),
        ("g", "G and VT", "L-3819A6DF"),
    )
}
# AWS's page has P4d to P5en; the codes of P4de and P6 are from Service Quotas' list, read in public code 2026-11-21.
# An organisation's second quota cannot be read.
_CAPACITY_BLOCK = {
    family: Quota("ec2", code, f"Concurrent {name} Capacity Blocks per account", "vCPUs", "capacity-block")
    for family, name, code in (
        ("p4d", "P4d", "L-2C8F52B3"),
        ("p4de", "P4de", "L-CFF3E941"),
        ("p5", "P5", "L-DA6814F2"),
        ("p5e", "P5e", "L-C45F30BC"),
        ("p5en", "P5en", "L-4F9BB70B"),
        ("p6-b200", "P6-B200", "L-8B23CEF3"),
        ("p6-b300", "P6-B300", "L-9C38E5AB"),
    )
}

VPCS = Quota("vpc", "L-F678F1CE", "VPCs per Region", "VPCs")
INTERFACE_ENDPOINTS = Quota("vpc", "L-29B6F2EB", "Interface VPC endpoints per VPC", "interface endpoints")
GATEWAY_ENDPOINTS = Quota("vpc", "L-1B52E74A", "Gateway VPC endpoints per Region", "gateway endpoints")
INTERNET_GATEWAYS = Quota("vpc", "L-A4707A72", "Internet gateways per Region", "internet gateways")
ELASTIC_IPS = Quota("ec2", "L-0263D0A3", "EC2-VPC Elastic IPs", "Elastic IP addresses")
GP3_STORAGE = Quota("ebs", "L-7A658B76", "Storage for General Purpose SSD (gp3) volumes, in TiB", "TiB")
# Codes from Service Quotas' list, read in public code 2026-11-23; the quotas:
# https://docs.aws.amazon.com/fsx/latest/LustreGuide/limits.html
LUSTRE_SYSTEMS = Quota("fsx", "L-FD6F2F22", "Lustre Persistent_2 file systems", "file systems")
LUSTRE_STORAGE = Quota("fsx", "L-8F1B9C74", "Lustre Persistent_2 storage capacity", "GiB")


def family(instance_type: str) -> str:
    """Return a type's family: "p6-b200" for p6-b200.48xlarge."""
    return instance_type.partition(".")[0]


def _group(instance_type: str) -> str:
    letters = "".join(re.findall(r"^[a-z]+", instance_type))
    if letters in _STANDARD:
        return "standard"
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


def capacity_block(instance_type: str) -> Quota | None:
    """Return the quota of a type's active Capacity Blocks; None where none is known."""
    return _CAPACITY_BLOCK.get(family(instance_type))


def limit(client: Any, quota: Quota) -> float:
    """Return the account's value of ``quota``, or AWS's default; an UnusableAnswerError where its name differs:
    https://docs.aws.amazon.com/servicequotas/2019-06-24/apireference/API_GetServiceQuota.html
    """
    names = {"ServiceCode": quota.service, "QuotaCode": quota.code}
    try:
        answer = client.get_service_quota(**names)
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        answer = client.get_aws_default_service_quota(**names)
    actual = answer["Quota"]
    if actual.get("ErrorReason"):
        raise errors.UnusableAnswerError(f"Service Quotas does not know {quota.code}: {actual['ErrorReason']}")
    if _words(actual["QuotaName"]) != _words(quota.name):
        raise errors.UnusableAnswerError(
            f"quota {quota.code} is named {actual['QuotaName']!r}, and {quota.name!r} was expected"
        )
    value = float(actual["Value"])
    if not 0 <= value < float("inf"):
        raise errors.UnusableAnswerError(f"quota {quota.code} is {value}")
    return value


def open_request(client: Any, quota: Quota) -> Mapping[str, Any] | None:
    """Return the account's open request for ``quota``, as AWS describes it; AWS takes no second one meanwhile.

    https://docs.aws.amazon.com/servicequotas/2019-06-24/apireference/API_ListRequestedServiceQuotaChangeHistoryByQuota.html
    """
    operation = "list_requested_service_quota_change_history_by_quota"
    requests = pages(client, operation, "RequestedQuotas", ServiceCode=quota.service, QuotaCode=quota.code)
    return next((request for request in requests if request["Status"] in ("PENDING", "CASE_OPENED")), None)


def request_increase(client: Any, increase: Increase) -> Mapping[str, Any]:
    """Ask AWS for a higher value; return the request.

    https://docs.aws.amazon.com/servicequotas/2019-06-24/apireference/API_RequestServiceQuotaIncrease.html
    """
    quota = increase.quota
    answer = client.request_service_quota_increase(
        ServiceCode=quota.service, QuotaCode=quota.code, DesiredValue=float(increase.value)
    )
    request: Mapping[str, Any] = answer["RequestedQuota"]
    return request


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A pending or running instance."""

    instance_type: str
    lifecycle: str  # "on-demand", "spot", "capacity-block" or "scheduled"
    vcpus: int
    tags: Sequence[Mapping[str, str]]


def running(client: EC2Client) -> list[Running]:
    """Return the account's pending or running instances in the client's region."""
    alive = list(instances(client, Filters=filters({"instance-state-name": ["pending", "running"]})))
    # An instance may have fewer cores than its type; without CpuOptions the type's default counts.
    by_type = vcpus(client, {instance["InstanceType"] for instance in alive if not _own_vcpus(instance)})
    return [
        Running(
            instance_type=instance["InstanceType"],
            lifecycle=instance.get("InstanceLifecycle") or "on-demand",
            vcpus=_own_vcpus(instance) or by_type[instance["InstanceType"]],
            tags=instance.get("Tags", ()),
        )
        for instance in alive
    ]


def _own_vcpus(instance: Mapping[str, Any]) -> int:
    options = instance.get("CpuOptions", {})
    return int(options.get("CoreCount", 0)) * int(options.get("ThreadsPerCore", 0))


def vcpus(client: EC2Client, types: Collection[str]) -> dict[str, int]:
    """Return the default vCPUs of ``types``."""
    if not types:
        return {}
    infos = pages(client, "describe_instance_types", "InstanceTypes", Filters=filters({"instance-type": types}))
    by_name = {info["InstanceType"]: int(info["VCpuInfo"]["DefaultVCpus"]) for info in infos}
    return {name: by_name[name] for name in types}


def is_block(reservation: Mapping[str, Any]) -> bool:
    """Return whether a reservation is a Capacity Block."""
    return reservation.get("ReservationType") == "capacity-block"


def unused(reservation: Mapping[str, Any]) -> int:
    """Count a reservation's unused instances: all of them before it starts."""
    return int(reservation[f"{'Available' if reservation['State'] == 'active' else 'Total'}InstanceCount"])


def requested_spot(client: EC2Client) -> list[tuple[str, int]]:
    """Return type and vCPUs of open spot requests, which count towards the quota too.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-limits.html
    """
    still_open = filters({"state": ["open"]})
    requests = pages(client, "describe_spot_instance_requests", "SpotInstanceRequests", Filters=still_open)
    types: list[str] = [request["LaunchSpecification"]["InstanceType"] for request in requests]
    by_type = vcpus(client, set(types))
    return [(name, by_type[name]) for name in types]


# AWS's description, and the vCPUs of an instance.
Reservation = tuple[dict[str, Any], int]
# True for a resource, as AWS describes it, that is not to be counted.
Owns = Callable[[Mapping[str, Any]], bool]


def reserved(client: EC2Client, account_id: str | None) -> list[Reservation]:
    """Return the Capacity Reservations and Blocks in the account's quotas: not those shared with it.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-reservations.html#capacity-reservations-limits
    """
    counted = filters({"state": ["assessing", "scheduled", "pending", "active", "delayed"]})
    own = [
        reservation
        for reservation in pages(client, "describe_capacity_reservations", "CapacityReservations", Filters=counted)
        if account_id is None or reservation.get("OwnerId", account_id) == account_id
    ]
    by_type = vcpus(client, {reservation["InstanceType"] for reservation in own})
    return [(reservation, by_type[reservation["InstanceType"]]) for reservation in own]


def used_by_blocks(quota: Quota, reservations: Iterable[Reservation]) -> int:
    """Sum the vCPUs of Capacity Blocks that count towards ``quota``."""
    return sum(
        vcpus * int(reservation["TotalInstanceCount"])
        for reservation, vcpus in reservations
        if is_block(reservation) and capacity_block(reservation["InstanceType"]) == quota
    )


def used_on_spot(
    quota: Quota, instances: Iterable[Running], requested: Iterable[tuple[str, int]], owns: Owns = lambda _: False
) -> int:
    """Sum the vCPUs of spot instances and open requests that count towards ``quota``."""
    waiting = sum(vcpus for name, vcpus in requested if spot(name) == quota)
    return waiting + sum(
        instance.vcpus
        for instance in instances
        if instance.lifecycle == "spot" and spot(instance.instance_type) == quota and not owns({"Tags": instance.tags})
    )


def used_on_demand(
    quota: Quota, instances: Iterable[Running], reservations: Iterable[Reservation], owns: Owns = lambda _: False
) -> int:
    """Sum the vCPUs of on-demand instances and unused reservations that count towards ``quota``."""
    held = sum(
        vcpus * unused(reservation)
        for reservation, vcpus in reservations
        if not is_block(reservation) and on_demand(reservation["InstanceType"]) == quota and not owns(reservation)
    )
    return held + sum(
        instance.vcpus
        for instance in instances
        if instance.lifecycle in ("on-demand", "scheduled")
        and on_demand(instance.instance_type) == quota
        and not owns({"Tags": instance.tags})
    )
