"""Emulated regions, each with a stack in moto and its controller's own ticks; Pulumi is a stand-in."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import yaml

from bootstrap.contract.state import ControllerState
from bootstrap.controller.clients import Clients
from bootstrap.controller.handler import tick
from infra.control_settings import job_id
from optimizer.contract.plan import FleetPlan
from tests.engine.emulated_aws import amazon_image
from tests.plans import sample_plan
from tests.unit.bootstrap.controller.world import settings
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.commands.test_copying import manifest
from tests.unit.optimizer.deployed import IMAGE, REGION, Clock, DeployedStack

EUROPE, OREGON = "eu-west-1", "us-west-2"
ON_DEMAND = {"on-demand": {"p4d.24xlarge": 30.0}}
# A stack without nodes, USD an hour.
IDLE = 0.6


class Launches:
    """LaunchInstances of a region, which moto lacks: all nodes come, or none where it is dry."""

    def __init__(self, client: Any, *, is_dry: bool = False) -> None:
        self._client, self._is_dry = client, is_dry

    def launch_instances(self, *, AutoScalingGroupName: str, RequestedCapacity: int, **_: Any) -> Any:  # noqa: N803
        """Answer at once, in AWS's words."""
        if self._is_dry:
            message = "We currently do not have sufficient p4d.24xlarge capacity in the zone you requested."
            return {"Errors": [{"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": message}]}
        name = {"AutoScalingGroupName": AutoScalingGroupName}

        def members() -> dict[str, str]:
            (group,) = self._client.describe_auto_scaling_groups(AutoScalingGroupNames=[AutoScalingGroupName])[
                "AutoScalingGroups"
            ]
            return {one["InstanceId"]: one["InstanceType"] for one in group["Instances"]}

        before = members()
        self._client.set_desired_capacity(**name, DesiredCapacity=len(before) + RequestedCapacity)
        came = {key: kind for key, kind in members().items() if key not in before}
        return {"Instances": [{"InstanceType": kind, "InstanceIds": [key]} for key, kind in came.items()]}


class Reclaimed:
    """Auto Scaling of a region whose nodes EC2 took back: the group's size stays until the controller sets it."""

    def __init__(self, client: Any, size: int) -> None:
        self._client, self._size = client, size

    def __getattr__(self, operation: str) -> Any:
        return getattr(self._client, operation)

    def update_auto_scaling_group(self, **given: Any) -> None:
        """Note the size that the controller sets."""
        self._size = given.get("DesiredCapacity", self._size)
        self._client.update_auto_scaling_group(**given)

    def set_desired_capacity(self, *, DesiredCapacity: int, **given: Any) -> None:  # noqa: N803
        """Note the size that the controller sets."""
        self._size = DesiredCapacity
        self._client.set_desired_capacity(DesiredCapacity=DesiredCapacity, **given)

    def describe_auto_scaling_groups(self, **given: Any) -> Any:
        """The groups, with that size."""
        answer = self._client.describe_auto_scaling_groups(**given)
        for group in answer["AutoScalingGroups"]:
            group["DesiredCapacity"] = self._size
        return answer

    def get_paginator(self, operation: str) -> Any:
        """The client's paginator, over the methods of this one."""
        paginator = self._client.get_paginator(operation)
        paginator._method = getattr(self, operation)
        return paginator


class Regions:
    """The deployed stacks, each with its controller, and a minute of all of them.

    In regions of ``dry`` a new stack gets no node.
    """

    def __init__(self, directory: Path, clock: Clock, gpufleet: Gpufleet) -> None:
        self.clock, self.gpufleet, self.directory = clock, gpufleet, directory
        self.dry: set[str] = set()
        self.stacks: dict[str, DeployedStack] = {}
        self.clients: dict[str, Clients] = {}
        self.config: dict[str, Any] = {}
        self._minutes = 0
        clock.meanwhile = lambda passed: self.pass_time()

    def add(self, stack: DeployedStack) -> None:
        """Give a stack its controller."""
        names = stack.names
        self.stacks[names.stack] = stack
        client: Any = Clients.create(boto3.session.Session(), names.region)
        self.clients[names.stack] = replace(client, launching=Launches(client.autoscaling))
        queue = client.sqs.create_queue(QueueName=f"{names.prefix}-node-events")["QueueUrl"]
        self.config[names.stack] = settings(
            stack=names.stack, region=names.region, group=names.group, bucket=names.bucket, queue_url=queue,
            job=job_id(sample_plan()), node_count=2, prices=ON_DEMAND, fixed_usd_per_hour=IDLE, ceiling_usd=3000.0,
        )  # fmt: skip

    def dry_out(self, stack: str) -> None:
        """Take a stack's nodes back, and refuse every launch from now on."""
        client: Any = self.clients[stack]
        group = self.stacks[stack].group
        reclaimed = Reclaimed(client.autoscaling, len(group.nodes))
        self.clients[stack] = replace(
            client, autoscaling=reclaimed, launching=Launches(client.autoscaling, is_dry=True)
        )
        if group.nodes:
            self.stacks[stack].lift_protection()
            self.stacks[stack].size(0)

    def carry_out(self, stack: str, directory: Path, **_: Any) -> None:
        """Stand for `pulumi up`: a stack without nodes, whose controller ticks at once."""
        config = yaml.safe_load((directory / f"Pulumi.{stack}.yaml").read_text())["config"]
        if stack not in self.stacks:
            deployed = DeployedStack.without_nodes(stack=stack, directory=directory, region=config["aws:region"])
            self.add(deployed)
            if config["aws:region"] in self.dry:
                self.dry_out(stack)
        self.config[stack] = replace(self.config[stack], waits=config.get("gpufleet:waits", False))
        self.tick(stack)

    def pass_time(self) -> None:
        """Nodes save; each whole minute the controllers tick."""
        for stack in self.stacks.values():
            hooks = {"Terminating:Wait": stack.names.terminate_hook, "Pending:Wait": stack.names.launch_hook}
            for node in stack.group.nodes:
                if node.lifecycle_state in hooks:
                    stack.complete(node.instance_id, hooks[node.lifecycle_state])
        if (minutes := int(self.clock.passed / timedelta(minutes=1))) > self._minutes:
            self._minutes = minutes
            for name in self.stacks:
                self.tick(name)

    def tick(self, stack: str) -> ControllerState:
        """One tick of one controller."""
        return tick(self.clients[stack], self.config[stack], self.clock.now())

    def run(self, stack: str) -> ControllerState:
        """Minutes until the gang is complete."""
        for _ in range(10):
            self.clock.sleep(60)
            if (state := self.tick(stack)).phase == "running":
                return state
        raise AssertionError(state.reason)

    def move(self, region: str, stack: str, *more: str) -> tuple[int, str, str]:
        """Run the command to its end."""
        plan = self.directory / f"plan-{region}.json"
        plan.write_text(plan_in(region).to_json())
        ami = amazon_image(IMAGE, "x86_64")["ami_id"]
        return self.gpufleet(
            "move", region, "--stack", stack, "--directory", str(self.directory), "--plans", str(plan),
            "--config", f"amiId={ami}", "--yes", "--accept-stale-prices", "--no-follow", *more,
        )  # fmt: skip


def plan_in(region: str, **changes: Any) -> FleetPlan:
    """The sample plan in another region."""
    listed = sample_plan().model_dump(mode="json")["prices"]
    prices = [{**price, "item": price["item"].replace(REGION, region)} for price in listed]
    zone = {EUROPE: "euw1-az1", OREGON: "usw2-az1", REGION: "use1-az2"}[region]
    return sample_plan(region=region, zone_ids=[zone], prices=prices, **changes)


def save(stack: DeployedStack, step: int) -> None:
    """A checkpoint, and the ledger's line of it."""
    prefix = f"checkpoints/step-{step:08d}-abc.1"
    stack.put(f"{prefix}/rank-00000.bin", "w" * 1000)
    stack.put(f"{prefix}/manifest.json", manifest(step, [1000]).decode())
    stack.put(f"checkpoints/ledger/w-{step:06d}.jsonl", json.dumps({"t": 1.0, "event": "commit", "step": step}) + "\n")


def checkpoints(stack: DeployedStack) -> dict[str, bytes]:
    listed = stack.s3.list_objects_v2(Bucket=stack.names.bucket, Prefix="checkpoints/").get("Contents", [])
    return {one["Key"]: stack.s3.get_object(Bucket=stack.names.bucket, Key=one["Key"])["Body"].read() for one in listed}
