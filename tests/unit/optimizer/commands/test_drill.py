"""``gpufleet drill`` on a deployed stack in an emulated AWS; FIS by botocore's Stubber."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from bootstrap.contract.codec import to_text
from bootstrap.contract.state import ControllerState, MeteredInstance, read_state
from optimizer.aws import clients
from optimizer.commands import drill
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import Clock, DeployedStack
from tests.unit.optimizer.emulated_regions import Regions

START = 1_760_000_000.0


@pytest.fixture
def fis(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    client = boto3.client("fis", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    monkeypatch.setattr(clients, "fis", lambda region: client)
    stubber = Stubber(client)
    stubber.activate()
    return stubber


def put_state(deployed: DeployedStack, lifecycle: Any = "spot", interrupted: bool = False, **changes: Any) -> str:
    """Write the state of a whole gang, and return its first node."""
    now = datetime.now(UTC).replace(microsecond=0)
    times: dict[str, Any] = {"since": now, "run_started_at": now, "updated_at": now}
    meter = MeteredInstance(
        instance_type="p4d.24xlarge",
        launched_at=now,
        metered_until=now,
        lifecycle=lifecycle,
        interrupted=interrupted,
        usd_per_hour=10.0,
        spent_usd=0.0,
    )
    nodes = {node.instance_id: meter for node in deployed.group.nodes}
    values: dict[str, Any] = {"phase": "running", "complete_since": now - timedelta(hours=1), **times, **changes}
    state = ControllerState(run_id="0" * 12, job="0" * 12, reason="all serve", instances=nodes, **values)
    deployed.put("control/state.json", to_text(state))
    return min(nodes)


def put_ledger(deployed: DeployedStack, name: str, *events: tuple[str, float, int]) -> None:
    priced = {"price_usd_per_hour": 36.0, "boot": "b", "writer": name}
    lines = [json.dumps({"event": kind, "t": t, "step": step, **priced}) for kind, t, step in events]
    deployed.put(f"checkpoints/ledger/{name}.jsonl", "\n".join(lines))


def begin(deployed: DeployedStack) -> None:
    put_ledger(
        deployed, "1", ("start", START, 0), ("train", START + 10, 0), ("commit", START + 90, 80),
        ("progress", START + 110, 100),
    )  # fmt: skip


def come_back(deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch, **state: Any) -> None:
    """Let the gang be whole again, and train, once the command waits."""
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=5)

    def sleep(_: float) -> None:
        put_state(deployed, **{"complete_since": later, **state})
        at = later.timestamp() + 60
        put_ledger(deployed, "2", ("start", at, 0), ("train", at + 40, 80), ("progress", at + 60, 100))

    monkeypatch.setattr("time.sleep", sleep)


EXPERIMENT = {"id": "EXP1", "state": {"status": "running"}}


def expect_fis(fis: Stubber, deployed: DeployedStack, node: str, experiment: dict[str, Any]) -> None:
    template = {
        "description": ANY,
        "stopConditions": [{"source": "none"}],
        "targets": {
            "node": {
                "resourceType": "aws:ec2:spot-instance",
                "resourceArns": [f"arn:aws:ec2:us-east-1:123456789012:instance/{node}"],
                "selectionMode": "ALL",
            }
        },
        "actions": {
            "interrupt": {
                "actionId": "aws:ec2:send-spot-instance-interruptions",
                "parameters": {"durationBeforeInterruption": "PT2M"},
                "targets": {"SpotInstances": "node"},
            }
        },
        "roleArn": "arn:aws:iam::123456789012:role/aws-fis-itn",
    }
    fis.add_response("create_experiment_template", {"experimentTemplate": {"id": "EXT1"}}, template)
    started = {"experimentTemplateId": "EXT1"}
    fis.add_response("start_experiment", {"experiment": experiment}, started)
    fis.add_response("delete_experiment_template", {"experimentTemplate": {"id": "EXT1"}}, {"id": "EXT1"})


def test_a_spot_node_is_interrupted_by_fis_and_the_ledger_has_what_it_cost(
    deployed: DeployedStack, gpufleet: Gpufleet, fis: Stubber, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = put_state(deployed)
    begin(deployed)
    expect_fis(fis, deployed, node, EXPERIMENT)
    come_back(deployed, monkeypatch)
    code, out, err = gpufleet("drill", node, *deployed.arguments, "--yes")
    assert code == 0 and f"EC2 interrupts {node} in two minutes" in err
    # 20 of 100 steps of 100 s are repeated; what follows the last event before is a restart.
    assert "lost 20 s" in out and "20 steps repeated" in out and "USD: " in out
    assert node in {each.instance_id for each in deployed.group.nodes}
    fis.assert_no_pending_responses()


@pytest.mark.parametrize("case", ["on demand", "no role", "not permitted", "failed"])
def test_another_node_gets_the_notice_of_its_group(
    deployed: DeployedStack, gpufleet: Gpufleet, fis: Stubber, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    lifecycle = "on-demand" if case == "on demand" else "spot"
    node = put_state(deployed, lifecycle)
    begin(deployed)
    if case == "no role":
        fis.add_client_error("create_experiment_template", "ValidationException", "role aws-fis-itn is not there")
    elif case == "not permitted":
        fis.add_client_error("create_experiment_template", "AccessDeniedException", "no fis:CreateExperimentTemplate")
    elif case == "failed":
        failed = {"id": "EXP1", "state": {"status": "failed", "reason": "the role is denied"}}
        expect_fis(fis, deployed, node, failed)
    come_back(deployed, monkeypatch, phase="stopped", complete_since=None)
    code, _, err = gpufleet("drill", node, *deployed.arguments, "--yes")
    assert deployed.held("Terminating:Wait") == [node] and deployed.group.wanted == 2
    assert code == 1 and "did not come back" in err and "it is stopped" in err
    assert ("FIS sends no interruption" in err) is (case != "on demand")
    assert ("it takes fis:CreateExperimentTemplate, fis:StartExperiment" in err) is (case == "not permitted")


def test_the_controller_replaces_the_node_and_the_drill_ends_with_what_it_cost(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A story with the controller's own ticks: the gang is whole, lacks a node, is whole again and trains."""
    clock = Clock(start=datetime.now(UTC).replace(microsecond=0))
    monkeypatch.setattr("time.sleep", clock.sleep)
    monkeypatch.setattr(drill, "datetime", clock)
    regions, name = Regions(deployed.directory, clock, gpufleet), deployed.names.stack
    regions.add(deployed)
    regions.run(name)
    begin(deployed)
    node, sent_at = min(member.instance_id for member in deployed.group.nodes), clock.now()

    def train_again(_: timedelta) -> None:
        if clock.now() - sent_at < timedelta(minutes=3):
            regions.tick(name)  # while the node saves
        else:
            regions.pass_time()
        whole_at = read_state(json.dumps(deployed.get("control/state.json")), "the state").complete_since
        if whole_at and whole_at > sent_at:
            at = whole_at.timestamp() + 30
            put_ledger(deployed, "2", ("start", at, 0), ("train", at + 40, 80), ("progress", at + 60, 100))

    clock.meanwhile = train_again
    code, out, err = gpufleet("drill", node, *deployed.arguments, "--yes")
    assert code == 0 and "20 steps repeated" in out, err
    members = {member.instance_id for member in deployed.group.nodes}
    assert len(members) == 2 and node not in members


def test_a_run_that_changed_while_a_person_read_is_left_alone(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = put_state(deployed)
    begin(deployed)
    monkeypatch.setattr(drill, "confirm", lambda *_, **__: put_state(deployed, interrupted=True))
    code, _, err = gpufleet("drill", node, *deployed.arguments)
    assert code == 1 and "is no node of a whole gang" in err
    assert {each.lifecycle_state for each in deployed.group.nodes} == {"InService"}


def test_nothing_is_interrupted_without_a_checkpoint_a_whole_gang_or_a_yes(
    deployed: DeployedStack, gpufleet: Gpufleet, fis: Stubber
) -> None:
    node = put_state(deployed)
    assert "has no checkpoint" in gpufleet("drill", node, *deployed.arguments, "--yes")[2]
    put_ledger(deployed, "1", ("start", START, 0), ("train", START + 10, 0), ("progress", START + 110, 100))
    assert "has no checkpoint" in gpufleet("drill", node, *deployed.arguments, "--yes")[2]
    begin(deployed)
    code, _, err = gpufleet("drill", node, *deployed.arguments)
    assert code == 2 and "no terminal" in err
    code, out, err = gpufleet("drill", node, *deployed.arguments, "--dry-run", "--yes")
    assert code == 0 and f"Interrupt {node} (spot)" in out + err
    code, _, err = gpufleet("drill", "i-0123456789abcdef0", *deployed.arguments, "--yes")
    assert code == 1 and "is no node of a whole gang" in err
    put_state(deployed, complete_since=None)
    code, _, err = gpufleet("drill", node, *deployed.arguments, "--yes")
    assert code == 1 and "is no node of a whole gang" in err
    assert {each.lifecycle_state for each in deployed.group.nodes} == {"InService"}
    fis.assert_no_pending_responses()
