"""Tables of the AWS resource types that a stack declares: their bill, and words for `gpufleet preview`.

A new type is free, or has a bill, beside its component; a type that is in neither table is unpriced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bootstrap.contract.words import counted

Inputs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bill:
    """One item that AWS bills for each resource of a type."""

    item: str
    unit: str  # item of the catalog's unit prices; empty where no price is known
    every: Literal["hour", "month", "usage"]  # time of the unit price; "usage": nobody knows the quantity before
    note: str = ""


def _values(*keys: str) -> Callable[[Inputs], str]:
    """Words of a type: the values of the given ones of ``keys``."""
    return lambda given: " ".join(str(given[key]) for key in keys if given.get(key))


def _launch_template(given: Inputs) -> str:
    volume = given["blockDeviceMappings"][0]["ebs"]
    words = [given["instanceType"]] if "instanceType" in given else []
    if cards := given.get("networkInterfaces"):
        efa = sum(card["interfaceType"].startswith("efa") for card in cards)
        words.append(f"{efa} EFA interfaces" if efa else "no EFA")
    words.append(f"encrypted {volume['volumeType']} of {volume['volumeSize']:g} GiB")
    words.append(f"IMDSv2 {given['metadataOptions']['httpTokens']}")
    return ", ".join(words)


def _group(given: Inputs) -> str:
    smallest, largest = int(given["minSize"]), int(given["maxSize"])
    words = [f"{smallest} to {counted(largest, 'node')}"]
    if given.get("protectFromScaleIn"):
        # A place of two groups shares its nodes between them.
        most = f"at most {counted(largest, 'node')} while the controller holds them"
        words = [f"{most}, else {smallest}; protected from scale-in"]
    if mixed := given.get("mixedInstancesPolicy"):
        base = int(mixed["instancesDistribution"]["onDemandBaseCapacity"])
        words.append(f"{base} on demand, {largest - base} spot" if base else "spot")
    return "; ".join(words)


def _budget(given: Inputs) -> str:
    levels = sorted({(note["notificationType"].lower(), note["threshold"]) for note in given.get("notifications", [])})
    alerts = ", ".join(f"{threshold:g}% {kind}" for kind, threshold in levels)
    return f"{given['limitAmount']} {given['limitUnit']} {given['timeUnit'].lower()}, alerts at {alerts}"


def _object(given: Inputs) -> str:
    key = str(given["key"])
    # A digest is cut short.
    return key if len(key) < 40 else f"{key[:24]}…{key[key.find('.') :]}"


# Types are named by the last part of the type token: "LaunchTemplate" of "aws:ec2/launchTemplate:LaunchTemplate".
_FREE_BY_PAGE = {
    "https://aws.amazon.com/vpc/pricing/": (
        "Vpc Subnet RouteTable RouteTableAssociation Route InternetGateway DefaultSecurityGroup SecurityGroup "
        "SecurityGroupEgressRule SecurityGroupIngressRule"
    ),
    "https://aws.amazon.com/iam/": "Role RolePolicy InstanceProfile ServiceLinkedRole",
    # "no additional fees"
    "https://aws.amazon.com/autoscaling/pricing/": "PlacementGroup LifecycleHook Policy Schedule",
    # Rules on events of AWS services, and schedules of rules.
    "https://aws.amazon.com/eventbridge/pricing/": "EventRule EventTarget",
    # Budgets without actions.
    "https://aws.amazon.com/aws-cost-management/aws-budgets/pricing/": "Budget",
    "part of a resource that is billed itself": (
        "Alias BucketObjectv2 BucketLifecycleConfiguration BucketOwnershipControls BucketPolicy "
        "BucketPublicAccessBlock BucketServerSideEncryptionConfiguration BucketVersioning DataRepositoryAssociation "
        "LaunchTemplate FunctionEventInvokeConfig Permission TopicPolicy TopicSubscription"
    ),
}
FREE = frozenset(kind for kinds in _FREE_BY_PAGE.values() for kind in kinds.split())

# Bills that depend on the arguments are in optimizer/commands/preview/cost.py.
BILLS: dict[str, tuple[Bill, ...]] = {
    "NatGateway": (
        Bill("NAT gateway", "nat-gateway", "hour"),
        Bill("data through it", "nat-gateway-data", "usage", "and the traffic to the internet"),
    ),
    "Eip": (Bill("public IPv4 address", "public-ipv4", "hour"),),
    "Key": (Bill("key", "kms-key", "month"), Bill("requests", "kms-request", "usage")),
    "LogGroup": (Bill("log data", "log-ingestion", "usage"),),
    "Queue": (Bill("requests", "sqs-request", "usage"),),
    "Topic": (Bill("e-mails of alarms, beyond the first thousand a month", "", "usage"),),
}

_WORDS: dict[str, Callable[[Inputs], str]] = {
    "Vpc": _values("cidrBlock"),
    "Subnet": _values("availabilityZone", "cidrBlock"),
    "Route": _values("destinationCidrBlock", "natGatewayId", "gatewayId"),
    "NatGateway": lambda given: "the nodes' way to the internet, billed by the hour and the GB",
    "VpcEndpoint": _values("vpcEndpointType", "serviceName"),
    "SecurityGroup": _values("description"),
    "SecurityGroupEgressRule": _values("description"),
    "SecurityGroupIngressRule": _values("description"),
    "PlacementGroup": _values("strategy"),
    "Key": "rotated yearly, {deletionWindowInDays:g} days before deletion".format_map,
    "Role": lambda given: given.get("description") or given.get("name", ""),
    "Bucket": _values("bucket"),
    "BucketObjectv2": _object,
    "LustreFileSystem": (
        "{deploymentType} of {storageCapacity:g} GiB, {perUnitStorageThroughput:g} MB/s a TiB".format_map
    ),
    "DataRepositoryAssociation": _values("dataRepositoryPath"),
    "LaunchTemplate": _launch_template,
    "Group": _group,
    "LifecycleHook": "{lifecycleTransition}, {heartbeatTimeout:g} s, then {defaultResult}".format_map,
    "Policy": (
        "keeps {targetTrackingConfiguration[customizedMetricSpecification][metricName]} at "
        "{targetTrackingConfiguration[targetValue]:g}"
    ).format_map,
    "Schedule": "{desiredCapacity:g} nodes at {startTime}".format_map,
    "CapacityReservation": "{instanceCount:g} x {instanceType}, billed from creation to destroy".format_map,
    "Function": "{runtime} on {architectures[0]}, {memorySize:g} MiB, at most {timeout:g} s".format_map,
    "EventRule": _values("eventPattern", "scheduleExpression"),
    "Queue": _values("name"),
    "LogGroup": "{name}, kept {retentionInDays:g} days".format_map,
    "MetricAlarm": lambda given: given.get("alarmDescription", given.get("metricName", "")),
    "TopicSubscription": _values("protocol", "endpoint"),
    "Budget": _budget,
}


def describe(kind: str, inputs: Inputs) -> str:
    """Return the arguments that a reader looks for first, in words."""
    return _WORDS[kind](inputs) if kind in _WORDS else ""
