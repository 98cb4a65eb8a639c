"""Facts that must hold in AWS after ``up``, read through boto3 and not from Pulumi's state."""

from __future__ import annotations

import base64
import importlib
import ipaddress
import json
import keyword
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pulumi._types import resource_types

from bootstrap.contract.settings import VARIABLE, ControllerSettings
from infra.policies.resources import EVENTS
from optimizer.contract.plan import INTERFACE_ENDPOINTS, FleetPlan
from tests.engine.deployment import Deployment
from tests.engine.plugin.naming import terraform_type
from tests.engine.plugin.terraform import TerraformProvider

ACCOUNT = "123456789012"  # moto's

# Arguments of terraform-provider-aws 5.x that 6.x, and so pulumi-aws 7, no longer has; the program uses none of them.
GONE_IN_6 = {"aws_eip": {"vpc"}, "aws_launch_template": {"elasticGpuSpecifications", "elasticInferenceAccelerator"}}


def group(deployed: Deployment) -> dict[str, Any]:
    """The Auto Scaling group as AWS describes it."""
    name = deployed.stack.outputs()["group_name"]
    described = deployed.aws("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    groups: list[dict[str, Any]] = described["AutoScalingGroups"]
    assert len(groups) == 1
    return groups[0]


def check(deployed: Deployment, plan: FleetPlan, *, own_network: bool = True) -> None:
    """Check every fact of a training gang without nodes."""
    fleet = group(deployed)
    # The controller, which meters, asks for nodes; `up` does not.
    assert (fleet["MinSize"], fleet["MaxSize"], fleet["DesiredCapacity"]) == (0, plan.node_count, 0)
    assert fleet["Instances"] == []
    # The scheduled action that drains a Capacity Block may end any node.
    assert fleet["NewInstancesProtectedFromScaleIn"] is (plan.purchase.option != "capacity-block")
    check_group(deployed, plan)
    check_hooks(deployed)
    check_template(deployed, plan)
    if own_network:
        check_network(deployed)
    check_reservation(deployed, plan)
    check_all_stacks(deployed)


def check_all_stacks(deployed: Deployment) -> None:
    """Check the facts of every mode."""
    check_bucket(deployed)
    check_key(deployed)
    check_events(deployed)
    check_controller(deployed)
    check_watching(deployed)
    check_roles(deployed)


def check_group(deployed: Deployment, plan: FleetPlan) -> None:
    """Nodes are bought as planned, in one zone, and no rebalancing of zones ends them."""
    fleet = group(deployed)
    assert len(fleet["VPCZoneIdentifier"].split(",")) == 1, "EFA does not cross zones"
    assert [item["ProcessName"] for item in fleet["SuspendedProcesses"]] == ["AZRebalance"]
    assert "AWSServiceRoleForAutoScaling_" in fleet["ServiceLinkedRoleARN"]
    tags = {item["Key"]: item["Value"] for item in fleet["Tags"] if item["PropagateAtLaunch"]}
    assert tags["gpufleet:stack"] == deployed.stack.name
    assert tags["team"] == "research"
    if plan.purchase.option == "spot":
        policy = fleet["MixedInstancesPolicy"]
        distribution = policy["InstancesDistribution"]
        # A gang's nodes on demand are in a group of their own.
        assert distribution["OnDemandBaseCapacity"] == 0
        assert distribution["OnDemandPercentageAboveBaseCapacity"] == 0
        assert distribution["SpotAllocationStrategy"] == "price-capacity-optimized"
        types = [plan.instance_type]
        assert [item["InstanceType"] for item in policy["LaunchTemplate"]["Overrides"]] == types
    else:
        assert "MixedInstancesPolicy" not in fleet
        assert fleet["LaunchTemplate"]["LaunchTemplateId"] == deployed.stack.outputs()["launch_template_id"]


def check_hooks(deployed: Deployment) -> None:
    """A silent node is replaced (ABANDON), and no hook has a notification target."""
    name = deployed.stack.outputs()["group_name"]
    hooks = deployed.aws("autoscaling").describe_lifecycle_hooks(AutoScalingGroupName=name)["LifecycleHooks"]
    assert {hook["LifecycleTransition"].split(":")[1] for hook in hooks} == {
        "EC2_INSTANCE_LAUNCHING",
        "EC2_INSTANCE_TERMINATING",
    }
    assert {hook["LifecycleHookName"] for hook in hooks} == {"gpufleet-launch", "gpufleet-terminate"}
    for hook in hooks:
        assert hook["DefaultResult"] == "ABANDON"
        assert "NotificationTargetARN" not in hook
        assert "RoleARN" not in hook


def check_template(deployed: Deployment, plan: FleetPlan) -> None:
    """IMDSv2 with one hop, an encrypted root volume under the stack's key, EFA on every card, tags."""
    outputs = deployed.stack.outputs()
    versions = deployed.aws("ec2").describe_launch_template_versions(
        LaunchTemplateId=outputs["launch_template_id"], Versions=["$Latest"]
    )
    data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert data["InstanceType"] == plan.instance_type
    assert data["ImageId"] == outputs["image"]["id"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    (volume,) = (mapping["Ebs"] for mapping in data["BlockDeviceMappings"])
    assert volume["Encrypted"] is True
    assert volume["KmsKeyId"] == outputs["key_arn"]
    assert (volume["VolumeType"], volume["VolumeSize"]) == ("gp3", plan.volumes.root_gib)
    interfaces = data["NetworkInterfaces"]
    cards = range(plan.node.efa_cards)
    at = [(item["NetworkCardIndex"], item["DeviceIndex"]) for item in interfaces]
    assert at == [(0, 0), *((card, int(card == 0)) for card in cards)]
    assert [item["InterfaceType"] for item in interfaces] == ["interface"] + ["efa-only"] * plan.node.efa_cards
    assert {item["ResourceType"] for item in data["TagSpecifications"]} == {"instance", "volume", "network-interface"}
    if not plan.purchase.capacity_reservation_id:  # which belongs to a placement group of its own, or to none
        placement_groups = deployed.aws("ec2").describe_placement_groups(GroupNames=[data["Placement"]["GroupName"]])
        assert placement_groups["PlacementGroups"][0]["Strategy"] == "cluster"
    market = data.get("InstanceMarketOptions", {}).get("MarketType")
    assert market == ("capacity-block" if plan.purchase.option == "capacity-block" else None)
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    topped_up = plan.purchase.on_demand_top_up
    assert target.get("CapacityReservationId") == (None if topped_up else outputs.get("capacity_reservation_id"))


def check_lustre(deployed: Deployment, linked: str) -> None:
    """One file system beside the nodes, under the stack's key, linked to the data's prefix; the nodes know where."""
    fsx, outputs = deployed.aws("fsx"), deployed.stack.outputs()
    (system,) = fsx.describe_file_systems()["FileSystems"]
    (link,) = fsx.describe_data_repository_associations()["Associations"]
    assert system["SubnetIds"] == group(deployed)["VPCZoneIdentifier"].split(",")
    assert (system["KmsKeyId"], system["LustreConfiguration"]["DeploymentType"]) == (outputs["key_arn"], "PERSISTENT_2")
    assert (link["FileSystemId"], link["DataRepositoryPath"]) == (system["FileSystemId"], linked)
    assert (link["FileSystemPath"], link["BatchImportMetaDataOnCreate"], "S3" in link) == ("/", True, False)
    (version,) = deployed.aws("ec2").describe_launch_template_versions(
        LaunchTemplateId=outputs["launch_template_id"], Versions=["$Latest"]
    )["LaunchTemplateVersions"]
    user_data = base64.b64decode(version["LaunchTemplateData"]["UserData"]).decode()
    address = f"{system['DNSName']}@tcp:/{system['LustreConfiguration']['MountName']}"
    assert f"GPUFLEET_LUSTRE={address}\n" in user_data


def check_network(deployed: Deployment) -> None:
    """No way in from outside: no public address, no rule for an address outside the VPC.

    An internet gateway exists only where a NAT gateway, which answers nobody from outside, needs one.
    """
    ec2 = deployed.aws("ec2")
    subnet = group(deployed)["VPCZoneIdentifier"]
    described = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]
    vpc = described["VpcId"]
    assert described["MapPublicIpOnLaunch"] is False
    own = ipaddress.IPv4Network(ec2.describe_vpcs(VpcIds=[vpc])["Vpcs"][0]["CidrBlock"])
    by_vpc = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
    gateways = ec2.describe_internet_gateways(Filters=by_vpc)["InternetGateways"]
    assert bool(gateways) is bool(ec2.describe_nat_gateways()["NatGateways"])
    groups = ec2.describe_security_groups(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["SecurityGroups"]
    for permission in (permission for item in groups for permission in item["IpPermissions"]):
        for allowed in permission["IpRanges"]:
            assert ipaddress.IPv4Network(allowed["CidrIp"]).subnet_of(own), permission
        assert permission["Ipv6Ranges"] == []
    services = {
        endpoint["ServiceName"].removeprefix("com.amazonaws.us-east-1.")
        for endpoint in ec2.describe_vpc_endpoints(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["VpcEndpoints"]
    }
    assert {"s3", *INTERFACE_ENDPOINTS} <= services


def check_bucket(deployed: Deployment) -> None:
    """The bucket is versioned, under the stack's key, never public, TLS only; it holds the nodes' code."""
    s3, outputs = deployed.aws("s3"), deployed.stack.outputs()
    name = outputs["bucket"]
    assert s3.get_bucket_versioning(Bucket=name)["Status"] == "Enabled"
    (rule,) = s3.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"] == {
        "SSEAlgorithm": "aws:kms",
        "KMSMasterKeyID": outputs["key_arn"],
    }
    assert all(s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"].values())
    policy = json.loads(s3.get_bucket_policy(Bucket=name)["Policy"])
    conditions = [statement["Condition"] for statement in policy["Statement"] if statement["Effect"] == "Deny"]
    assert {"Bool": {"aws:SecureTransport": "false"}} in conditions
    assert s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]
    keys = [item["Key"] for item in s3.list_objects_v2(Bucket=name, Prefix="bootstrap/")["Contents"]]
    kinds = sorted(re.sub(r"[0-9a-f]{64}", "SHA256", key) for key in keys)
    assert kinds == ["bootstrap/SHA256.tar.gz", "bootstrap/controller-SHA256.zip", "bootstrap/wheels.tar"]
    for key in keys:
        assert s3.head_object(Bucket=name, Key=key)["SSEKMSKeyId"] == outputs["key_arn"]


def check_key(deployed: Deployment) -> None:
    """The stack's key rotates."""
    key = deployed.stack.outputs()["key_arn"]
    assert deployed.aws("kms").get_key_rotation_status(KeyId=key)["KeyRotationEnabled"] is True


def check_events(deployed: Deployment) -> None:
    """Events of interruption and maintenance reach the queue, from which nothing takes them but the controller."""
    sqs, events = deployed.aws("sqs"), deployed.aws("events")
    url = deployed.stack.outputs()["queue_url"]
    attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert attributes["SqsManagedSseEnabled"] == "true"
    assert "RedrivePolicy" not in attributes
    kinds: set[str] = set()
    for rule in events.list_rules()["Rules"]:
        if "EventPattern" not in rule:
            continue
        kinds.update(json.loads(rule["EventPattern"])["detail-type"])
        targets = events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
        assert [target["Arn"] for target in targets] == [attributes["QueueArn"]]
    assert kinds == {kind for pattern in EVENTS.values() for kind in pattern["detail-type"]}


def check_controller(deployed: Deployment) -> None:
    """The function runs every minute, only its rule may call it, and its settings parse."""
    functions, events = deployed.aws("lambda"), deployed.aws("events")
    (function,) = functions.list_functions()["Functions"]
    settings = controller_settings(deployed)
    assert (settings.group, settings.stack) == (group(deployed)["AutoScalingGroupName"], deployed.stack.name)
    assert settings.bucket == deployed.stack.outputs()["bucket"]
    assert settings.queue_url == deployed.stack.outputs()["queue_url"]
    assert function["KMSKeyArn"] == deployed.stack.outputs()["key_arn"]
    (rule,) = [item for item in events.list_rules()["Rules"] if "ScheduleExpression" in item]
    assert (rule["ScheduleExpression"], rule["State"]) == ("rate(1 minute)", "ENABLED")
    (target,) = events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
    assert target["Arn"] == function["FunctionArn"]
    (permission,) = json.loads(functions.get_policy(FunctionName=function["FunctionName"])["Policy"])["Statement"]
    assert permission["Principal"] == {"Service": "events.amazonaws.com"}
    assert permission["Condition"]["ArnLike"]["AWS:SourceArn"] == rule["Arn"]
    invoked = functions.get_function_event_invoke_config(FunctionName=function["FunctionName"])
    assert invoked["MaximumRetryAttempts"] == 0, "two ticks of one minute are in each other's way"


def check_watching(deployed: Deployment) -> None:
    """Logs expire and are under the stack's key; alarms and budget exist."""
    key, aws = deployed.stack.outputs()["key_arn"], deployed.aws
    for log_group in aws("logs").describe_log_groups()["logGroups"]:
        assert log_group["retentionInDays"] > 0
        assert log_group["kmsKeyId"] == key
    cloudwatch = aws("cloudwatch")
    (topic,) = [item["TopicArn"] for item in aws("sns").list_topics()["Topics"]]
    told = [alarm for alarm in cloudwatch.describe_alarms()["MetricAlarms"] if topic in alarm["AlarmActions"]]
    assert len(told) >= 5
    (budget,) = aws("budgets").describe_budgets(AccountId=ACCOUNT)["Budgets"]
    assert float(budget["BudgetLimit"]["Amount"]) > 0
    assert budget["CostFilters"] == {"TagKeyValue": [f"user:gpufleet:stack${deployed.stack.name}"]}
    notices = aws("budgets").describe_notifications_for_budget(AccountId=ACCOUNT, BudgetName=budget["BudgetName"])
    assert {item["NotificationType"] for item in notices["Notifications"]} == {"ACTUAL", "FORECASTED"}


def check_roles(deployed: Deployment) -> None:
    """Every role's policies are documents that AWS can read, and none allows every action."""
    iam = deployed.aws("iam")
    for role in iam.list_roles(PathPrefix="/gpufleet/")["Roles"] or iam.list_roles()["Roles"]:
        for name in iam.list_role_policies(RoleName=role["RoleName"])["PolicyNames"]:
            document = iam.get_role_policy(RoleName=role["RoleName"], PolicyName=name)["PolicyDocument"]
            assert document["Version"] == "2012-10-17"
            for statement in document["Statement"]:
                actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
                assert statement["Effect"] == "Deny" or "*" not in actions


def check_scaling(deployed: Deployment) -> None:
    """Workers scale by target tracking on the nodes' metric."""
    scaling, name = deployed.aws("autoscaling"), group(deployed)["AutoScalingGroupName"]
    (policy,) = scaling.describe_policies(AutoScalingGroupName=name)["ScalingPolicies"]
    metric = policy["TargetTrackingConfiguration"]["CustomizedMetricSpecification"]
    assert metric["MetricName"] == "GpuUtilizationPercent"
    assert metric["Namespace"] == controller_settings(deployed).metric_namespace


def controller_settings(deployed: Deployment) -> ControllerSettings:
    """Settings that the deployed controller reads."""
    (function,) = deployed.aws("lambda").list_functions()["Functions"]
    uri = function["Environment"]["Variables"][VARIABLE]
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    body = deployed.aws("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    return ControllerSettings.from_text(body.decode(), uri)


def check_reservation(deployed: Deployment, plan: FleetPlan) -> None:
    """A reserved fleet has a reservation of its size that only its template uses; other fleets keep none."""
    active: Any = [{"Name": "state", "Values": ["active"]}]
    reservations = deployed.aws("ec2").describe_capacity_reservations(Filters=active)["CapacityReservations"]
    if plan.purchase.option != "reserved" or plan.purchase.capacity_reservation_id:
        assert {one["CapacityReservationId"] for one in reservations} <= {plan.purchase.capacity_reservation_id}
        return
    (reservation,) = reservations
    assert reservation["InstanceType"] == plan.instance_type
    assert reservation["TotalInstanceCount"] == plan.node_count
    assert reservation["InstanceMatchCriteria"] == "targeted"
    assert reservation["CapacityReservationId"] == deployed.stack.outputs()["capacity_reservation_id"]


def names_agree_with_pulumi_aws(provider: Path, tokens: Iterable[str]) -> None:
    """The property names the plugin derives for these resource types are those of the installed pulumi_aws.

    A wrong name would otherwise only show once the program uses that argument.
    """
    terraform = TerraformProvider(provider)
    try:
        for token in (item for item in tokens if item.startswith("aws:")):
            name = terraform_type(token, terraform.resource_types)
            block = terraform.resource_block(name)
            ours = {item.pulumi_name for item in block.attributes.values() if item.settable}
            ours |= {item.pulumi_name for item in block.blocks.values() if item.name != "timeouts"}
            module, class_name = token.removeprefix("aws:").split("/")[0], token.split(":")[-1]
            module += "_" * keyword.iskeyword(module)  # pulumi_aws.lambda_
            resource = getattr(importlib.import_module(f"pulumi_aws.{module}"), class_name)
            theirs = set(resource_types(resource)) | {"id"}
            assert ours - theirs - GONE_IN_6.get(name, set()) == set(), f"{token} ({name})"
    finally:
        terraform.close()
