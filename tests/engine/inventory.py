"""Inventory of an AWS account, to find what a destroyed stack left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import boto3

Client = Callable[[str], Any]
"""Makes a boto3 client of a service by its name."""

Inventory = dict[str, frozenset[str]]
"""Kind of resource → ids of the resources that cost money, hold a name, or block another."""


def clients(endpoint: str, region: str) -> Client:
    """boto3 clients of the emulated AWS at ``endpoint``."""
    session = boto3.Session(aws_access_key_id="testing", aws_secret_access_key="testing", region_name=region)
    return lambda service: session.client(service, endpoint_url=endpoint)  # type: ignore[call-overload]


def _ec2(client: Client) -> Iterable[tuple[str, Iterable[str]]]:
    ec2 = client("ec2")

    def ids(call: str, items: str, key: str) -> list[str]:
        return [item[key] for page in ec2.get_paginator(call).paginate() for item in page[items]]

    yield "vpc", ids("describe_vpcs", "Vpcs", "VpcId")
    yield "subnet", ids("describe_subnets", "Subnets", "SubnetId")
    yield "route table", ids("describe_route_tables", "RouteTables", "RouteTableId")
    yield "internet gateway", ids("describe_internet_gateways", "InternetGateways", "InternetGatewayId")
    yield "network interface", ids("describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId")
    yield "security group", ids("describe_security_groups", "SecurityGroups", "GroupId")
    yield "security group rule", ids("describe_security_group_rules", "SecurityGroupRules", "SecurityGroupRuleId")
    yield "launch template", ids("describe_launch_templates", "LaunchTemplates", "LaunchTemplateId")
    yield "volume", ids("describe_volumes", "Volumes", "VolumeId")
    yield "address", [item["AllocationId"] for item in ec2.describe_addresses()["Addresses"]]
    yield "placement group", [item["GroupId"] for item in ec2.describe_placement_groups()["PlacementGroups"]]
    # Deleted gateways and endpoints and terminated instances stay visible for a while, at no cost.
    gateways = ec2.describe_nat_gateways()["NatGateways"]
    yield "NAT gateway", [item["NatGatewayId"] for item in gateways if item["State"] != "deleted"]
    yield (
        "VPC endpoint",
        [e["VpcEndpointId"] for e in ec2.describe_vpc_endpoints()["VpcEndpoints"] if e["State"].lower() != "deleted"],
    )
    yield (
        "instance",
        [
            instance["InstanceId"]
            for page in ec2.get_paginator("describe_instances").paginate()
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] != "terminated"
        ],
    )
    yield (
        "capacity reservation",
        [
            item["CapacityReservationId"]
            for item in ec2.describe_capacity_reservations()["CapacityReservations"]
            if item["State"] != "cancelled"
        ],
    )


def _others(client: Client) -> Iterable[tuple[str, Iterable[str]]]:
    groups = client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    yield "Auto Scaling group", [item["AutoScalingGroupName"] for item in groups]
    yield "bucket", [item["Name"] for item in client("s3").list_buckets()["Buckets"]]
    kms = client("kms")
    states = {
        item["KeyId"]: kms.describe_key(KeyId=item["KeyId"])["KeyMetadata"]["KeyState"]
        for item in kms.list_keys()["Keys"]
    }
    # AWS deletes a key only after a waiting period.
    yield "key", [key for key, state in states.items() if state != "PendingDeletion"]
    yield "key alias", [item["AliasName"] for item in kms.list_aliases()["Aliases"] if "TargetKeyId" in item]
    iam = client("iam")
    yield "role", [item["Arn"] for item in iam.list_roles()["Roles"]]
    yield "instance profile", [item["Arn"] for item in iam.list_instance_profiles()["InstanceProfiles"]]
    yield "policy", [item["Arn"] for item in iam.list_policies(Scope="Local")["Policies"]]
    yield "queue", client("sqs").list_queues().get("QueueUrls", [])
    sns = client("sns")
    yield "topic", [item["TopicArn"] for item in sns.list_topics()["Topics"]]
    yield "subscription", [item["SubscriptionArn"] for item in sns.list_subscriptions()["Subscriptions"]]
    yield "event rule", [item["Arn"] for item in client("events").list_rules()["Rules"]]
    yield "log group", [item["arn"] for item in client("logs").describe_log_groups()["logGroups"]]
    yield "alarm", [item["AlarmArn"] for item in client("cloudwatch").describe_alarms()["MetricAlarms"]]
    yield "function", [item["FunctionArn"] for item in client("lambda").list_functions()["Functions"]]
    yield "schedule", [item["Arn"] for item in client("scheduler").list_schedules()["Schedules"]]
    fsx = client("fsx")
    yield "file system", [item["ResourceARN"] for item in fsx.describe_file_systems()["FileSystems"]]
    links = fsx.describe_data_repository_associations()["Associations"]
    yield "data repository association", [item["ResourceARN"] for item in links]
    # moto lists AWS's public parameters, once one is read, as the account's.
    parameters = [item["Name"] for item in client("ssm").describe_parameters()["Parameters"]]
    yield "parameter", [name for name in parameters if not name.startswith("/aws/service/")]
    account = client("sts").get_caller_identity()["Account"]
    yield "budget", [b["BudgetName"] for b in client("budgets").describe_budgets(AccountId=account).get("Budgets", [])]


def inventory(client: Client) -> Inventory:
    """Everything in the account, by kind."""
    return {kind: frozenset(ids) for listing in (_ec2, _others) for kind, ids in listing(client)}


def left_behind(before: Inventory, after: Inventory) -> dict[str, list[str]]:
    """Resources of ``after`` that ``before`` lacks, by kind."""
    return {kind: sorted(ids - before[kind]) for kind, ids in after.items() if ids - before[kind]}
