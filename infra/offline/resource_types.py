"""Table of the AWS resource types that a stack declares: a new type is one row here, beside its component.

``gpufleet preview`` and the guardrails read the rows. An unknown type is unpriced and breaks a guardrail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bootstrap.contract.words import counted

Inputs = Mapping[str, Any]

# A type that holds data encrypts it by one argument, or has a rule of its own in guardrails.py.
NO_DATA = "no data"
OWN_RULE = "own rule"

# Pages that say that AWS does not bill a type.
_VPC = "https://aws.amazon.com/vpc/pricing/"
_IAM = "https://aws.amazon.com/iam/"
_AUTO_SCALING = "https://aws.amazon.com/autoscaling/pricing/"  # "no additional fees"
_EVENTS = "https://aws.amazon.com/eventbridge/pricing/"  # rules on events of AWS services, and schedules of rules
_BUDGETS = "https://aws.amazon.com/aws-cost-management/aws-budgets/pricing/"  # budgets without actions
_PART = "part of a resource that is billed itself"


@dataclass(frozen=True, slots=True)
class Bill:
    """One item that AWS bills for each resource of a type."""

    item: str
    unit: str  # item of the catalog's unit prices; empty where no price is known
    every: Literal["hour", "month", "usage"]  # time of the unit price; "usage": nobody knows the quantity before
    note: str = ""


@dataclass(frozen=True, slots=True)
class ResourceType:
    """One type of resource."""

    encryption: str  # NO_DATA, OWN_RULE, or the argument that names the KMS key or turns encryption on
    free: str = ""  # page that says that AWS does not bill the type; empty for a billed type
    bills: tuple[Bill, ...] = ()  # empty where they depend on the arguments (optimizer/commands/preview/cost.py)
    protected: bool = False  # it guards checkpoints, so `pulumi destroy` must refuse to delete it
    words: Callable[[Inputs], str] = lambda given: ""  # the arguments for a reader


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
        words = [
            f"{counted(largest, 'node')} while the controller holds them, else {smallest}; protected from scale-in"
        ]
    if mixed := given.get("mixedInstancesPolicy"):
        base = int(mixed["instancesDistribution"]["onDemandBaseCapacity"])
        words.append(f"{base} on demand, {largest - base} spot")
        types = [override["instanceType"] for override in mixed["launchTemplate"].get("overrides", [])]
        if len(types) > 1:
            words.append(f"of {', '.join(types)}")
    return "; ".join(words)


def _schedule(given: Inputs) -> str:
    when = f"{given['recurrence']} {given.get('timeZone', 'UTC')}" if "recurrence" in given else given["startTime"]
    return f"{counted(int(given['desiredCapacity']), 'node')} at {when}"


def _policy(given: Inputs) -> str:
    if "targetTrackingConfiguration" in given:
        tracking = given["targetTrackingConfiguration"]
        metric = tracking["customizedMetricSpecification"]["metricName"]
        return f"keeps {metric} at {tracking['targetValue']:g}"
    steps = ", ".join(f"{step['scalingAdjustment']:+g}" for step in given.get("stepAdjustments", []))
    return f"steps of {steps} nodes"


def _budget(given: Inputs) -> str:
    levels = sorted({(note["notificationType"].lower(), note["threshold"]) for note in given.get("notifications", [])})
    alerts = ", ".join(f"{threshold:g}% {kind}" for kind, threshold in levels)
    return f"{given['limitAmount']} {given['limitUnit']} {given['timeUnit'].lower()}, alerts at {alerts}"


def _object(given: Inputs) -> str:
    key = str(given["key"])
    # A digest is cut short.
    return key if len(key) < 40 else f"{key[:24]}…{key[key.find('.') :]}"


def _route(given: Inputs) -> str:
    return f"{given['destinationCidrBlock']} through {given.get('natGatewayId', given.get('gatewayId', ''))}"


# By the last part of the type token: "LaunchTemplate" of "aws:ec2/launchTemplate:LaunchTemplate".
TYPES: dict[str, ResourceType] = {
    # Network
    "Vpc": ResourceType(NO_DATA, _VPC, words=_values("cidrBlock")),
    "Subnet": ResourceType(NO_DATA, _VPC, words=_values("availabilityZone", "cidrBlock")),
    "RouteTable": ResourceType(NO_DATA, _VPC),
    "RouteTableAssociation": ResourceType(NO_DATA, _VPC),
    "Route": ResourceType(NO_DATA, _VPC, words=_route),
    "InternetGateway": ResourceType(NO_DATA, _VPC),
    "NatGateway": ResourceType(
        NO_DATA,
        bills=(
            Bill("NAT gateway", "nat-gateway", "hour"),
            Bill("data through it", "nat-gateway-data", "usage", "and the traffic to the internet"),
        ),
        words=lambda given: "the nodes' way to the internet, billed by the hour and the GB",
    ),
    "Eip": ResourceType(NO_DATA, bills=(Bill("public IPv4 address", "public-ipv4", "hour"),)),
    "VpcEndpoint": ResourceType(NO_DATA, words=_values("vpcEndpointType", "serviceName")),
    "DefaultSecurityGroup": ResourceType(NO_DATA, _VPC),
    "SecurityGroup": ResourceType(NO_DATA, _VPC, words=_values("description")),
    "SecurityGroupEgressRule": ResourceType(NO_DATA, _VPC, words=_values("description")),
    "SecurityGroupIngressRule": ResourceType(NO_DATA, _VPC, words=_values("description")),
    "PlacementGroup": ResourceType(NO_DATA, _AUTO_SCALING, words=_values("strategy")),
    "FlowLog": ResourceType(
        NO_DATA,
        bills=(Bill("log data of the VPC's flows", "vended-log-ingestion", "usage"),),
        words="{trafficType} traffic, every {maxAggregationInterval:g} s".format_map,
    ),
    # Permissions and keys
    "Key": ResourceType(
        NO_DATA,
        bills=(Bill("key", "kms-key", "month"), Bill("requests", "kms-request", "usage")),
        protected=True,
        words="rotated yearly, {deletionWindowInDays:g} days before deletion".format_map,
    ),
    "Alias": ResourceType(NO_DATA, _PART),
    "Role": ResourceType(NO_DATA, _IAM, words=lambda given: given.get("description") or given.get("name", "")),
    "RolePolicy": ResourceType(NO_DATA, _IAM),
    "InstanceProfile": ResourceType(NO_DATA, _IAM),
    "ServiceLinkedRole": ResourceType(NO_DATA, _IAM),
    "Parameter": ResourceType(OWN_RULE),
    # Checkpoints
    "Bucket": ResourceType(OWN_RULE, protected=True, words=_values("bucket")),
    "BucketObjectv2": ResourceType("kmsKeyId", _PART, words=_object),
    "BucketLifecycleConfiguration": ResourceType(NO_DATA, _PART),
    "BucketOwnershipControls": ResourceType(NO_DATA, _PART),
    "BucketPolicy": ResourceType(NO_DATA, _PART, protected=True),
    "BucketPublicAccessBlock": ResourceType(NO_DATA, _PART, protected=True),
    "BucketServerSideEncryptionConfiguration": ResourceType(NO_DATA, _PART, protected=True),
    "BucketVersioning": ResourceType(NO_DATA, _PART),
    # Data
    "LustreFileSystem": ResourceType(
        "kmsKeyId",
        words="{deploymentType} of {storageCapacity:g} GiB, {perUnitStorageThroughput:g} MB/s a TiB".format_map,
    ),
    "DataRepositoryAssociation": ResourceType(NO_DATA, _PART, words=_values("dataRepositoryPath")),
    # Nodes
    "LaunchTemplate": ResourceType(OWN_RULE, _PART, words=_launch_template),
    "Group": ResourceType(NO_DATA, words=_group),
    "LifecycleHook": ResourceType(
        NO_DATA,
        _AUTO_SCALING,
        words="{lifecycleTransition}, {heartbeatTimeout:g} s, then {defaultResult}".format_map,
    ),
    "Policy": ResourceType(NO_DATA, _AUTO_SCALING, words=_policy),
    "Schedule": ResourceType(NO_DATA, _AUTO_SCALING, words=_schedule),
    "CapacityReservation": ResourceType(
        NO_DATA,
        words="{instanceCount:g} x {instanceType}, billed from creation to destroy".format_map,
    ),
    # Controller
    "Function": ResourceType(
        OWN_RULE,
        words="{runtime} on {architectures[0]}, {memorySize:g} MiB, at most {timeout:g} s".format_map,
    ),
    "FunctionEventInvokeConfig": ResourceType(NO_DATA, _PART),
    "Permission": ResourceType(NO_DATA, _PART),
    "EventRule": ResourceType(NO_DATA, _EVENTS, words=_values("eventPattern", "scheduleExpression")),
    "EventTarget": ResourceType(NO_DATA, _EVENTS),
    # Events, logs, alarms
    "Queue": ResourceType(
        "sqsManagedSseEnabled",
        bills=(Bill("requests", "sqs-request", "usage"),),
        words=_values("name"),
    ),
    "LogGroup": ResourceType("kmsKeyId", words="{name}, kept {retentionInDays:g} days".format_map),
    "Dashboard": ResourceType(
        NO_DATA,
        bills=(Bill("dashboard", "dashboard", "month"),),
        words=lambda given: f"{given['dashboardName']}, {len(json.loads(given['dashboardBody'])['widgets'])} widgets",
    ),
    "MetricAlarm": ResourceType(
        NO_DATA, words=lambda given: given.get("alarmDescription", given.get("metricName", ""))
    ),
    "Topic": ResourceType(
        "kmsMasterKeyId",
        bills=(Bill("e-mails of alarms, beyond the first thousand a month", "", "usage"),),
    ),
    "TopicPolicy": ResourceType(NO_DATA, _PART),
    "TopicSubscription": ResourceType(NO_DATA, _PART, words=_values("protocol", "endpoint")),
    "Budget": ResourceType(NO_DATA, _BUDGETS, words=_budget),
}
