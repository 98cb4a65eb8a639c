"""A deployed stack in moto: configuration file, bucket, Auto Scaling group with hooks, nodes in service."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import yaml

from infra.naming import Names
from optimizer.aws.actuals import DeployedGroup, read_group
from optimizer.commands.stack_file import write_stack_file
from tests.engine.emulated_aws import amazon_image
from tests.plans import merged, sample_plan

IMAGE = "an image"
ACCOUNT, REGION = "123456789012", "us-east-1"


@dataclass(kw_only=True)
class Clock:
    """A clock that moves only while the code under test sleeps; then others act, too."""

    start: datetime = datetime(2026, 11, 21, 12, tzinfo=UTC)
    passed: timedelta = timedelta(0)
    meanwhile: Callable[[timedelta], None] = lambda passed: None
    said: list[str] = field(default_factory=list)

    def now(self, zone: object = None) -> datetime:
        return self.start + self.passed

    def sleep(self, seconds: float) -> None:
        self.passed += timedelta(seconds=seconds)
        self.meanwhile(self.passed)


@dataclass(kw_only=True)
class DeployedStack:
    """The stack, and clients to change it as its controller and nodes would."""

    names: Names
    directory: Path
    autoscaling: Any
    s3: Any

    @classmethod
    def create(cls, *, stack: str, directory: Path) -> DeployedStack:
        """Deploy ``sample_plan`` as ``stack``: two nodes, in service and protected."""
        (directory / "Pulumi.yaml").write_text("name: gpufleet\n")
        write_stack_file(directory / f"Pulumi.{stack}.yaml", sample_plan())
        deployed = cls.without_nodes(stack=stack, directory=directory)
        deployed.size(2)
        for instance in deployed.held("Pending:Wait"):
            deployed.complete(instance, deployed.names.launch_hook)
        return deployed

    @classmethod
    def without_nodes(cls, *, stack: str, directory: Path, region: str = REGION) -> DeployedStack:
        """Make the bucket, and the group with its hooks."""
        names = Names(stack=stack, account_id=ACCOUNT, region=region, partition="aws")
        deployed = cls(
            names=names,
            directory=directory,
            autoscaling=boto3.client("autoscaling", region_name=region),
            s3=boto3.client("s3", region_name=region),
        )
        elsewhere: Any = {} if region == REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        deployed.s3.create_bucket(Bucket=names.bucket, **elsewhere)
        ec2 = boto3.client("ec2", region_name=region)
        template = ec2.create_launch_template(
            LaunchTemplateName=names.prefix,
            LaunchTemplateData={"ImageId": amazon_image(IMAGE, "x86_64")["ami_id"], "InstanceType": "p4d.24xlarge"},
        )["LaunchTemplate"]
        deployed.autoscaling.create_auto_scaling_group(
            AutoScalingGroupName=names.group,
            MinSize=0,
            MaxSize=2,
            DesiredCapacity=0,
            LaunchTemplate={"LaunchTemplateId": template["LaunchTemplateId"], "Version": "1"},
            AvailabilityZones=[f"{region}a"],
            NewInstancesProtectedFromScaleIn=True,
        )
        for hook, transition in ((names.launch_hook, "LAUNCHING"), (names.terminate_hook, "TERMINATING")):
            deployed.autoscaling.put_lifecycle_hook(
                LifecycleHookName=hook,
                AutoScalingGroupName=names.group,
                LifecycleTransition=f"autoscaling:EC2_INSTANCE_{transition}",
                HeartbeatTimeout=300,
            )
        return deployed

    @property
    def arguments(self) -> list[str]:
        """``--stack`` and ``--directory``."""
        return ["--stack", self.names.stack, "--directory", str(self.directory)]

    @property
    def file(self) -> Path:
        """The stack's configuration file."""
        return self.directory / f"Pulumi.{self.names.stack}.yaml"

    def configure(self, **values: Any) -> None:
        """Set keys of the configuration."""
        content = yaml.safe_load(self.file.read_text())
        content["config"] |= {f"gpufleet:{key}": value for key, value in values.items()}
        self.file.write_text(yaml.safe_dump(content))

    @property
    def group(self) -> DeployedGroup:
        """The group as it is now."""
        group = read_group(self.autoscaling, self.names.groups)
        assert group is not None
        return group

    def size(self, nodes: int) -> None:
        """Set the desired capacity."""
        self.autoscaling.set_desired_capacity(AutoScalingGroupName=self.names.group, DesiredCapacity=nodes)

    def lift_protection(self) -> None:
        """Lift all protection, as the controller does before it sets the size to 0."""
        self.autoscaling.set_instance_protection(
            AutoScalingGroupName=self.names.group,
            InstanceIds=[node.instance_id for node in self.group.nodes],
            ProtectedFromScaleIn=False,
        )

    def held(self, state: str) -> list[str]:
        """Instances in one lifecycle state."""
        return [node.instance_id for node in self.group.nodes if node.lifecycle_state == state]

    def complete(self, instance: str, hook: str, result: str = "CONTINUE") -> None:
        """Complete a node's hook."""
        self.autoscaling.complete_lifecycle_action(
            AutoScalingGroupName=self.names.group,
            LifecycleHookName=hook,
            LifecycleActionResult=result,
            InstanceId=instance,
        )

    def put(self, key: str, content: str) -> None:
        """Write an object into the stack's bucket."""
        self.s3.put_object(Bucket=self.names.bucket, Key=key, Body=content.encode())

    def get(self, key: str) -> Any:
        """A JSON object of the stack's bucket."""
        return json.loads(self.s3.get_object(Bucket=self.names.bucket, Key=key)["Body"].read())

    def write_state(self, **changes: Any) -> None:
        """Write control/state.json: running since two hours, with ``changes`` laid over it."""
        self.put("control/state.json", json.dumps(merged(controller_state(), changes)))


def ago(**time: float) -> str:
    """A time in the past, as the controller writes it."""
    return f"{datetime.now(UTC) - timedelta(**time):%Y-%m-%dT%H:%M:%SZ}"


def controller_state() -> dict[str, Any]:
    """control/state.json of a healthy run, two hours old."""
    return {
        "schema_version": 1,
        "run": "0123456789ab",
        "job": "abcdef012345",
        "phase": "running",
        "after": None,
        "reason": "both nodes are in service",
        "since": ago(hours=1.9),
        "run_started_at": ago(hours=2),
        "updated_at": ago(seconds=30),
        "spent_usd": 44.0,
        "usd_per_hour": 22.5,
        "ceiling_usd": 3000.0,
        "nodes": {"wanted": 2, "in_service": 2, "pending": 0, "terminating": 0},
        "attempts": 1,
        "interruptions": 1,
        "instances": {},
        "a_key_of_a_later_version": {"anything": 1},
    }
