"""``gpufleet move`` between emulated regions, with the controller's own ticks on every side; Pulumi is a stand-in."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from bootstrap.contract.state import ControllerState
from bootstrap.controller.clients import Clients
from bootstrap.controller.handler import tick
from infra.control_settings import job_id
from optimizer.commands import down, handover, move, stop
from optimizer.plan import FleetPlan
from tests.engine.emulated_aws import amazon_image
from tests.plans import sample_plan
from tests.unit.bootstrap.controller.world import settings
from tests.unit.optimizer.aws.test_copying import manifest
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import IMAGE, REGION, Clock, DeployedStack

pytestmark = pytest.mark.usefixtures("unaudited")

EUROPE, OREGON = "eu-west-1", "us-west-2"
ON_DEMAND = {"on-demand": {"p4d.24xlarge": 30.0}}
# A stack without nodes, USD an hour.
IDLE = 0.6


class Drought:
    """Auto Scaling of a region where every launch is refused."""

    def __init__(self, client: Any, clock: Clock) -> None:
        self._client, self._clock = client, clock
        self.asked = 0

    def __getattr__(self, operation: str) -> Any:
        return getattr(self._client, operation)

    def set_desired_capacity(self, *, DesiredCapacity: int, **_: Any) -> None:  # noqa: N803
        """Take a size that no instance follows."""
        self.asked = DesiredCapacity

    def describe_auto_scaling_groups(self, **given: Any) -> Any:
        """The group, with the size that was asked for."""
        answer = self._client.describe_auto_scaling_groups(**given)
        for group in answer["AutoScalingGroups"]:
            group["DesiredCapacity"] = self.asked
        return answer

    def describe_scaling_activities(self, **_: Any) -> Any:
        """The newest failed launch, in AWS's words."""
        message = "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested."
        failed = {"Description": "Launching a new EC2 instance", "StatusCode": "Failed", "StatusMessage": message}
        at = self._clock.now()
        return {"Activities": [{**failed, "StartTime": at, "EndTime": at}] if self.asked else []}


class Regions:
    """The deployed stacks, each with its controller, and a minute of all of them."""

    def __init__(self, first: DeployedStack, clock: Clock, gpufleet: Gpufleet) -> None:
        self.clock, self.gpufleet, self.directory = clock, gpufleet, first.directory
        self.stacks: dict[str, DeployedStack] = {}
        self.clients: dict[str, Clients] = {}
        self.config: dict[str, Any] = {}
        self._minutes = 0
        self.add(first)
        clock.meanwhile = lambda passed: self.pass_time()

    def add(self, stack: DeployedStack) -> None:
        """Give a stack its controller."""
        names = stack.names
        self.stacks[names.stack] = stack
        client = self.clients[names.stack] = Clients.create(boto3.session.Session(), names.region)
        queue = client.sqs.create_queue(QueueName=f"{names.prefix}-node-events")["QueueUrl"]
        self.config[names.stack] = settings(
            stack=names.stack, region=names.region, group=names.group, bucket=names.bucket, queue_url=queue,
            job=job_id(sample_plan()), node_count=2, prices=ON_DEMAND, fixed_usd_per_hour=IDLE, ceiling_usd=3000.0,
        )  # fmt: skip

    def carry_out(self, stack: str, directory: Path, **_: Any) -> None:
        """Stand for `pulumi up`: a stack without nodes, whose controller ticks at once."""
        config = yaml.safe_load((directory / f"Pulumi.{stack}.yaml").read_text())["config"]
        if stack not in self.stacks:
            deployed = DeployedStack.without_nodes(stack=stack, directory=directory, region=config["aws:region"])
            self.add(deployed)
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


@pytest.fixture
def pulumi(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pulumi CLI seems to be there; it is not called."""
    for module in (move, down):
        monkeypatch.setattr(module, "require_pulumi", lambda: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(start=datetime.now(UTC))
    monkeypatch.setattr("time.sleep", clock.sleep)
    for module in (stop, handover, down):
        monkeypatch.setattr(module, "datetime", clock)
    return clock


@pytest.fixture
def regions(
    deployed: DeployedStack, clock: Clock, gpufleet: Gpufleet, pulumi: None, monkeypatch: pytest.MonkeyPatch
) -> Regions:
    """Stack of us-east-1, which trained for an hour and saved twice."""
    monkeypatch.setattr("optimizer.preflight.run.CHECKS", ())
    regions = Regions(deployed, clock, gpufleet)
    monkeypatch.setattr(handover, "carry_out", regions.carry_out)
    monkeypatch.setattr(down, "take_down", lambda stack, directory: [])
    for step in (500, 1000):
        save(deployed, step)
    # The first tick ends the nodes that it did not start.
    regions.run(deployed.names.stack)
    clock.sleep(3600)
    return regions


def save(stack: DeployedStack, step: int) -> None:
    """A checkpoint, and the ledger's line of it."""
    prefix = f"checkpoints/step-{step:08d}-abc.1"
    stack.put(f"{prefix}/rank-00000.bin", "w" * 1000)
    stack.put(f"{prefix}/manifest.json", manifest(step, [1000]).decode())
    stack.put(f"checkpoints/ledger/w-{step:06d}.jsonl", json.dumps({"t": 1.0, "event": "commit", "step": step}) + "\n")


def checkpoints(stack: DeployedStack) -> dict[str, bytes]:
    listed = stack.s3.list_objects_v2(Bucket=stack.names.bucket, Prefix="checkpoints/").get("Contents", [])
    return {one["Key"]: stack.s3.get_object(Bucket=stack.names.bucket, Key=one["Key"])["Body"].read() for one in listed}


def test_a_run_goes_on_in_another_region_with_its_meter_and_ceiling(regions: Regions) -> None:
    ((name, old),) = regions.stacks.items()
    began = regions.tick(name).run_started_at
    before, spent = checkpoints(old), old.get("control/state.json")["spent_usd"]
    assert 61 < spent < 80
    code, out, err = regions.move(EUROPE, name)
    assert code == 0, err
    assert "copy    75.3 GiB" in out and "0.02 USD a GB" in out and "of a ceiling of 3,000.00" in out
    assert "min without training" in out and f"gpufleet down --stack {name}" in out

    new = regions.stacks[f"{name}-{EUROPE}"]
    assert old.group.nodes == () and checkpoints(old) == before, "nothing of the old side is lost"
    arrived = checkpoints(new)
    assert arrived == {key: body for key, body in before.items() if "step-00000500" not in key}
    assert old.get("control/request.json")["moved_to"] == new.names.stack
    state = regions.tick(new.names.stack)
    assert state.phase == "starting" and state.ceiling_usd == 3000.0
    assert state.run_started_at == began, "the deadline counts on"
    # The hour, the drain, the copy, and what both stacks cost since.
    assert spent < state.spent_usd < spent + 10
    assert state.usd_per_hour == pytest.approx(2 * IDLE, abs=0.01), "the old stack counts as long as it stands"
    regions.run(new.names.stack)
    assert old.group.nodes == (), "one side trains"

    code, _, err = regions.gpufleet("resume", *old.arguments)
    assert code == 1 and f"gpufleet move {REGION} --stack {new.names.stack}" in err
    code, out, _ = regions.move(EUROPE, name)
    assert code == 0 and "already" in out

    code, out, _ = regions.gpufleet("down", *old.arguments, "--yes")
    assert code == 0 and f"the meter of stack {new.names.stack} counts nothing more of {name}" in out
    alone = regions.tick(new.names.stack)
    assert alone.elsewhere[name].usd_per_hour == 0.0 and alone.spent_usd >= state.spent_usd
    assert alone.phase == "running", "the same ask starts nothing anew"


@pytest.mark.parametrize("step", ["carry_out", "end_nodes", "copy", "let_run"])
def test_an_interrupted_move_loses_nothing_and_goes_on(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ((name, old),) = regions.stacks.items()
    before = checkpoints(old)
    where = {"copy": "optimizer.aws.copying.copy", "let_run": "optimizer.commands.resume.let_run"}
    where["carry_out"] = "optimizer.commands.handover.carry_out"
    place = where.get(step, f"optimizer.commands.move.{step}")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, interrupt)
        assert regions.move(EUROPE, name)[0] != 0
    new = regions.stacks.get(f"{name}-{EUROPE}")
    regions.clock.sleep(180)
    assert checkpoints(old) == before
    if new is not None:
        assert new.group.nodes == () and regions.tick(new.names.stack).phase == "stopped", "no step without checkpoint"
        code, _, err = regions.gpufleet("resume", *new.arguments)
        assert code == 1 and f"moved to stack {name}" in err
    spent = old.get("control/state.json")["spent_usd"]
    code, _, err = regions.move(EUROPE, name)
    assert code == 0, err
    new = regions.stacks[f"{name}-{EUROPE}"]
    assert any("step-00001000" in key and key.endswith("manifest.json") for key in checkpoints(new))
    state = regions.tick(new.names.stack)
    assert state.phase == "starting" and spent <= state.spent_usd < spent + 10
    assert old.group.nodes == ()


def test_a_drought_is_left_and_the_run_comes_back_with_one_meter(regions: Regions) -> None:
    """us-east-1 → eu-west-1, where no node comes → us-west-2 → back to us-east-1."""
    (name,) = regions.stacks
    assert regions.move(EUROPE, name)[0] == 0
    dry = regions.stacks[f"{name}-{EUROPE}"]
    client = regions.clients[dry.names.stack]
    refuses: Any = Drought(client.autoscaling, regions.clock)
    regions.clients[dry.names.stack] = replace(client, autoscaling=refuses)
    for _ in range(5):
        regions.clock.sleep(60)
    assert dry.get("control/state.json")["phase"] == "starting" and dry.group.nodes == ()
    assert "sufficient p4d.24xlarge capacity" in dry.get("control/state.json")["last_failure"]
    code, _, err = regions.move(OREGON, dry.names.stack)
    assert code == 0, err
    oregon = regions.stacks[f"{name}-{OREGON}"]
    regions.run(oregon.names.stack)
    save(oregon, 1500)
    spent = regions.tick(oregon.names.stack).spent_usd
    code, _, err = regions.move(REGION, oregon.names.stack)
    assert code == 0, err
    first = regions.stacks[name]
    state = regions.tick(name)
    assert state.phase == "starting" and set(state.elsewhere) == {dry.names.stack, oregon.names.stack}
    assert spent <= state.spent_usd < spent + 10
    assert any("step-00001500" in key for key in checkpoints(first))
    assert "moved_to" not in first.get("control/request.json")
    assert [one.group.nodes for one in (dry, oregon)] == [(), ()]


def test_a_ceiling_that_the_rest_does_not_fit_keeps_the_run_where_it_is(regions: Regions) -> None:
    ((name, old),) = regions.stacks.items()
    code, _, err = regions.move(EUROPE, name, "--config", "ceilingUsd=70")
    assert code == 3 and "ceiling 70.00 USD" in err
    assert len(old.held("InService")) == 2 and len(regions.stacks) == 1


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        ({}, [REGION], f"is in {REGION} already"),
        ({}, ["moon-base-1"], "moon-base-1"),
        ({"gpufleet:platform": "eks"}, [EUROPE], "gpufleet:platform"),
        ({"gpufleet:mode": "workers"}, [EUROPE], "gpufleet:mode"),
        ({"gpufleet:vpcId": "vpc-1"}, [EUROPE, "--plans", "same.json"], "--config vpcId=VALUE"),
        ({"gpufleet:secret": {"secure": "x"}}, [EUROPE, "--plans", "same.json"], "encrypted for its stack"),
        ({"gpufleet:data": "s3://BUCKET/tokens"}, [EUROPE, "--plans", "same.json"], f"a bucket in {EUROPE}"),
        ({}, [EUROPE, "--yes", "--plans", "other.json"], "samples, steps, tokens differ"),
        ({}, [EUROPE, "--yes"], "--request REQUEST.yaml"),
        ({}, [EUROPE, "--plans", "same.json"], "--yes"),
    ],
)
@pytest.mark.usefixtures("pulumi")
def test_a_run_that_cannot_move_stays_and_says_why(
    deployed: DeployedStack, gpufleet: Gpufleet, config: dict[str, Any], arguments: list[str], says: str
) -> None:
    longer: dict[str, Any] = {"job": {"samples": 512000, "tokens": 1048576000, "steps": 4000}}
    longer |= {"hours": {"expected": 9.5, "p50": 9.4, "p95": 10.2}}
    for name, changes in {"same.json": {}, "other.json": longer}.items():
        (deployed.directory / name).write_text(plan_in(EUROPE, **changes).to_json())
    path = deployed.directory / f"Pulumi.{deployed.names.stack}.yaml"
    content = path.read_text() + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in config.items())
    path.write_text(content.replace("BUCKET", deployed.names.bucket))
    given = [str(deployed.directory / word) if word.endswith(".json") else word for word in arguments]
    code, _, err = gpufleet("move", *given, *deployed.arguments)
    assert code in (2, 4) and says in err
    assert len(deployed.held("InService")) == 2
    assert sorted(deployed.directory.glob("Pulumi.*.yaml")) == [path]


@pytest.mark.usefixtures("pulumi")
def test_the_plan_follows_from_the_request_that_up_kept(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: dict[str, Any] = {"samples": 256000, "seq_len": 2048, "data_gib": 100}
    request = {"model": "llama-2-7b", "workload": work}
    data = f"data=s3://{deployed.names.bucket}/tokens"
    (deployed.directory / f"plans.{deployed.names.stack}.json").write_text(json.dumps({"request": request}))
    asked: list[Any] = []

    def recommend(path: str, answer: Path, refresh: bool | None, *flags: str) -> str:
        asked.append((json.loads(Path(path).read_text()), *flags))
        answer.write_text(plan_in(EUROPE).to_json())
        return str(answer)

    def enough(plan: FleetPlan, *_: Any, **__: Any) -> None:
        asked.append(plan.region)
        raise KeyboardInterrupt

    monkeypatch.setattr("optimizer.commands.up.run_recommend", recommend)
    monkeypatch.setattr(move, "stand_up", enough)
    code, _, _ = gpufleet("move", EUROPE, *deployed.arguments, "--yes", "--config", data, "--config", "nat=true")
    assert code != 0
    flags = ("--region", EUROPE, "--global-batch", "128", "--budget", "3000.0", "--deadline", "48.0h")
    assert asked == [({**request, "workload": {**work, "data_region": REGION}}, *flags), EUROPE]
