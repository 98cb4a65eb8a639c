"""What the extension teaches moto is what the AWS documentation says; each module names its pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.engine.deployment import REGION
from tests.engine.emulated_aws import emulated_aws
from tests.engine.inventory import Client, clients
from tests.engine.moto_extension.bucket_policies import applies


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One emulated AWS for all tests here; each uses names of its own."""
    with emulated_aws(tmp_path_factory.mktemp("moto"), {"an image": "x86_64"}) as endpoint:
        yield clients(endpoint, REGION)


def refusal(code: str) -> Any:
    return pytest.raises(ClientError, match=rf"\({code}\)")


def test_images_are_amazons(aws: Client) -> None:
    (image,) = aws("ec2").describe_images(Owners=["amazon"], Filters=[{"Name": "name", "Values": ["an image"]}])[
        "Images"
    ]
    assert image["Architecture"] == "x86_64"


class TestPlacementGroups:
    def test_one_comes_and_goes(self, aws: Client) -> None:
        ec2 = aws("ec2")
        tags = [{"Key": "team", "Value": "research"}]
        created = ec2.create_placement_group(
            GroupName="gang",
            Strategy="cluster",
            TagSpecifications=[{"ResourceType": "placement-group", "Tags": tags}],
        )["PlacementGroup"]
        (described,) = ec2.describe_placement_groups(GroupNames=["gang"])["PlacementGroups"]
        assert described == created
        assert (described["State"], described["Strategy"], described["Tags"]) == ("available", "cluster", tags)
        assert described["GroupArn"] == "arn:aws:ec2:us-east-1:123456789012:placement-group/gang"
        ec2.delete_placement_group(GroupName="gang")
        with refusal("InvalidPlacementGroup.Unknown"):
            ec2.describe_placement_groups(GroupNames=["gang"])
        with refusal("InvalidPlacementGroup.Unknown"):
            ec2.delete_placement_group(GroupName="gang")

    def test_a_name_is_taken_once(self, aws: Client) -> None:
        aws("ec2").create_placement_group(GroupName="twice", Strategy="spread")
        with refusal("InvalidPlacementGroup.Duplicate"):
            aws("ec2").create_placement_group(GroupName="twice", Strategy="spread")

    def test_one_with_running_instances_stays(self, aws: Client) -> None:
        ec2 = aws("ec2")
        ec2.create_placement_group(GroupName="busy", Strategy="cluster")
        ec2.create_launch_template(
            LaunchTemplateName="busy",
            LaunchTemplateData={"ImageId": "ami-12345678", "Placement": {"GroupName": "busy"}},
        )
        launched = ec2.run_instances(LaunchTemplate={"LaunchTemplateName": "busy"}, MinCount=1, MaxCount=1)
        with refusal("InvalidPlacementGroup.InUse"):
            ec2.delete_placement_group(GroupName="busy")
        ec2.terminate_instances(InstanceIds=[launched["Instances"][0]["InstanceId"]])
        ec2.delete_placement_group(GroupName="busy")


class TestCapacityReservations:
    REQUEST: Mapping[str, Any] = {
        "InstanceType": "p4d.24xlarge",
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": "us-east-1a",
        "InstanceCount": 2,
        "InstanceMatchCriteria": "targeted",
    }

    def test_one_comes_changes_and_goes(self, aws: Client) -> None:
        ec2 = aws("ec2")
        created = ec2.create_capacity_reservation(**self.REQUEST)["CapacityReservation"]
        id_ = created["CapacityReservationId"]
        assert (created["State"], created["TotalInstanceCount"], created["EndDateType"]) == ("active", 2, "unlimited")
        ec2.modify_capacity_reservation(CapacityReservationId=id_, InstanceCount=3)
        (described,) = ec2.describe_capacity_reservations(CapacityReservationIds=[id_])["CapacityReservations"]
        assert described["TotalInstanceCount"] == 3
        assert described["InstanceMatchCriteria"] == "targeted"
        ec2.cancel_capacity_reservation(CapacityReservationId=id_)
        (described,) = ec2.describe_capacity_reservations(CapacityReservationIds=[id_])["CapacityReservations"]
        assert described["State"] == "cancelled"
        with refusal("InvalidCapacityReservationState"):
            ec2.cancel_capacity_reservation(CapacityReservationId=id_)

    def test_one_needs_a_zone(self, aws: Client) -> None:
        with refusal("MissingParameter"):
            aws("ec2").create_capacity_reservation(
                **{key: value for key, value in self.REQUEST.items() if key != "AvailabilityZone"}
            )

    def test_an_unknown_one_is_not_found(self, aws: Client) -> None:
        with refusal("InvalidCapacityReservationId.NotFound"):
            aws("ec2").describe_capacity_reservations(CapacityReservationIds=["cr-01234567"])


class TestInstances:
    @staticmethod
    def life(aws: Client, name: str, *, keep: bool) -> tuple[set[str], set[str]]:
        """Volumes and interfaces that a launch adds, and those left after termination."""

        def existing() -> set[str]:
            volumes = {item["VolumeId"] for item in ec2.describe_volumes()["Volumes"]}
            return volumes | {i["NetworkInterfaceId"] for i in ec2.describe_network_interfaces()["NetworkInterfaces"]}

        ec2 = aws("ec2")
        image = ec2.describe_images(Owners=["amazon"])["Images"][0]
        volume = {"VolumeSize": 200, "VolumeType": "gp3", "DeleteOnTermination": not keep}
        data = {
            "ImageId": image["ImageId"],
            "BlockDeviceMappings": [{"DeviceName": image["RootDeviceName"], "Ebs": volume}],
            "NetworkInterfaces": [{"DeviceIndex": 0, "DeleteOnTermination": not keep}],
        }
        ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
        before = existing()
        subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        launched = ec2.run_instances(
            LaunchTemplate={"LaunchTemplateName": name}, SubnetId=subnet, MinCount=1, MaxCount=1
        )
        running = existing() - before
        ec2.terminate_instances(InstanceIds=[launched["Instances"][0]["InstanceId"]])
        return running, existing() - before

    def test_what_a_template_lets_go_goes(self, aws: Client) -> None:
        running, left = self.life(aws, "goes", keep=False)
        assert sorted(item.split("-")[0] for item in running) == ["eni", "vol"]
        assert left == set()

    def test_what_a_template_keeps_stays(self, aws: Client) -> None:
        running, left = self.life(aws, "stays", keep=True)
        assert sorted(item.split("-")[0] for item in running) == ["eni", "vol"]
        assert left == running


class TestAutoScalingGroups:
    @staticmethod
    def create(aws: Client, name: str, **more: Any) -> Any:
        aws("ec2").create_launch_template(
            LaunchTemplateName=name, LaunchTemplateData={"ImageId": "ami-12345678", "InstanceType": "g4dn.xlarge"}
        )
        template: dict[str, Any] = {"LaunchTemplate": {"LaunchTemplateName": name}}
        if "MixedInstancesPolicy" in more:
            template = {}
        request = {"MinSize": 1, "MaxSize": 1, "AvailabilityZones": ["us-east-1a"], **template, **more}
        scaling = aws("autoscaling")
        scaling.create_auto_scaling_group(AutoScalingGroupName=name, **request)
        return scaling

    @staticmethod
    def describe(scaling: Any, name: str) -> dict[str, Any]:
        (group,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
        assert isinstance(group, dict)
        return group

    def test_a_hook_is_what_was_given(self, aws: Client) -> None:
        hook = {"LifecycleHookName": "launch", "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING"}
        scaling = self.create(aws, "hooked", LifecycleHookSpecificationList=[{**hook, "HeartbeatTimeout": 600}])
        (found,) = scaling.describe_lifecycle_hooks(AutoScalingGroupName="hooked")["LifecycleHooks"]
        assert found == {
            **hook,
            "AutoScalingGroupName": "hooked",
            "HeartbeatTimeout": 600,
            "DefaultResult": "ABANDON",
            "GlobalTimeout": 60_000,
        }

    def test_a_hook_keeps_what_a_change_does_not_name(self, aws: Client) -> None:
        scaling = self.create(aws, "changed")
        put = {"AutoScalingGroupName": "changed", "LifecycleHookName": "end"}
        with refusal("ValidationError"):
            scaling.put_lifecycle_hook(**put)
        queue = "arn:aws:sqs:us-east-1:123456789012:events"
        scaling.put_lifecycle_hook(
            **put, LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING", NotificationTargetARN=queue
        )
        scaling.put_lifecycle_hook(**put, DefaultResult="CONTINUE")
        (found,) = scaling.describe_lifecycle_hooks(AutoScalingGroupName="changed")["LifecycleHooks"]
        assert found["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING"
        assert (found["DefaultResult"], found["HeartbeatTimeout"]) == ("CONTINUE", 3600)
        assert found["NotificationTargetARN"] == queue
        scaling.put_lifecycle_hook(**put, NotificationTargetARN="")
        (found,) = scaling.describe_lifecycle_hooks(AutoScalingGroupName="changed")["LifecycleHooks"]
        assert "NotificationTargetARN" not in found

    def test_the_role_is_the_one_given(self, aws: Client) -> None:
        role = "arn:aws:iam::123456789012:role/aws-service-role/autoscaling.amazonaws.com/{}"
        scaling = self.create(aws, "roled", ServiceLinkedRoleARN=role.format("one"))
        assert self.describe(scaling, "roled")["ServiceLinkedRoleARN"] == role.format("one")
        scaling.update_auto_scaling_group(AutoScalingGroupName="roled", ServiceLinkedRoleARN=role.format("two"))
        assert self.describe(scaling, "roled")["ServiceLinkedRoleARN"] == role.format("two")

    def test_an_update_keeps_the_mixed_instances_policy(self, aws: Client) -> None:
        policy = {
            "LaunchTemplate": {
                "LaunchTemplateSpecification": {"LaunchTemplateName": "mixed", "Version": "1"},
                "Overrides": [{"InstanceType": "g4dn.xlarge"}],
            },
            "InstancesDistribution": {"OnDemandBaseCapacity": 1},
        }
        scaling = self.create(aws, "mixed", MixedInstancesPolicy=policy)
        before = self.describe(scaling, "mixed")["MixedInstancesPolicy"]
        scaling.update_auto_scaling_group(AutoScalingGroupName="mixed", MaxSize=2)
        assert self.describe(scaling, "mixed")["MixedInstancesPolicy"] == before

    def test_one_with_instances_goes_by_force_only_and_takes_them_along(self, aws: Client) -> None:
        hook = {"LifecycleHookName": "end", "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING"}
        scaling = self.create(aws, "full", NewInstancesProtectedFromScaleIn=True, LifecycleHookSpecificationList=[hook])
        (instance,) = (item["InstanceId"] for item in self.describe(scaling, "full")["Instances"])
        with refusal("ResourceInUse"):
            scaling.delete_auto_scaling_group(AutoScalingGroupName="full")
        scaling.delete_auto_scaling_group(AutoScalingGroupName="full", ForceDelete=True)
        reservations = aws("ec2").describe_instances(InstanceIds=[instance])["Reservations"]
        assert reservations[0]["Instances"][0]["State"]["Name"] == "terminated"
        assert scaling.describe_lifecycle_hooks(AutoScalingGroupName="full")["LifecycleHooks"] == []


class TestBucketPolicies:
    @staticmethod
    def bucket(aws: Client, name: str, *statements: dict[str, Any]) -> Any:
        s3 = aws("s3")
        s3.create_bucket(Bucket=name)
        policy = [
            {"Effect": "Deny", "Principal": "*", "Resource": f"arn:aws:s3:::{name}/*", **statement}
            for statement in statements
        ]
        s3.put_bucket_policy(Bucket=name, Policy=json.dumps({"Version": "2012-10-17", "Statement": policy}))
        return s3

    def test_a_policy_against_plain_http_lets_the_endpoint_through(self, aws: Client) -> None:
        s3 = self.bucket(aws, "tls", {"Action": "s3:*", "Condition": {"Bool": {"aws:SecureTransport": "false"}}})
        s3.put_object(Bucket="tls", Key="a", Body=b"a")
        assert s3.get_object(Bucket="tls", Key="a")["Body"].read() == b"a"

    def test_a_policy_without_condition_denies(self, aws: Client) -> None:
        s3 = self.bucket(aws, "closed", {"Action": "s3:PutObject"})
        with refusal("403|AccessDenied|Forbidden"):
            s3.put_object(Bucket="closed", Key="a", Body=b"a")

    def test_an_upload_under_another_key_is_denied_and_one_without_a_key_is_not(self, aws: Client) -> None:
        header = "s3:x-amz-server-side-encryption-aws-kms-key-id"
        only = {"StringNotEquals": {header: "ours"}, "Null": {header: "false"}}
        s3 = self.bucket(aws, "keyed", {"Action": "s3:PutObject", "Condition": only})
        encrypted = {"Bucket": "keyed", "Key": "a", "Body": b"a", "ServerSideEncryption": "aws:kms"}
        s3.put_object(**encrypted)
        s3.put_object(**encrypted, SSEKMSKeyId="ours")
        with refusal("403|AccessDenied|Forbidden"):
            s3.put_object(**encrypted, SSEKMSKeyId="theirs")

    @pytest.mark.parametrize(
        ("condition", "context", "met"),
        [
            ({}, {}, True),
            ({"Bool": {"k": "true"}}, {"k": "true"}, True),
            ({"Bool": {"k": "true"}}, {"k": "false"}, False),
            ({"Bool": {"k": "false"}}, {}, False),
            ({"NumericLessThan": {"k": "1.2"}}, {"k": "1.1"}, True),
            ({"NumericLessThan": {"k": "1.2"}}, {"k": "1.2"}, False),
            ({"NumericLessThan": {"k": "1.2"}}, {}, False),
            ({"StringEquals": {"k": ["a", "b"]}}, {"k": "b"}, True),
            ({"StringEquals": {"k": "a"}}, {}, False),
            ({"StringNotEquals": {"k": "a"}}, {}, True),
            ({"StringNotEquals": {"k": "a"}}, {"k": "a"}, False),
            ({"Null": {"k": "true"}}, {}, True),
            ({"Null": {"k": "false"}}, {}, False),
            ({"Null": {"k": "false"}}, {"k": "a"}, True),
            ({"Null": {"k": "false"}, "StringEquals": {"k": "a"}}, {"k": "b"}, False),
        ],
    )
    def test_operators(self, condition: dict[str, dict[str, Any]], context: dict[str, str], met: bool) -> None:
        assert applies(condition, context) is met

    def test_an_unknown_operator_is_an_error(self) -> None:
        with pytest.raises(NotImplementedError, match="IpAddress"):
            applies({"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, {})


def test_a_launch_templates_own_tags_are_not_its_instances(aws: Client) -> None:
    ec2 = aws("ec2")
    tags = [{"Key": "a", "Value": "b"}]
    created = ec2.create_launch_template(
        LaunchTemplateName="tagged",
        LaunchTemplateData={"TagSpecifications": [{"ResourceType": "instance", "Tags": tags}]},
        TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
    )["LaunchTemplate"]
    assert created["Tags"] == tags
    (version,) = ec2.describe_launch_template_versions(LaunchTemplateName="tagged")["LaunchTemplateVersions"]
    assert version["LaunchTemplateData"]["TagSpecifications"] == [{"ResourceType": "instance", "Tags": tags}]


def test_a_group_launches_from_a_second_version(aws: Client) -> None:
    ec2, scaling = aws("ec2"), aws("autoscaling")
    data = {"ImageId": "ami-12345678", "InstanceType": "g4dn.xlarge", "UserData": "IyEvYmluL3No"}
    ec2.create_launch_template(LaunchTemplateName="versions", LaunchTemplateData=data)
    changed = {**data, "UserData": "IyEvYmluL2Jhc2g="}
    ec2.create_launch_template_version(LaunchTemplateName="versions", LaunchTemplateData=changed)
    scaling.create_auto_scaling_group(
        AutoScalingGroupName="versions",
        MinSize=1,
        MaxSize=1,
        AvailabilityZones=["us-east-1a"],
        LaunchTemplate={"LaunchTemplateName": "versions", "Version": "2"},
    )
    (group,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["versions"])["AutoScalingGroups"]
    assert len(group["Instances"]) == 1
    found = ec2.describe_launch_template_versions(LaunchTemplateName="versions", Versions=["2"])
    assert found["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"] == changed["UserData"]


def test_a_redrive_policy_reads_compact(aws: Client) -> None:
    sqs = aws("sqs")
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = {"deadLetterTargetArn": arn, "maxReceiveCount": 5}
    queue = sqs.create_queue(QueueName="alive", Attributes={"RedrivePolicy": json.dumps(policy)})["QueueUrl"]
    text = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]["RedrivePolicy"]
    assert json.loads(text) == policy
    assert " " not in text


def test_a_rule_keeps_its_description_whatever_it_refers_to(aws: Client) -> None:
    ec2 = aws("ec2")
    group = ec2.create_security_group(GroupName="described", Description="x")["GroupId"]
    prefixes = ec2.create_managed_prefix_list(PrefixListName="p", MaxEntries=1, AddressFamily="IPv4")["PrefixList"]
    targets = {
        "a group": {"UserIdGroupPairs": [{"GroupId": group, "Description": "a group"}]},
        "a list": {"PrefixListIds": [{"PrefixListId": prefixes["PrefixListId"], "Description": "a list"}]},
        "a range": {"IpRanges": [{"CidrIp": "10.0.0.0/8", "Description": "a range"}]},
    }
    for target in targets.values():
        permission = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, **target}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[permission])
    rules = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])["SecurityGroupRules"]
    assert {rule.get("Description") for rule in rules if not rule["IsEgress"]} == set(targets)
