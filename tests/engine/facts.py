"""What must be true in AWS after ``up``, read back through boto3 and not from Pulumi's state."""

from __future__ import annotations

import importlib
import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pulumi._types import resource_types

from optimizer.plan import FleetPlan
from tests.engine.deployment import Deployment
from tests.engine.plugin.naming import terraform_type
from tests.engine.plugin.terraform import TerraformProvider

# Arguments of terraform-provider-aws 5.x that 6.x, and so pulumi-aws 7, no longer has; the program uses none of them.
GONE_IN_6 = {
    "aws_launch_template": {"elasticGpuSpecifications", "elasticInferenceAccelerator"},
}


def group(deployed: Deployment) -> dict[str, Any]:
    """The Auto Scaling group as AWS describes it."""
    name = deployed.stack.outputs()["group_name"]
    described = deployed.aws("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    found: list[dict[str, Any]] = described["AutoScalingGroups"]
    assert len(found) == 1
    return found[0]


def check(deployed: Deployment, plan: FleetPlan) -> None:
    """Every fact below."""
    check_group(deployed, plan)
    check_hooks(deployed)
    check_template(deployed, plan)
    check_network(deployed)
    check_bucket(deployed)
    check_key(deployed)
    check_events(deployed)
    check_reservation(deployed, plan)


def check_group(deployed: Deployment, plan: FleetPlan) -> None:
    """As many nodes as the plan says, bought as it says, in one zone, that nothing but themselves may stop."""
    found = group(deployed)
    assert (found["MinSize"], found["MaxSize"], found["DesiredCapacity"]) == (plan.node_count,) * 3
    assert len(found["Instances"]) == plan.node_count
    assert found["NewInstancesProtectedFromScaleIn"] is True
    assert len(found["VPCZoneIdentifier"].split(",")) == 1, "EFA does not cross zones"
    assert [item["ProcessName"] for item in found["SuspendedProcesses"]] == ["AZRebalance"]
    assert "AWSServiceRoleForAutoScaling_" in found["ServiceLinkedRoleARN"]
    tags = {item["Key"]: item["Value"] for item in found["Tags"] if item["PropagateAtLaunch"]}
    assert tags["gpufleet:stack"] == deployed.stack.name
    assert tags["team"] == "research"
    if plan.purchase.option == "spot":
        policy = found["MixedInstancesPolicy"]
        distribution = policy["InstancesDistribution"]
        assert distribution["OnDemandBaseCapacity"] == plan.purchase.on_demand_base
        assert distribution["OnDemandPercentageAboveBaseCapacity"] == 0
        assert distribution["SpotAllocationStrategy"] == "price-capacity-optimized"
        assert [item["InstanceType"] for item in policy["LaunchTemplate"]["Overrides"]] == [plan.instance_type]
    else:
        assert "MixedInstancesPolicy" not in found
        assert found["LaunchTemplate"]["LaunchTemplateId"] == deployed.stack.outputs()["launch_template_id"]


def check_hooks(deployed: Deployment) -> None:
    """A node that never reports is replaced (ABANDON), and no hook notifies anybody by itself."""
    name = deployed.stack.outputs()["group_name"]
    hooks = deployed.aws("autoscaling").describe_lifecycle_hooks(AutoScalingGroupName=name)["LifecycleHooks"]
    assert {hook["LifecycleTransition"].split(":")[1] for hook in hooks} == {
        "EC2_INSTANCE_LAUNCHING",
        "EC2_INSTANCE_TERMINATING",
    }
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
    assert [item["NetworkCardIndex"] for item in interfaces] == list(range(plan.node.efa_cards))
    assert [item["InterfaceType"] for item in interfaces] == ["efa"] + ["efa-only"] * (plan.node.efa_cards - 1)
    assert {item["ResourceType"] for item in data["TagSpecifications"]} == {"instance", "volume", "network-interface"}
    placement_groups = deployed.aws("ec2").describe_placement_groups(GroupNames=[data["Placement"]["GroupName"]])
    assert placement_groups["PlacementGroups"][0]["Strategy"] == "cluster"


def check_network(deployed: Deployment) -> None:
    """No way in from outside: no internet gateway, no public address, no rule for an address outside the VPC."""
    ec2 = deployed.aws("ec2")
    subnet = group(deployed)["VPCZoneIdentifier"]
    described = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]
    vpc = described["VpcId"]
    assert described["MapPublicIpOnLaunch"] is False
    own = ipaddress.IPv4Network(ec2.describe_vpcs(VpcIds=[vpc])["Vpcs"][0]["CidrBlock"])
    by_vpc = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
    assert ec2.describe_internet_gateways(Filters=by_vpc)["InternetGateways"] == []
    groups = ec2.describe_security_groups(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["SecurityGroups"]
    for permission in (permission for item in groups for permission in item["IpPermissions"]):
        for allowed in permission["IpRanges"]:
            assert ipaddress.IPv4Network(allowed["CidrIp"]).subnet_of(own), permission
        assert permission["Ipv6Ranges"] == []
    services = {
        endpoint["ServiceName"].removeprefix("com.amazonaws.us-east-1.")
        for endpoint in ec2.describe_vpc_endpoints(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["VpcEndpoints"]
    }
    assert {"s3", "ec2", "autoscaling", "sqs", "logs", "ssm"} <= services


def check_bucket(deployed: Deployment) -> None:
    """Checkpoints: versioned, under the stack's key, never public, only over TLS; the nodes' files are there."""
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
    objects = s3.list_objects_v2(Bucket=name)["Contents"]
    assert [item["Key"] for item in objects if not item["Key"].endswith(".tar.gz")] == ["bootstrap/wheels.tar"]
    assert [item["Key"].split("/")[0] for item in objects] == ["bootstrap"] * 2
    for item in objects:
        assert s3.head_object(Bucket=name, Key=item["Key"])["SSEKMSKeyId"] == outputs["key_arn"]


def check_key(deployed: Deployment) -> None:
    """The stack's key rotates."""
    key = deployed.stack.outputs()["key_arn"]
    assert deployed.aws("kms").get_key_rotation_status(KeyId=key)["KeyRotationEnabled"] is True


def check_events(deployed: Deployment) -> None:
    """Events of interruption, rebalance, state and lifecycle reach the queue, which keeps what nobody could take."""
    sqs, events = deployed.aws("sqs"), deployed.aws("events")
    url = deployed.stack.outputs()["queue_url"]
    attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert attributes["KmsMasterKeyId"] == deployed.stack.outputs()["key_arn"]
    assert json.loads(attributes["RedrivePolicy"])["maxReceiveCount"] > 0
    kinds: set[str] = set()
    for rule in events.list_rules()["Rules"]:
        kinds.update(json.loads(rule["EventPattern"])["detail-type"])
        targets = events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
        assert [target["Arn"] for target in targets] == [attributes["QueueArn"]]
    assert {
        "EC2 Instance Rebalance Recommendation",
        "EC2 Instance State-change Notification",
        "EC2 Instance-terminate Lifecycle Action",
        "EC2 Spot Instance Interruption Warning",
    } <= kinds


def check_reservation(deployed: Deployment, plan: FleetPlan) -> None:
    """A reserved fleet has a reservation of its size that only its template uses; no other fleet pays for one."""
    found = deployed.aws("ec2").describe_capacity_reservations()["CapacityReservations"]
    if plan.purchase.option != "reserved":
        assert found == []
        return
    (reservation,) = found
    assert reservation["State"] == "active"
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
            resource = getattr(importlib.import_module(f"pulumi_aws.{module}"), class_name)
            theirs = set(resource_types(resource)) | {"id"}
            assert ours - theirs - GONE_IN_6.get(name, set()) == set(), f"{token} ({name})"
    finally:
        terraform.close()
