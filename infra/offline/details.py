"""What a reader of ``gpufleet preview`` looks for first in a resource's arguments, in words: one line a type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Inputs = Mapping[str, Any]


def detail(kind: str, given: Inputs) -> str:
    """The words for one resource.

    Args:
        kind: the last part of its type token, like "LaunchTemplate".
        given: its arguments; of a component, none.
    """
    return _WORDS[kind](given) if given and kind in _WORDS else ""


def _named(*keys: str) -> Callable[[Inputs], str]:
    """The values of ``keys`` that are given, one after another."""
    return lambda given: " ".join(str(given[key]) for key in keys if given.get(key))


def _launch_template(given: Inputs) -> str:
    volume = given["blockDeviceMappings"][0]["ebs"]
    words = [given["instanceType"]] if "instanceType" in given else []
    if cards := given.get("networkInterfaces", []):
        efa = sum(card["interfaceType"].startswith("efa") for card in cards)
        words.append(f"EFA on {efa} of {len(cards)} interfaces")
    words.append(f"encrypted {volume['volumeType']} of {volume['volumeSize']:g} GiB")
    words.append(f"IMDSv2 {given['metadataOptions']['httpTokens']}")
    return ", ".join(words)


def _group(given: Inputs) -> str:
    smallest, largest = int(given["minSize"]), int(given["maxSize"])
    if given.get("protectFromScaleIn"):
        words = [f"{largest} nodes while the controller holds them, else {smallest}; protected from scale-in"]
    else:
        words = [f"{smallest} to {largest} nodes"]
    if mixed := given.get("mixedInstancesPolicy"):
        base = int(mixed["instancesDistribution"]["onDemandBaseCapacity"])
        words.append(f"{base} on demand, {largest - base} spot")
        types = [override["instanceType"] for override in mixed["launchTemplate"].get("overrides", [])]
        if len(types) > 1:
            words.append(f"of {', '.join(types)}")
    if pool := given.get("warmPool"):
        words.append(f"{pool['minSize']:g} more stopped and ready")
    return "; ".join(words)


def _alarm(given: Inputs) -> str:
    return str(given.get("alarmDescription", given.get("metricName", "")))


def _schedule(given: Inputs) -> str:
    when = f"{given['recurrence']} {given.get('timeZone', 'UTC')}" if "recurrence" in given else given["startTime"]
    return f"{given['desiredCapacity']:g} nodes at {when}"


def _policy(given: Inputs) -> str:
    if "targetTrackingConfiguration" in given:
        tracking = given["targetTrackingConfiguration"]
        metric = tracking["customizedMetricSpecification"]["metricName"]
        return f"keeps {metric} at {tracking['targetValue']:g}"
    steps = ", ".join(f"{step['scalingAdjustment']:+g}" for step in given.get("stepAdjustments", []))
    return f"steps of {steps} nodes"


def _dashboard(given: Inputs) -> str:
    return f"{given['dashboardName']}, {len(json.loads(given['dashboardBody'])['widgets'])} widgets"


def _budget(given: Inputs) -> str:
    levels = sorted({(note["notificationType"].lower(), note["threshold"]) for note in given.get("notifications", [])})
    alerts = ", ".join(f"{threshold:g}% {kind}" for kind, threshold in levels)
    return f"{given['limitAmount']} {given['limitUnit']} {given['timeUnit'].lower()}, alerts at {alerts}"


def _node_group(given: Inputs) -> str:
    return f"{given['scalingConfig']['desiredSize']:g} x {', '.join(given['instanceTypes'])}, {given['capacityType']}"


def _route(given: Inputs) -> str:
    target = next((given[key] for key in ("natGatewayId", "gatewayId") if key in given), "")
    return f"{given['destinationCidrBlock']} through {target}"


_WORDS: dict[str, Callable[[Inputs], str]] = {
    "AccessEntry": _named("type", "principalArn"),
    "Addon": _named("addonName", "addonVersion"),
    "Bucket": _named("bucket"),
    "BucketObjectv2": lambda given: _object_detail(str(given["key"])),
    "Budget": _budget,
    "CapacityReservation": lambda given: (
        f"{given['instanceCount']:g} x {given['instanceType']}, billed from creation to destroy"
    ),
    "Cluster": lambda given: f"Kubernetes {given['version']}, API {_reach(given['vpcConfig'])}",
    "Dashboard": _dashboard,
    "EventRule": _named("eventPattern", "scheduleExpression"),
    "FlowLog": lambda given: f"{given['trafficType']} traffic, every {given['maxAggregationInterval']:g} s",
    "Function": lambda given: (
        f"{given['runtime']} on {', '.join(given['architectures'])}, {given['memorySize']:g} MiB, at most "
        f"{given['timeout']:g} s"
    ),
    "Group": _group,
    "Key": lambda given: f"rotated yearly, {given['deletionWindowInDays']:g} days before deletion",
    "LaunchTemplate": _launch_template,
    "LifecycleHook": lambda given: (
        f"{given['lifecycleTransition']}, {given['heartbeatTimeout']:g} s, then {given['defaultResult']}"
    ),
    "LogGroup": lambda given: f"{given['name']}, kept {given['retentionInDays']:g} days",
    "MetricAlarm": _alarm,
    "NatGateway": lambda given: "the nodes' way to the internet, billed by the hour and the GB",
    "NodeGroup": _node_group,
    "PlacementGroup": _named("strategy"),
    "PodIdentityAssociation": _named("namespace", "serviceAccount"),
    "Policy": _policy,
    "Queue": _named("name"),
    "Role": lambda given: str(given.get("description") or given.get("name", "")),
    "Route": _route,
    "Schedule": _schedule,
    "SecurityGroup": _named("description"),
    "SecurityGroupEgressRule": _named("description"),
    "SecurityGroupIngressRule": _named("description"),
    "Subnet": _named("availabilityZone", "cidrBlock"),
    "TopicSubscription": _named("protocol", "endpoint"),
    "Vpc": _named("cidrBlock"),
    "VpcEndpoint": _named("vpcEndpointType", "serviceName"),
}


def _reach(vpc: Inputs) -> str:
    if not vpc.get("endpointPublicAccess"):
        return "inside the VPC only"
    return f"also from {', '.join(vpc.get('publicAccessCidrs', ['anywhere']))}"


def _object_detail(key: str) -> str:
    # A digest is cut short.
    return key if len(key) < 40 else f"{key[:24]}…{key[key.find('.') :]}"
