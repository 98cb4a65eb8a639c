"""``gpufleet up`` and ``down`` in front of a Pulumi CLI that only records its calls; tests/engine has the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError

from bootstrap.contract.codec import to_text
from bootstrap.contract.shared_ceiling import SharedSpend, StackRow, read_shared_spend
from optimizer.aws import clients
from optimizer.catalog.snapshot import SHIPPED
from optimizer.commands import down
from optimizer.commands.pulumi_engine import carry_out
from optimizer.commands.status import live
from optimizer.contract.errors import GpufleetError
from tests.engine.emulated_aws import amazon_image
from tests.plans import LLAMA, sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import IMAGE, REGION, Clock, DeployedStack

LEFT = [
    {"type": "pulumi:pulumi:Stack", "custom": False},
    {"type": "aws:s3/bucket:Bucket", "custom": True, "id": "checkpoints-of-mine"},
]
CLI = """#!/bin/sh
printf '%s\\n' "$*" >>{folder}/calls
case "$*" in
  "up "*) echo " +  aws:ec2:Vpc creating"; cat {folder}/refusal >&2; [ ! -s {folder}/refusal ] ;;
  "stack export"*) cat {folder}/state ;;
esac
"""


@dataclass(frozen=True)
class Pulumi:
    """The recording CLI."""

    folder: Path

    def refuse(self, complaint: str) -> None:
        (self.folder / "refusal").write_text(complaint)

    def ran(self, command: str) -> bool:
        calls = self.folder / "calls"
        return calls.exists() and any(line.startswith(f"{command} ") for line in calls.read_text().splitlines())


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pulumi:
    folder = tmp_path / "pulumi"
    folder.mkdir()
    program = folder / "pulumi"
    program.write_text(CLI.format(folder=folder))
    program.chmod(0o755)
    (folder / "refusal").touch()
    (folder / "state").write_text(json.dumps({"version": 3, "deployment": {"resources": LEFT}}))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Pulumi(folder)


@pytest.fixture
def plan(deployed: DeployedStack) -> str:
    """A plan file of the deployed stack, whose configuration names an image that AWS has."""
    deployed.configure(amiId=amazon_image(IMAGE, "x86_64")["ami_id"])
    path = deployed.directory / "plan.json"
    path.write_text(sample_plan().to_json())
    return str(path)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of preflight passes: its findings have tests of their own."""
    monkeypatch.setattr("optimizer.commands.preflight.CHECKS", ())


Up = Callable[..., tuple[int, str, str]]


@pytest.fixture
def up(gpufleet: Gpufleet, deployed: DeployedStack, plan: str) -> Up:
    return lambda *arguments: gpufleet(
        "up", plan, *deployed.arguments, "--yes", "--accept-stale-prices", *(arguments or ("--no-follow",))
    )


@pytest.mark.parametrize("command", [("up", "request.yaml"), ("down",)])
def test_without_pulumi_nothing_begins(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = gpufleet(*command)
    assert code == 1 and "no Pulumi CLI is on PATH" in err and "https://www.pulumi.com/docs/" in err


def test_a_request_without_a_plan_ends_as_recommend_does(
    pulumi: Pulumi, gpufleet: Gpufleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFLEET_CATALOG", str(SHIPPED))
    request = tmp_path / "request.yaml"
    request.write_text("model: llama-3.1-8b\nworkload: {tokens: 2B, seq_len: 8192}\nconstraints: {budget_usd: 1}\n")
    code, _, err = gpufleet("up", str(request), "--yes", "--directory", str(tmp_path))
    assert code == 3 and f"gpufleet recommend {request}" in err
    assert not pulumi.ran("up")


def test_the_plan_is_set_and_carried_out(
    pulumi: Pulumi, up: Up, deployed: DeployedStack, checked: None, clock: Clock
) -> None:
    code, out, err = up()
    assert code == 0, err
    assert f"gpufleet status --stack {deployed.names.stack}" in out
    assert pulumi.ran("up")


def test_a_stack_without_wheels_gets_them(
    pulumi: Pulumi, up: Up, deployed: DeployedStack, checked: None, plan: str, downloads: list[list[str]]
) -> None:
    Path(plan).write_text(sample_plan(job={"architecture": LLAMA}).to_json())
    assert up()[0] == 0 and up()[0] == 0
    packed = Path(yaml.safe_load(deployed.file.read_text())["config"]["gpufleet:wheels"])
    assert packed.is_file()
    assert len(downloads) == 2, "one archive, of wheels for two Pythons"


def test_an_obstacle_in_the_account_ends_it_before_pulumi(pulumi: Pulumi, up: Up, deployed: DeployedStack) -> None:
    """The emulated account has no quotas to read."""
    deployed.configure(amiId="ami-0123456789abcdef0", ceilingUsd="1")
    code, out, err = up()
    assert code == 1 and "error    budget" in out and "nothing was created" in err and "gpufleet up" in err
    assert not pulumi.ran("up")


def test_a_failure_of_pulumi_has_the_next_step(pulumi: Pulumi, up: Up, checked: None) -> None:
    pulumi.refuse("error: update failed")
    code, _, err = up()
    assert code == 1 and "error: pulumi up failed" in err and "gpufleet down --stack" in err


def test_pulumis_words_go_to_standard_error(pulumi: Pulumi, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pulumi.refuse("error: update failed")
    with pytest.raises(GpufleetError):
        carry_out("dev", tmp_path)
    out, err = capfd.readouterr()
    assert out == "" and "aws:ec2:Vpc creating" in err and "error: update failed" in err


def test_nobody_to_ask_is_a_wrong_use(pulumi: Pulumi, gpufleet: Gpufleet, deployed: DeployedStack, plan: str) -> None:
    assert gpufleet("up", plan, *deployed.arguments)[0] == 4, "old prices are refused before the question"
    given = ("--config", "gpufleet:ceilingUsd=5", "--accept-stale-prices", "--no-follow")
    code, out, err = gpufleet("up", plan, *deployed.arguments, *given)
    assert code == 2 and "at most 5.00" in out and {*deployed.arguments, *given, "--yes"} <= set(err.split())
    code, _, err = gpufleet("down", *deployed.arguments)
    assert code == 2 and "--yes" in err
    assert not pulumi.ran("up") and not pulumi.ran("destroy")


def test_the_run_is_followed_to_its_end(
    pulumi: Pulumi, up: Up, deployed: DeployedStack, checked: None, clock: Clock
) -> None:
    """The state of an earlier run does not end it; a later tick's does."""
    deployed.write_state(phase="done", reason="an earlier run")

    def tick(passed: timedelta) -> None:
        ended = passed > timedelta(seconds=3 * live.POLL_S)
        ahead = datetime.now(UTC) + timedelta(minutes=1)
        deployed.write_state(
            phase="failed" if ended else "running",
            reason="node i-1 gave up" if ended else "both nodes are in service",
            since="2026-11-23T04:00:00Z",
            updated_at=f"{ahead:%Y-%m-%dT%H:%M:%SZ}",
        )

    clock.meanwhile = tick
    code, out, _ = up("--follow")
    assert code == 1, "the run has failed"
    assert out.count("both nodes are in service") == 1, "a line an event"
    assert "node i-1 gave up" in out and "gpufleet down" in out


def test_ctrl_c_leaves_the_fleet(pulumi: Pulumi, up: Up, deployed: DeployedStack, checked: None, clock: Clock) -> None:
    def interrupt(passed: timedelta) -> None:
        raise KeyboardInterrupt

    clock.meanwhile = interrupt
    code, _, err = up("--follow")
    assert code == 0 and "the fleet goes on" in err
    assert all(f"gpufleet {command} --stack" in err for command in ("status", "stop", "down"))
    assert len(deployed.held("InService")) == 2


def test_down_saves_destroys_and_says_what_is_left_and_up_goes_on(
    pulumi: Pulumi, gpufleet: Gpufleet, up: Up, deployed: DeployedStack, checked: None, clock: Clock
) -> None:
    code, out, err = gpufleet("down", *deployed.arguments, "--yes")
    assert code == 0, err
    assert deployed.group.nodes == ()
    assert deployed.get("control/request.json")["want"] == "stop"
    assert pulumi.ran("destroy") and "--exclude-protected" in (pulumi.folder / "calls").read_text()
    assert "left: aws:s3/bucket:Bucket checkpoints-of-mine" in out and "pulumi:pulumi" not in out
    assert up()[0] == 0
    assert deployed.get("control/request.json")["want"] == "run", "no node starts while it asks to stop"


def test_up_lets_a_stack_run_that_waits_for_a_first_request(pulumi: Pulumi, up: Up, checked: None) -> None:
    code, out, err = up("--config", "waits=true", "--no-follow")
    assert code == 0, err
    assert "to run; gpufleet status" in out


@pytest.mark.parametrize("deployed_protected", [True, False])
def test_down_says_what_becomes_of_the_checkpoints_as_deployed(
    deployed_protected: bool,
    pulumi: Pulumi,
    gpufleet: Gpufleet,
    deployed: DeployedStack,
    plan: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Destroy goes by the state: gpufleet:forceDestroy that was changed since takes effect at the next up only."""
    resources = [{**one, "protect": deployed_protected and one["custom"]} for one in LEFT]
    (pulumi.folder / "state").write_text(json.dumps({"version": 3, "deployment": {"resources": resources}}))
    deployed.configure(forceDestroy=deployed_protected)
    monkeypatch.setattr(down, "confirm", Mock(side_effect=GpufleetError("not confirmed")))
    code, out, err = gpufleet("down", *deployed.arguments)
    assert code == 1 and "not confirmed" in err
    assert ("its checkpoints stay" in out, "DELETES its checkpoints" in out) == (
        deployed_protected,
        not deployed_protected,
    )


def test_down_destroys_a_stack_whose_key_cannot_be_used(
    pulumi: Pulumi, gpufleet: Gpufleet, deployed: DeployedStack, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can read what its bucket has; its nodes and endpoints are paid all the same."""

    class Sealed:
        def get_object(self, **_: Any) -> Any:
            answer: Any = {"Error": {"Code": "KMS.KMSInvalidStateException", "Message": "is pending deletion"}}
            raise ClientError(answer, "GetObject")

        put_object = get_object

        def __getattr__(self, name: str) -> Any:
            return getattr(deployed.s3, name)

    monkeypatch.setattr(clients, "s3", lambda region: Sealed())
    code, _, err = gpufleet("down", *deployed.arguments, "--yes")
    assert code == 0, err
    assert deployed.group.nodes == () and pulumi.ran("destroy")


def test_down_that_cannot_see_the_nodes_ends_none_of_them_without_a_checkpoint(
    pulumi: Pulumi, gpufleet: Gpufleet, deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> Any:
        answer: Any = {"Error": {"Code": "Throttling", "Message": "Rate exceeded"}}
        raise ClientError(answer, "DescribeAutoScalingGroups")

    blind = boto3.client("autoscaling", region_name=REGION)
    monkeypatch.setattr(blind, "describe_auto_scaling_groups", refuse)
    monkeypatch.setattr(clients, "autoscaling", lambda region: blind)
    code, _, err = gpufleet("down", *deployed.arguments, "--yes")
    assert code == 1 and "AWS throttled the calls" in err and "--no-save" in err
    assert len(deployed.held("InService")) == 2 and not pulumi.ran("destroy")
    assert gpufleet("down", *deployed.arguments, "--yes", "--no-save")[0] == 0
    assert pulumi.ran("destroy")


def test_down_ends_the_stacks_row_under_a_shared_ceiling(
    pulumi: Pulumi, gpufleet: Gpufleet, deployed: DeployedStack
) -> None:
    """A destroyed stack costs nothing more, and must not block the other stacks for ever."""
    (pulumi.folder / "state").write_text(json.dumps({"version": 3, "deployment": {}}))
    deployed.configure(sharedCeiling="s3://team/budget.json@5000")
    down_now = ("down", *deployed.arguments, "--yes", "--no-save")
    deployed.s3.create_bucket(Bucket="team")
    deployed.s3.put_object(Bucket="team", Key="budget.json", Body=b"[]")
    code, _, err = gpufleet(*down_now)
    assert code == 0 and "until you set its stack_usd_per_hour to 0: s3://team/budget.json is '[]'" in err
    mine, begun = f"{REGION}/{deployed.names.stack}", datetime.now(UTC)
    row = StackRow(usd=7.0, usd_per_hour=30.0, stack_usd_per_hour=1.0, end_s=600, at=begun - timedelta(hours=10))
    rows = {f"{mine} since then": row, f"{mine}-2 since then": row}
    deployed.s3.put_object(Bucket="team", Key="budget.json", Body=to_text(SharedSpend(rows=rows)).encode())
    code, out, err = gpufleet(*down_now)
    assert code == 0 and "costs nothing more under the ceiling in s3://team/budget.json" in out, err
    text = deployed.s3.get_object(Bucket="team", Key="budget.json")["Body"].read().decode()
    ended, other = read_shared_spend(text, "rows").rows.values()
    later = begun + timedelta(days=100)
    assert ended.usd_until(later) == ended.usd == pytest.approx(row.usd_until(begun), abs=0.1)
    assert other.usd_until(later) == pytest.approx(row.usd_until(later))


def test_down_without_saving_leaves_the_nodes_to_destroy(
    pulumi: Pulumi, gpufleet: Gpufleet, deployed: DeployedStack
) -> None:
    (pulumi.folder / "state").write_text(json.dumps({"version": 3, "deployment": {}}))
    code, out, _ = gpufleet("down", *deployed.arguments, "--yes", "--no-save")
    assert code == 0 and "nothing of stack" in out
    assert len(deployed.held("InService")) == 2 and pulumi.ran("destroy")
