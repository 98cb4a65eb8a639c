"""A stack's group, hooks, bucket and queue in moto, and ticks of the controller over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import moto
import pytest
from moto.autoscaling.models import FakeAutoScalingGroup, autoscaling_backends
from moto.autoscaling.responses import AutoScalingResponse
from moto.ec2.responses import EC2Response

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState
from bootstrap.controller.clients import Clients
from bootstrap.controller.handler import tick
from tests.engine.moto_extension import activities, auto_scaling_launches, lifecycle
from tests.unit.bootstrap.controller.world import settings

TAUGHT = (activities, auto_scaling_launches, lifecycle)
REGION = "us-east-1"
# moto's.
ACCOUNT = "123456789012"


@dataclass
class Stack:
    """The deployed stack, and the clock."""

    config: ControllerSettings
    clients: Clients
    now: datetime

    def tick(self, minutes: float = 1) -> ControllerState:
        """Time passes, then a tick."""
        self.now += timedelta(minutes=minutes)
        return tick(self.clients, self.config, self.now)

    @property
    def group(self) -> FakeAutoScalingGroup:
        """moto's own group."""
        return autoscaling_backends[ACCOUNT][REGION].autoscaling_groups[self.config.group]

    def members(self, *states: str, group: str = "") -> list[str]:
        """Ids of a group's instances in these states, or all; by default of the own place's group."""
        names = [group or self.config.group]
        answer = self.clients.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=names)
        return [
            member["InstanceId"]
            for member in answer["AutoScalingGroups"][0]["Instances"]
            if not states or member["LifecycleState"] in states
        ]

    def complete(self, hook: str, result: str, *instances: str) -> None:
        """Complete nodes' hook, as their bootstrap does."""
        complete(self.clients, self.config.group, hook, *instances, result=result)

    def trained(self) -> list[str]:
        """All nodes in service, and the controller knows."""
        self.tick()
        nodes = self.members("Pending:Wait")
        self.complete(self.config.launch_hook, "CONTINUE", *nodes)
        assert self.tick().phase == "running"
        return nodes

    def put(self, key: str, value: Any) -> None:
        """An object under control/."""
        body = value if isinstance(value, str) else json.dumps(value)
        self.clients.s3.put_object(Bucket=self.config.bucket, Key=f"control/{key}", Body=body.encode())

    def read(self) -> dict[str, Any]:
        """control/state.json."""
        return dict(json.loads(self.read_text()))

    def read_text(self) -> str:
        """control/state.json, as it is."""
        answer = self.clients.s3.get_object(Bucket=self.config.bucket, Key="control/state.json")
        return answer["Body"].read().decode()

    def ask(self, want: str) -> None:
        """A person's request."""
        at = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        self.put("request.json", {"schema_version": 1, "want": want, "at": at, "by": "arn:aws:iam::1:user/ann"})

    def say(self, instance: str, state: str, **more: Any) -> None:
        """A node's report."""
        at = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        report = {
            "schema_version": 1,
            "run": self.config.run_id,
            "state": state,
            "exit_status": 0,
            "step": "",
            "at": at,
            **more,
        }
        self.put(f"nodes/arn:aws:ec2:us-east-1:123456789012:instance/{instance}.json", report)

    def send(self, kind: str, instance: str, **detail: Any) -> None:
        """Put an event of EC2 into the queue, as EventBridge does."""
        body = {"detail-type": kind, "source": "aws.ec2", "detail": {"instance-id": instance, **detail}}
        self.clients.sqs.send_message(QueueUrl=self.config.queue_url, MessageBody=json.dumps(body))

    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        metrics = self.clients.cloudwatch.list_metrics(Namespace=self.config.metric_namespace)["Metrics"]
        out = {}
        for name in {metric["MetricName"] for metric in metrics}:
            data = self.clients.cloudwatch.get_metric_statistics(
                Namespace=self.config.metric_namespace,
                MetricName=name,
                StartTime=self.now - timedelta(seconds=30),
                EndTime=self.now + timedelta(seconds=30),
                Period=60,
                Statistics=["Maximum"],
            )["Datapoints"]
            if data:
                out[name] = data[-1]["Maximum"]
        return out


def complete(clients: Clients, group: str, hook: str, *instances: str, result: str = "CONTINUE") -> None:
    """Complete the hook of a group's instances."""
    for instance in instances:
        clients.autoscaling.complete_lifecycle_action(
            AutoScalingGroupName=group, LifecycleHookName=hook, InstanceId=instance, LifecycleActionResult=result
        )


def make_group(clients: Clients, config: ControllerSettings, name: str) -> None:
    """Make the group of a place, with its hooks."""
    clients.autoscaling.create_auto_scaling_group(
        AutoScalingGroupName=name,
        LaunchTemplate={"LaunchTemplateName": "node", "Version": "1"},
        MinSize=0,
        MaxSize=3,
        AvailabilityZones=["us-east-1a"],
        NewInstancesProtectedFromScaleIn=True,
    )
    for hook, transition in ((config.launch_hook, "LAUNCHING"), (config.terminate_hook, "TERMINATING")):
        clients.autoscaling.put_lifecycle_hook(
            AutoScalingGroupName=name,
            LifecycleHookName=hook,
            LifecycleTransition=f"autoscaling:EC2_INSTANCE_{transition}",
        )


@contextmanager
def taught() -> Iterator[None]:
    """moto with what it lacks, and afterwards, for the other tests of this process, without."""
    before = {owner: dict(vars(owner)) for owner in (FakeAutoScalingGroup, AutoScalingResponse, EC2Response)}
    for module in TAUGHT:
        module.install()
    try:
        yield
    finally:
        for owner, own in before.items():
            for name in [name for name in vars(owner) if name not in own]:
                delattr(owner, name)
            for name, value in own.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


@pytest.fixture(scope="module")
def clients() -> Clients:
    """Clients that speak to whatever moto runs; making them takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.delenv("AWS_ENDPOINT_URL", raising=False)
        return Clients.create(boto3.session.Session(), REGION)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, clients: Clients) -> Iterator[Stack]:
    """Three on-demand nodes of 30 USD/h, with hooks, and no ceiling."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    # Thousands of images nobody here starts.
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    with taught(), moto.mock_aws():
        clients.s3.create_bucket(Bucket="gpufleet-dev")
        clients.s3.put_bucket_versioning(Bucket="gpufleet-dev", VersioningConfiguration={"Status": "Enabled"})
        queue_url = clients.sqs.create_queue(QueueName="gpufleet-dev-node-events")["QueueUrl"]
        config = settings(queue_url=queue_url, prices={"on-demand": {"p4d.24xlarge": 30.0}})
        template: Any = {"ImageId": "ami-0123456789abcdef0", "InstanceType": "p4d.24xlarge"}
        clients.ec2.create_launch_template(LaunchTemplateName="node", LaunchTemplateData=template)
        make_group(clients, config, config.group)
        yield Stack(config=config, clients=clients, now=datetime.now(UTC).replace(microsecond=0))
