"""Stories of a deployed stack: one function a story, each with an emulated AWS of its own."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from optimizer.aws import control
from optimizer.contract.plan import FleetPlan, read_plan, read_plan_text
from tests.engine import facts, running
from tests.engine.deployment import Deployment, Tools, deployment, write_project
from tests.engine.faults import refuse_next
from tests.engine.inventory import Inventory, inventory, left_behind
from tests.engine.pulumi_cli import PulumiError, Run
from tests.engine.recording import asked_of_iam, of_stack_dev
from tests.engine.tagging import check_tags
from tests.infra.deployed import NEXT_WITH_LUSTRE_CLIENT
from tests.infra.deployed import capacity_block as as_capacity_block
from tests.infra.deployed import on_demand as as_on_demand
from tests.infra.deployed import topped_up as as_topped_up
from tests.infra.test_deployer import CALLS, denied, recorded
from tests.plans import sample_plan
from tests.unit.test_docs import shown_commands

GROUP = "aws:autoscaling/group:Group"
THREE_NODES: dict[str, Any] = {
    "node_count": 3,
    "parallelism": {"data": 24, "micro_batch": 4, "grad_accum": 1},
    "job": {"global_batch": 96, "steps": 2667},
    "step_time_s": 6.0,
}


@contextmanager
def fleet(
    tools: Tools, scratch: Path, name: str, plan: FleetPlan, config: dict[str, Any] | None = None
) -> Iterator[tuple[Deployment, Inventory]]:
    """A stack of the repository's program with ``plan`` set, and what the account held before.

    When the story ends the stack is destroyed, which must end in time and leave nothing.
    """
    write_project(scratch, name)
    with deployment(tools, scratch, name) as deployed:
        deployed.set_plan(plan)
        deployed.set_config(config or {})
        empty = inventory(deployed.aws)
        yield deployed, empty
        deployed.stack.destroy()
        assert left_behind(empty, inventory(deployed.aws)) == {}
        check_calls(deployed)


def check_calls(deployed: Deployment) -> None:
    """Check that the deployer's policy allows each call that was made; GPUFLEET_RECORD_CALLS=1 also records them."""
    asked = of_stack_dev(asked_of_iam(deployed.aws), deployed.stack.name)
    if os.environ.get("GPUFLEET_RECORD_CALLS"):
        rows = [json.dumps(astuple(call)) for call in sorted(asked | recorded())]
        CALLS.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    assert denied(asked) == []


def assert_settled(deployed: Deployment) -> None:
    """A refresh and another ``up`` change nothing; the engine fails the run otherwise.

    A story with nodes calls this once the nodes are there: a change that shows without nodes shows with them, too.
    """
    done = deployed.stack.settled()
    assert done.changed() == {}, done.output


def assert_created(deployed: Deployment) -> Run:
    """The first ``up`` makes everything."""
    created = deployed.stack.up()
    assert list(created.changed()) == ["create"]
    return created


def spot(tools: Tools, scratch: Path) -> None:
    """A gang's life: preview, up, nodes, another plan, the ceiling, an end with nodes that hang in a hook."""
    plan = sample_plan()
    with fleet(tools, scratch, "spot", plan) as (deployed, empty):
        stack = deployed.stack
        planned = stack.preview()
        assert left_behind(empty, inventory(deployed.aws)) == {}, "a preview creates nothing"
        created = assert_created(deployed)
        assert created.changed() == planned.changed(), "the preview shows what up does"
        facts.check(deployed, plan)
        check_tags(deployed, empty)
        facts.names_agree_with_pulumi_aws(tools.aws_provider, created.types())

        assert running.invoke(deployed, scratch)["phase"] == "starting"
        assert list(running.states(deployed).values()) == ["Pending:Wait"] * 2
        assert len(running.complete(deployed, "Pending:Wait")) == 2
        now = datetime.now(UTC) + running.MINUTE
        assert running.tick(deployed, now).phase == "running"
        # One on demand and one spot, each in a group.
        nodes = [node for group in running.groups(deployed) for node in group["Instances"]]
        assert [(item["LifecycleState"], item["ProtectedFromScaleIn"]) for item in nodes] == [("InService", True)] * 2
        assert_settled(deployed)

        before = running.groups(deployed)
        plan = sample_plan(**THREE_NODES)
        deployed.set_plan(plan)
        updated = stack.up()
        # Other settings of the controller are another object.
        assert set(updated.changed()) == {"update", "replace", *REPLACEMENT}, updated.output
        assert all(name.endswith("-controller-settings") for name in updated.changed()["replace"])
        assert any(GROUP in name for name in updated.changed()["update"])
        after = running.groups(deployed)
        arns = [[group["AutoScalingGroupARN"] for group in groups] for groups in (before, after)]
        assert arns[0] == arns[1], "the same groups, not new ones"
        assert [(group["MaxSize"], group["DesiredCapacity"]) for group in after] == [(2, 1), (2, 1)]
        kept = [
            {
                (item["InstanceId"], item["LifecycleState"], item["ProtectedFromScaleIn"])
                for group in groups
                for item in group["Instances"]
            }
            for groups in (before, after)
        ]
        assert kept[0] == kept[1], "up ends no node"

        # Nodes of two plans never train together: the old nodes save and leave, and three come.
        assert running.tick(deployed, now + running.MINUTE).phase == "draining"
        # The controller alone writes the bounds: `up` would set them back, or ahead of its settings.
        assert [group["MaxSize"] for group in running.groups(deployed)] == [3, 3]
        assert len(running.complete(deployed, "Terminating:Wait")) == 2
        running.tick(deployed, now + 2 * running.MINUTE)
        running.tick(deployed, now + 3 * running.MINUTE)
        assert len(running.complete(deployed, "Pending:Wait")) == 3
        assert running.tick(deployed, now + 4 * running.MINUTE).phase == "running"

        # The budget of 3000 USD is spent; the nodes save, and one never answers.
        late = now + timedelta(hours=1000)
        assert running.tick(deployed, late).phase == "draining"
        assert list(running.states(deployed).values()) == ["Terminating:Wait"] * 3
        assert_settled(deployed)


def over_budget(deployed: Deployment, started: datetime) -> None:
    """At the ceiling the nodes save, and end when their time for it is over."""
    late = started + timedelta(hours=1000)
    running.tick(deployed, late)
    held = running.states(deployed)
    assert set(held.values()) == {"Terminating:Wait"}
    running.tick(deployed, late + running.MINUTE)
    assert running.states(deployed) == held, "a node gets the time its checkpoint needs"
    settings = facts.controller_settings(deployed)
    running.tick(deployed, late + running.MINUTE + timedelta(seconds=settings.drain_s))
    assert running.states(deployed) == {}, "and no more"
    state = running.tick(deployed, late + 2 * running.MINUTE + timedelta(seconds=settings.drain_s))
    assert (state.phase, facts.group(deployed)["DesiredCapacity"]) == ("over-budget", 0)


def on_demand(tools: Tools, scratch: Path) -> None:
    """A create fails twice and the third up finishes it; then another zone, while the checkpoints stay."""
    plan = sample_plan(**as_on_demand())
    with fleet(tools, scratch, "on-demand", plan, {"nat": True}) as (deployed, empty):
        stack = deployed.stack
        # In the middle of an existing resource, and late, when nearly everything exists.
        for action, code in (
            ("ModifyVpcAttribute", "UnauthorizedOperation"),
            ("CreateAutoScalingGroup", "AccessDenied"),
        ):
            refuse_next(deployed.aws, action, code)
            try:
                stack.up()
            except PulumiError as error:
                assert f"{action} is refused by the test" in str(error)
            else:
                raise AssertionError(f"up did not need {action}")
        stack.up()
        facts.check(deployed, plan)
        check_tags(deployed, empty)
        assert len(left_behind(empty, inventory(deployed.aws))["vpc"]) == 1, "the half-made VPC was finished, not left"

        now = datetime.now(UTC)
        running.tick(deployed, now)
        assert len(running.complete(deployed, "Pending:Wait")) == 2
        assert running.tick(deployed, now + 2 * running.MINUTE).phase == "running"
        assert_settled(deployed)
        over_budget(deployed, now)

        s3, bucket = deployed.aws("s3"), stack.outputs()["bucket"]
        s3.put_object(Bucket=bucket, Key="checkpoints/step-1/manifest.json", Body=b"saved")
        deployed.set_config({"zoneId": "use1-az6"})
        moved = stack.up()
        assert {"create", "delete"} <= set(moved.changed()) <= {"create", "delete", "update", "replace", *REPLACEMENT}
        touched = [name for operation, names in moved.changed().items() if operation != "update" for name in names]
        assert touched
        assert not [name for name in touched if "Storage" in name or "Security" in name], "no data, no key"
        assert s3.get_object(Bucket=bucket, Key="checkpoints/step-1/manifest.json")["Body"].read() == b"saved"
        facts.check(deployed, plan)
        assert_settled(deployed)


REPLACEMENT = ("create-replacement", "delete-replaced")


# A reservation the stack makes, for a model that the reference trainer trains.
REQUEST = """\
model: gpt2
workload: {tokens: 4B, seq_len: 1024}
constraints:
  budget_usd: 300k
  deadline_hours: 2
  regions: [us-east-1]
  purchase_options: [reserved]
  instance_types: [p4d.24xlarge]
"""


# No person answers a question here, and no node trains.
UNATTENDED = {"up": ("--yes", "--no-follow"), "down": ("--yes",)}


def first_fleet(tools: Tools, scratch: Path) -> None:
    """Run the commands of "On AWS" of docs/quick-start.md in their order: from a request to a fleet and to nothing."""
    page = [shlex.split(line, comments=True)[1:] for name, line in shown_commands() if name == "docs/quick-start.md"]
    commands = page[[words[0] for words in page].index("up") :]
    said: dict[str, str] = {}
    write_project(scratch, "first")
    with deployment(tools, scratch, "first") as deployed:
        project, empty = deployed.stack.project, inventory(deployed.aws)
        (project / "request.yaml").write_text(REQUEST, encoding="utf-8")
        for name, *words in commands:
            said[name] = deployed.gpufleet(name, *words, *UNATTENDED.get(name, ()))
            if name == "up":
                facts.check(deployed, read_plan(read_plan_text(project / "plans.first.json")))
                check_tags(deployed, empty)
                assert_settled(deployed)
        assert [*said] == ["up", "status", "logs", "down"]
        assert "gpufleet status --stack first" in said["up"] and "no word from the controller yet" in said["status"]
        assert "nothing of stack first is left" in said["down"]
        assert left_behind(empty, inventory(deployed.aws)) == {}
        check_calls(deployed)


def topped_up_elsewhere(tools: Tools, scratch: Path) -> None:
    """A reservation and a VPC that were there before, and stay: of two nodes one is rented."""
    write_project(scratch, "existing")
    with deployment(tools, scratch, "existing") as deployed:
        ec2 = deployed.aws("ec2")
        vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZoneId="use1-az6")["Subnet"]
        owned = ec2.create_capacity_reservation(
            InstanceType="p4d.24xlarge",
            InstancePlatform="Linux/UNIX",
            AvailabilityZoneId=subnet["AvailabilityZoneId"],
            InstanceCount=1,
            InstanceMatchCriteria="targeted",
        )["CapacityReservation"]
        plan = sample_plan(**as_topped_up(owned["CapacityReservationId"]))
        deployed.set_plan(plan)
        deployed.set_config({"vpcId": vpc, "subnetIds": [subnet["SubnetId"]]})
        before = inventory(deployed.aws)
        assert_created(deployed)
        facts.check(deployed, plan, own_network=False)
        check_tags(deployed, before)
        made = left_behind(before, inventory(deployed.aws))
        assert not {"vpc", "subnet", "route table", "VPC endpoint", "capacity reservation"} & set(made)
        now = datetime.now(UTC)
        running.tick(deployed, now)
        running.tick(deployed, now + running.MINUTE)
        assert len(running.complete(deployed, "Pending:Wait")) == 2
        state = running.tick(deployed, now + 2 * running.MINUTE)
        prices = sorted(instance.usd_per_hour for instance in state.instances.values())
        volume = facts.controller_settings(deployed).volume_usd_per_node_hour
        assert state.phase == "running"
        assert prices == [pytest.approx(usd + volume) for usd in (0.5, 21.96)]
        assert_settled(deployed)
        over_budget(deployed, now)
        deployed.stack.destroy()
        after = inventory(deployed.aws)
        assert left_behind(before, after) == left_behind(after, before) == {}


def capacity_block(tools: Tools, scratch: Path) -> None:
    """A Capacity Block that begins tomorrow: nodes beside a file system, drained before its end."""
    start = datetime.now(UTC).replace(hour=11, minute=30, second=0, microsecond=0) + timedelta(days=1)
    end = start + timedelta(days=2)
    block = as_capacity_block(start=f"{start:%Y-%m-%dT%H:%M:%SZ}", end=f"{end:%Y-%m-%dT%H:%M:%SZ}")
    plan = sample_plan(**block, lustre={"storage_gib": 2400, "data_gib": 2000.0, "usd": 16.0})
    config = {"data": "s3://corpus/tokens", "amiName": NEXT_WITH_LUSTRE_CLIENT}
    with fleet(tools, scratch, "block", plan, config) as (deployed, empty):
        assert_created(deployed)
        facts.check(deployed, plan)
        facts.check_lustre(deployed, "s3://corpus/tokens/")
        check_tags(deployed, empty)
        assert running.tick(deployed, start - running.MINUTE).phase == "waiting"
        assert running.states(deployed) == {}
        assert running.tick(deployed, start + running.MINUTE).phase == "starting"
        assert len(running.complete(deployed, "Pending:Wait")) == 2
        running.tick(deployed, start + 2 * running.MINUTE)
        assert_settled(deployed)
        # AWS ends the instances from 30 minutes before the end on.
        running.tick(deployed, end - timedelta(minutes=31))
        assert set(running.states(deployed).values()) == {"Terminating:Wait"}
        # The provider waits 10 minutes after it has deleted a file system, and for none that a person has deleted.
        fsx = deployed.aws("fsx")
        fsx.delete_file_system(FileSystemId=fsx.describe_file_systems()["FileSystems"][0]["FileSystemId"])


def workers(tools: Tools, scratch: Path) -> None:
    """A group of workers that follows its GPUs; then at another utilisation."""
    plan = sample_plan(
        node_count=4,
        parallelism={"data": 32, "sharding": "ddp", "micro_batch": 4, "grad_accum": 1},
        **as_on_demand(),
    )
    config = {"mode": "workers", "trainCommand": "work.py", "scaling": {"minNodes": 1, "gpuUtilizationPercent": 60}}
    with fleet(tools, scratch, "workers", plan, config) as (deployed, empty):
        assert_created(deployed)
        check_workers(deployed, empty)
        now = datetime.now(UTC)
        running.tick(deployed, now)
        # The call of a scaling policy.
        deployed.aws("autoscaling").set_desired_capacity(
            AutoScalingGroupName=running.names(deployed).group, DesiredCapacity=3
        )
        assert len(running.complete(deployed, "Pending:Wait")) == 3
        assert running.tick(deployed, now + running.MINUTE).phase == "running"
        assert_settled(deployed)

        deployed.set_config({"scaling": {"minNodes": 1, "gpuUtilizationPercent": 70}})
        assert "update" in deployed.stack.up().changed()
        assert len(running.states(deployed)) == 3, "up ends no node"
        check_workers(deployed, empty)
        known = running.names(deployed)
        control.write_request(
            deployed.aws("s3"), known.bucket, known.control_prefix, want="stop", by="a person", now=datetime.now(UTC)
        )
        assert running.tick(deployed, now + 2 * running.MINUTE).phase == "draining"
        assert_settled(deployed)


def check_workers(deployed: Deployment, empty: Inventory) -> None:
    """Check the facts of workers."""
    facts.check_all_stacks(deployed)
    facts.check_hooks(deployed)
    facts.check_scaling(deployed)
    check_tags(deployed, empty)
    group = facts.group(deployed)
    assert group["NewInstancesProtectedFromScaleIn"] is False, "scaling takes workers away"


SCENARIOS: dict[str, Callable[[Tools, Path], None]] = {
    "spot": spot,
    "on-demand": on_demand,
    "workers": workers,
    "first-fleet": first_fleet,
    "topped-up-elsewhere": topped_up_elsewhere,
    "capacity-block": capacity_block,
}
