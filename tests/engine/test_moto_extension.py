"""The extension's answers are those of the AWS documentation; each module names its pages."""

from __future__ import annotations

import io
import json
import time
import zipfile
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
    """One emulated AWS for all tests; each test has its own names."""
    with emulated_aws(tmp_path_factory.mktemp("moto"), {"an image": "x86_64"}) as endpoint:
        yield clients(endpoint, REGION)


def refusal(code: str) -> Any:
    return pytest.raises(ClientError, match=rf"\({code}\)")


def test_images_are_amazons(aws: Client) -> None:
    (image,) = aws("ec2").describe_images(Owners=["amazon"], Filters=[{"Name": "name", "Values": ["an image"]}])[
        "Images"
    ]
    assert (image["Architecture"], image["EnaSupport"]) == ("x86_64", True)


def test_log_events_come_by_prefix_and_time(aws: Client) -> None:
    logs, now = aws("logs"), int(time.time() * 1000)
    logs.create_log_group(logGroupName="output")
    for stream, at in (("train/b", now - 1), ("train/a", now), ("other/c", now)):
        logs.create_log_stream(logGroupName="output", logStreamName=stream)
        event = {"timestamp": at, "message": stream}
        logs.put_log_events(logGroupName="output", logStreamName=stream, logEvents=[event])
    for prefix, expected in (("train/", ["train/b", "train/a"]), ("absent/", [])):
        answer = logs.filter_log_events(logGroupName="output", logStreamNamePrefix=prefix)
        assert [event["message"] for event in answer["events"]] == expected


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

    def test_a_client_token_makes_one(self, aws: Client) -> None:
        ec2 = aws("ec2")
        made = [
            ec2.create_capacity_reservation(**self.REQUEST, ClientToken=token)["CapacityReservation"]
            for token in ("one", "one", "another")
        ]
        assert len({one["CapacityReservationId"] for one in made}) == 2
        with refusal("InvalidParameterCombination"):
            ec2.create_capacity_reservation(**self.REQUEST, EndDateType="limited")

    def test_one_keeps_its_placement_group_until_it_is_cancelled(self, aws: Client) -> None:
        ec2 = aws("ec2")
        arn = ec2.create_placement_group(GroupName="reserved", Strategy="cluster")["PlacementGroup"]["GroupArn"]
        made = ec2.create_capacity_reservation(**self.REQUEST, PlacementGroupArn=arn)["CapacityReservation"]
        with refusal("InvalidPlacementGroup.InUse"):
            ec2.delete_placement_group(GroupName="reserved")
        ec2.cancel_capacity_reservation(CapacityReservationId=made["CapacityReservationId"])
        ec2.delete_placement_group(GroupName="reserved")

    @staticmethod
    def create_group(aws: Client, name: str, **more: Any) -> None:
        """A group of p4d.24xlarge without instances."""
        template = {"ImageId": "ami-12345678", "InstanceType": "p4d.24xlarge"}
        aws("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=template)
        aws("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=name,
            LaunchTemplate={"LaunchTemplateName": name},
            MinSize=0,
            MaxSize=4,
            AvailabilityZones=["us-east-1a"],
            **more,
        )

    def test_a_group_launches_as_many_as_its_reservation_holds(self, aws: Client) -> None:
        ec2, scaling = aws("ec2"), aws("autoscaling")
        self.create_group(aws, "reserved")
        key = ec2.create_capacity_reservation(**self.REQUEST)["CapacityReservation"]["CapacityReservationId"]

        def size(desired: int, preference: str, **target: Any) -> int:
            specification = {"CapacityReservationPreference": preference, **target}
            scaling.update_auto_scaling_group(
                AutoScalingGroupName="reserved",
                DesiredCapacity=desired,
                CapacityReservationSpecification=specification,
            )
            (group,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["reserved"])["AutoScalingGroups"]
            assert group["CapacityReservationSpecification"] == specification
            return len(group["Instances"])

        only: Any = {"CapacityReservationTarget": {"CapacityReservationIds": [key]}}
        assert size(3, "capacity-reservations-only", **only) == 2
        (described,) = ec2.describe_capacity_reservations(CapacityReservationIds=[key])["CapacityReservations"]
        assert described["AvailableInstanceCount"] == 0
        (failed,) = scaling.describe_scaling_activities(AutoScalingGroupName="reserved")["Activities"]
        assert (failed["StatusCode"], "ReservationCapacityExceeded" in failed["StatusMessage"]) == ("Failed", True)
        ec2.cancel_capacity_reservation(CapacityReservationId=key)
        assert size(3, "capacity-reservations-only", **only) == 2
        assert size(3, "default") == 3

    def test_a_group_fills_its_reservation_first_and_goes_on_on_demand(self, aws: Client) -> None:
        ec2, scaling = aws("ec2"), aws("autoscaling")
        key = ec2.create_capacity_reservation(**self.REQUEST)["CapacityReservation"]["CapacityReservationId"]
        specification: Any = {
            "CapacityReservationPreference": "capacity-reservations-first",
            "CapacityReservationTarget": {"CapacityReservationIds": [key]},
        }
        self.create_group(aws, "topped-up", CapacityReservationSpecification=specification)
        scaling.set_desired_capacity(AutoScalingGroupName="topped-up", DesiredCapacity=3)
        (group,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["topped-up"])["AutoScalingGroups"]
        assert group["CapacityReservationSpecification"] == specification
        nodes = [one["InstanceId"] for one in group["Instances"]]
        described = [one["Instances"] for one in ec2.describe_instances(InstanceIds=nodes)["Reservations"]]
        ids = [one.get("CapacityReservationId") for instances in described for one in instances]
        assert sorted(ids, key=str) == [None, key, key]

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
        assert scaling.describe_lifecycle_hooks(AutoScalingGroupName="hooked")["LifecycleHooks"] == [
            {
                **hook,
                "AutoScalingGroupName": "hooked",
                "HeartbeatTimeout": 600,
                "DefaultResult": "ABANDON",
                "GlobalTimeout": 60_000,
            }
        ]

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
        (hook,) = scaling.describe_lifecycle_hooks(AutoScalingGroupName="changed")["LifecycleHooks"]
        assert hook["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING"
        assert (hook["DefaultResult"], hook["HeartbeatTimeout"]) == ("CONTINUE", 3600)
        assert hook["NotificationTargetARN"] == queue
        scaling.put_lifecycle_hook(**put, NotificationTargetARN="")
        (hook,) = scaling.describe_lifecycle_hooks(AutoScalingGroupName="changed")["LifecycleHooks"]
        assert "NotificationTargetARN" not in hook

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
        assert reservations[0]["Instances"][0]["State"]["Name"] == "shutting-down"
        assert scaling.describe_lifecycle_hooks(AutoScalingGroupName="full")["LifecycleHooks"] == []

    def test_what_moto_drops_is_kept(self, aws: Client) -> None:
        policy = {"MinHealthyPercentage": 0, "MaxHealthyPercentage": 100}
        scaling = self.create(aws, "kept", DefaultInstanceWarmup=60, InstanceMaintenancePolicy=policy)
        described = self.describe(scaling, "kept")
        assert (described["DefaultInstanceWarmup"], described["InstanceMaintenancePolicy"]) == (60, policy)
        scaling.update_auto_scaling_group(AutoScalingGroupName="kept", DefaultInstanceWarmup=90)
        described = self.describe(scaling, "kept")
        assert (described["DefaultInstanceWarmup"], described["InstanceMaintenancePolicy"]) == (90, policy)

    def test_a_refresh_is_over_at_once_and_keeps_what_was_asked(self, aws: Client) -> None:
        scaling = self.create(aws, "refreshed")
        instances = self.describe(scaling, "refreshed")["Instances"]
        asked = {"ScaleInProtectedInstances": "Ignore", "SkipMatching": True}
        scaling.start_instance_refresh(AutoScalingGroupName="refreshed", Preferences=asked)
        (refresh,) = scaling.describe_instance_refreshes(AutoScalingGroupName="refreshed")["InstanceRefreshes"]
        assert (refresh["Status"], refresh["Preferences"]) == ("Successful", asked)
        assert self.describe(scaling, "refreshed")["Instances"] == instances
        with refusal("ActiveInstanceRefreshNotFound"):
            scaling.cancel_instance_refresh(AutoScalingGroupName="refreshed")

    def test_a_policy_is_enabled_and_predicts_nothing(self, aws: Client) -> None:
        scaling = self.create(aws, "policed")
        step = {"ScalingAdjustment": 1, "MetricIntervalLowerBound": 0.0}
        scaling.put_scaling_policy(
            AutoScalingGroupName="policed",
            PolicyName="step",
            PolicyType="StepScaling",
            AdjustmentType="ChangeInCapacity",
            StepAdjustments=[step],
        )
        (shown,) = scaling.describe_policies(AutoScalingGroupName="policed")["ScalingPolicies"]
        assert shown["Enabled"] is True
        assert "PredictiveScalingConfiguration" not in shown

    def test_notifications_come_and_go(self, aws: Client) -> None:
        scaling, topic = self.create(aws, "noted"), "arn:aws:sns:us-east-1:123456789012:t"
        kinds = ["autoscaling:EC2_INSTANCE_LAUNCH_ERROR", "autoscaling:EC2_INSTANCE_TERMINATE"]
        scaling.put_notification_configuration(AutoScalingGroupName="noted", TopicARN=topic, NotificationTypes=kinds)
        answer = scaling.describe_notification_configurations(AutoScalingGroupNames=["noted"])
        assert [item["NotificationType"] for item in answer["NotificationConfigurations"]] == kinds
        scaling.delete_notification_configuration(AutoScalingGroupName="noted", TopicARN=topic)
        answer = scaling.describe_notification_configurations(AutoScalingGroupNames=["noted"])
        assert answer["NotificationConfigurations"] == []


class TestLifecycleHooks:
    """An instance waits in a hook until somebody completes it."""

    HOOKS = tuple(
        {"LifecycleHookName": name, "LifecycleTransition": f"autoscaling:EC2_INSTANCE_{transition}"}
        for name, transition in (("launch", "LAUNCHING"), ("end", "TERMINATING"))
    )

    @classmethod
    def group(cls, aws: Client, name: str, size: int) -> Any:
        return TestAutoScalingGroups.create(
            aws, name, MinSize=0, MaxSize=4, DesiredCapacity=size, LifecycleHookSpecificationList=list(cls.HOOKS)
        )

    @staticmethod
    def states(scaling: Any, name: str) -> dict[str, str]:
        instances = TestAutoScalingGroups.describe(scaling, name)["Instances"]
        return {item["InstanceId"]: item["LifecycleState"] for item in instances}

    @staticmethod
    def complete(scaling: Any, name: str, hook: str, instance: str, result: str = "CONTINUE") -> None:
        scaling.complete_lifecycle_action(
            AutoScalingGroupName=name, LifecycleHookName=hook, InstanceId=instance, LifecycleActionResult=result
        )

    def test_a_new_instance_waits_and_counts(self, aws: Client) -> None:
        scaling = self.group(aws, "waiting", 2)
        states = self.states(scaling, "waiting")
        assert list(states.values()) == ["Pending:Wait"] * 2
        scaling.set_desired_capacity(AutoScalingGroupName="waiting", DesiredCapacity=3)
        assert self.states(scaling, "waiting").keys() > states.keys(), "one more, not three"
        assert len(self.states(scaling, "waiting")) == 3
        proven, *_ = states
        scaling.record_lifecycle_action_heartbeat(
            AutoScalingGroupName="waiting", LifecycleHookName="launch", InstanceId=proven
        )
        self.complete(scaling, "waiting", "launch", proven)
        assert self.states(scaling, "waiting")[proven] == "InService"
        with refusal("ValidationError"):
            self.complete(scaling, "waiting", "launch", proven)

    def test_an_abandoned_launch_is_replaced(self, aws: Client) -> None:
        scaling = self.group(aws, "abandoned", 1)
        (broken,) = self.states(scaling, "abandoned")
        self.complete(scaling, "abandoned", "launch", broken, "ABANDON")
        assert list(self.states(scaling, "abandoned").values()) == ["Pending:Wait"]
        assert broken not in self.states(scaling, "abandoned")

    def test_an_instance_that_ends_runs_until_its_hook_is_completed(self, aws: Client) -> None:
        scaling = self.group(aws, "ending", 1)
        (instance,) = self.states(scaling, "ending")
        scaling.set_desired_capacity(AutoScalingGroupName="ending", DesiredCapacity=0)
        assert self.states(scaling, "ending") == {instance: "Terminating:Wait"}
        described = aws("ec2").describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
        assert described["State"]["Name"] == "running"
        self.complete(scaling, "ending", "end", instance)
        assert self.states(scaling, "ending") == {}
        described = aws("ec2").describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
        assert described["State"]["Name"] == "terminated"

    def test_a_protected_instance_stays(self, aws: Client) -> None:
        scaling = self.group(aws, "guarded", 2)
        one, other = self.states(scaling, "guarded")
        for protected in (True, False):
            scaling.set_instance_protection(
                AutoScalingGroupName="guarded", InstanceIds=[one], ProtectedFromScaleIn=protected
            )
            scaling.set_desired_capacity(AutoScalingGroupName="guarded", DesiredCapacity=0)
            ending = {key for key, state in self.states(scaling, "guarded").items() if state == "Terminating:Wait"}
            assert ending == ({other} if protected else {one, other})

    def test_an_instance_is_ended_through_its_group_protected_or_not(self, aws: Client) -> None:
        scaling = self.group(aws, "through", 2)
        one, other = self.states(scaling, "through")
        scaling.set_instance_protection(
            AutoScalingGroupName="through", InstanceIds=[one, other], ProtectedFromScaleIn=True
        )
        for instance, decrement in ((one, True), (other, False)):
            activity = scaling.terminate_instance_in_auto_scaling_group(
                InstanceId=instance, ShouldDecrementDesiredCapacity=decrement
            )["Activity"]
            assert instance in activity["Description"]
            assert self.states(scaling, "through")[instance] == "Terminating:Wait"
        # Only the second is replaced.
        assert sorted(self.states(scaling, "through").values()) == ["Pending:Wait", *["Terminating:Wait"] * 2]

    def test_an_unhealthy_instance_is_replaced_while_its_hook_holds_it(self, aws: Client) -> None:
        scaling = self.group(aws, "sick", 2)
        sick, other = self.states(scaling, "sick")
        scaling.set_instance_health(InstanceId=other, HealthStatus="Healthy")
        scaling.set_instance_health(InstanceId=sick, HealthStatus="Unhealthy")
        states = self.states(scaling, "sick")
        assert (states.pop(sick), states.pop(other), *states.values()) == (
            "Terminating:Wait", "Pending:Wait", "Pending:Wait",
        )  # fmt: skip

    def test_force_deletion_waits_for_no_hook(self, aws: Client) -> None:
        scaling = self.group(aws, "forced", 2)
        instances = list(self.states(scaling, "forced"))
        scaling.set_desired_capacity(AutoScalingGroupName="forced", DesiredCapacity=1)
        with refusal("ResourceInUse"):
            scaling.delete_auto_scaling_group(AutoScalingGroupName="forced")
        scaling.delete_auto_scaling_group(AutoScalingGroupName="forced", ForceDelete=True)
        for reservation in aws("ec2").describe_instances(InstanceIds=instances)["Reservations"]:
            assert {item["State"]["Name"] for item in reservation["Instances"]} == {"shutting-down"}


def test_a_function_is_what_was_given_and_what_it_was_changed_to(aws: Client) -> None:
    functions = aws("lambda")
    role = aws("iam").create_role(RoleName="function", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.py", "")
    given = {"FunctionName": "f", "Role": role, "Runtime": "python3.13", "Handler": "a.handler"}
    logging = {"LogFormat": "JSON", "LogGroup": "/own", "ApplicationLogLevel": "INFO", "SystemLogLevel": "WARN"}
    functions.create_function(**given, Code={"ZipFile": content.getvalue()}, LoggingConfig=logging)
    settings = functions.get_function_configuration(FunctionName="f")
    assert settings["LoggingConfig"] == logging
    assert "DeadLetterConfig" not in settings
    queue = "arn:aws:sqs:us-east-1:123456789012:dead"
    functions.update_function_configuration(
        FunctionName="f", DeadLetterConfig={"TargetArn": queue}, TracingConfig={"Mode": "Active"}
    )
    settings = functions.get_function_configuration(FunctionName="f")
    assert settings["DeadLetterConfig"] == {"TargetArn": queue}
    assert (settings["TracingConfig"], settings["LoggingConfig"]) == ({"Mode": "Active"}, logging)


def test_a_budget_says_whom_it_tells_and_keeps_its_tags(aws: Client) -> None:
    budgets, account = aws("budgets"), "123456789012"
    budget = {
        "BudgetName": "b",
        "BudgetType": "COST",
        "TimeUnit": "MONTHLY",
        "BudgetLimit": {"Amount": "9", "Unit": "USD"},
    }
    at = {"NotificationType": "ACTUAL", "ComparisonOperator": "GREATER_THAN", "Threshold": 80.0}
    who = [{"SubscriptionType": "EMAIL", "Address": "a@example.com"}]
    budgets.create_budget(
        AccountId=account,
        Budget=budget,
        NotificationsWithSubscribers=[{"Notification": at, "Subscribers": who}],
        ResourceTags=[{"Key": "a", "Value": "b"}],
    )
    asked = {**at, "ThresholdType": "PERCENTAGE"}
    told = budgets.describe_subscribers_for_notification(AccountId=account, BudgetName="b", Notification=asked)
    assert told["Subscribers"] == who
    with refusal("NotFoundException"):
        budgets.describe_subscribers_for_notification(
            AccountId=account, BudgetName="b", Notification={**at, "Threshold": 50.0}
        )
    arn = f"arn:aws:budgets::{account}:budget/b"
    budgets.tag_resource(ResourceARN=arn, ResourceTags=[{"Key": "c", "Value": "d"}])
    budgets.untag_resource(ResourceARN=arn, ResourceTagKeys=["a"])
    assert budgets.list_tags_for_resource(ResourceARN=arn)["ResourceTags"] == [{"Key": "c", "Value": "d"}]
    budgets.update_budget(AccountId=account, NewBudget={**budget, "BudgetLimit": {"Amount": "5", "Unit": "USD"}})
    assert budgets.describe_budget(AccountId=account, BudgetName="b")["Budget"]["BudgetLimit"]["Amount"] == "5"
    told = budgets.describe_notifications_for_budget(AccountId=account, BudgetName="b")
    assert told["Notifications"] == [at], "an update leaves them"


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

    def test_an_upload_under_the_uploaders_own_key_is_denied(self, aws: Client) -> None:
        own = {"Null": {"s3:x-amz-server-side-encryption-customer-algorithm": "false"}}
        s3 = self.bucket(aws, "hostage", {"Action": "s3:PutObject", "Condition": own})
        s3.put_object(Bucket="hostage", Key="a", Body=b"a")
        with refusal("403|AccessDenied|Forbidden"):
            s3.put_object(Bucket="hostage", Key="a", Body=b"a", SSECustomerAlgorithm="AES256", SSECustomerKey=32 * "k")

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


def test_a_nat_gateway_takes_its_interface_along_and_leaves_its_address(aws: Client) -> None:
    ec2 = aws("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    before = len(ec2.describe_network_interfaces()["NetworkInterfaces"])
    gateway = ec2.create_nat_gateway(SubnetId=subnet, AllocationId=address)["NatGateway"]["NatGatewayId"]
    assert len(ec2.describe_network_interfaces()["NetworkInterfaces"]) == before + 1
    ec2.delete_nat_gateway(NatGatewayId=gateway)
    assert len(ec2.describe_network_interfaces()["NetworkInterfaces"]) == before
    (released,) = ec2.describe_addresses(AllocationIds=[address])["Addresses"]
    assert "AssociationId" not in released


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
    versions = ec2.describe_launch_template_versions(LaunchTemplateName="versions", Versions=["2"])
    assert versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"] == changed["UserData"]


def test_spot_placement_scores_are_of_zones_or_the_region_and_low_for_few_types(aws: Client) -> None:
    ec2 = aws("ec2")
    zones = {zone["ZoneId"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]}
    types = ["p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge"]
    for named, score in ((types[:2], 1), (types, 9)):
        answer = ec2.get_spot_placement_scores(InstanceTypes=named, TargetCapacity=4, SingleAvailabilityZone=True)
        assert {(one["AvailabilityZoneId"], one["Score"]) for one in answer["SpotPlacementScores"]} == {
            (zone, score) for zone in zones
        }
    (one,) = ec2.get_spot_placement_scores(InstanceTypes=types, TargetCapacity=4)["SpotPlacementScores"]
    assert (one["Region"], one["Score"], "AvailabilityZoneId" in one) == (REGION, 9, False)
    elsewhere = ec2.get_spot_placement_scores(InstanceTypes=types, TargetCapacity=4, RegionNames=["eu-west-1"])
    assert elsewhere["SpotPlacementScores"] == []


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


def test_a_lustre_file_system_is_linked_to_a_prefix(aws: Client) -> None:
    fsx, ec2 = aws("fsx"), aws("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.1.0/24")["Subnet"]["SubnetId"]
    tags = [{"Key": "team", "Value": "research"}]
    made = fsx.create_file_system(
        FileSystemType="LUSTRE",
        FileSystemTypeVersion="2.15",
        StorageCapacity=1200,
        SubnetIds=[subnet],
        Tags=tags,
        LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
    )["FileSystem"]
    name = made["FileSystemId"]
    (system,) = fsx.describe_file_systems(FileSystemIds=[name])["FileSystems"]
    assert (system["Lifecycle"], system["VpcId"], system["FileSystemTypeVersion"]) == ("AVAILABLE", vpc, "2.15")
    assert system["LustreConfiguration"]["MountName"] and system["Tags"] == tags
    given = {"FileSystemId": name, "FileSystemPath": "/", "DataRepositoryPath": "s3://corpus/tokens/"}
    link = fsx.create_data_repository_association(**given, Tags=tags)["Association"]
    (described,) = fsx.describe_data_repository_associations(AssociationIds=[link["AssociationId"]])["Associations"]
    assert {key: described[key] for key in given} == given and described["Tags"] == tags
    fsx.delete_data_repository_association(AssociationId=link["AssociationId"])
    with refusal("DataRepositoryAssociationNotFound"):
        fsx.describe_data_repository_associations(AssociationIds=[link["AssociationId"]])
    fsx.delete_file_system(FileSystemId=name)
    with refusal("FileSystemNotFound"):
        fsx.describe_file_systems(FileSystemIds=[name])
