"""``gpufleet move`` between emulated regions, with the controller's own ticks on every side; Pulumi is a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.commands import deploying, down, move
from optimizer.commands.stack_file import StackFile, write_stack_file
from optimizer.contract.errors import GpufleetError
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import REGION, Clock, DeployedStack
from tests.unit.optimizer.emulated_regions import EUROPE, IDLE, OREGON, Regions, checkpoints, plan_in, save


@pytest.fixture
def pulumi(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pulumi CLI seems to be there; it is not called."""
    for module in (move, down):
        monkeypatch.setattr(module, "require_pulumi", lambda: None)


@pytest.fixture
def regions(
    deployed: DeployedStack, clock: Clock, gpufleet: Gpufleet, pulumi: None, monkeypatch: pytest.MonkeyPatch
) -> Regions:
    """Stack of us-east-1, which trained for an hour and saved twice."""
    monkeypatch.setattr("optimizer.commands.preflight.CHECKS", ())
    regions = Regions(deployed.directory, clock, gpufleet)
    regions.add(deployed)
    monkeypatch.setattr(deploying, "carry_out", regions.carry_out)
    monkeypatch.setattr(down, "take_down", lambda stack, directory: [])
    for step in (500, 1000):
        save(deployed, step)
    # The first tick ends the nodes that it did not start.
    regions.run(deployed.names.stack)
    clock.sleep(3600)
    return regions


def test_a_run_goes_on_in_another_region_with_its_meter_and_ceiling(regions: Regions) -> None:
    ((name, old),) = regions.stacks.items()
    began = regions.tick(name).run_started_at
    before, spent = checkpoints(old), old.get("control/state.json")["spent_usd"]
    assert 61 < spent < 80
    code, out, err = regions.move(EUROPE, name)
    assert code == 0, err
    assert "1.62 of them for the copy" in out and "USD of the ceiling are left" in out
    assert f"gpufleet down --stack {name}" in out

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


@pytest.mark.parametrize("step", ["carry_out", "follow_drain", "copy", "let_run"])
def test_an_interrupted_move_loses_nothing_and_goes_on(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ((name, old),) = regions.stacks.items()
    before = checkpoints(old)
    module = {"carry_out": "deploying", "follow_drain": "stop"}.get(step, "move")

    def interrupt(*given: Any, **_: Any) -> None:
        # The new stack's drain goes by; the old one's is interrupted.
        if step != "follow_drain" or given[0].stack == name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"optimizer.commands.{module}.{step}", interrupt)
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


def test_a_move_whose_copy_never_succeeds_is_taken_back(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, old),) = regions.stacks.items()

    def refuse(*_: Any) -> None:
        raise GpufleetError("the key is denied")

    with monkeypatch.context() as patch:
        patch.setattr("optimizer.commands.move.copy", refuse)
        assert regions.move(EUROPE, name)[0] == 1
    new = regions.stacks[f"{name}-{EUROPE}"]
    assert regions.tick(name).phase == "stopped" and old.group.nodes == ()
    code, _, err = regions.gpufleet("resume", *old.arguments)
    assert code == 1 and f"gpufleet move {REGION} --stack {new.names.stack} brings it back" in err
    code, _, err = regions.move(OREGON, name)
    assert code == 2 and f"gpufleet move {EUROPE} --stack {name}" in err
    code, out, err = regions.move(REGION, new.names.stack)
    assert code == 0 and f"stack {name} goes on" in out, err
    assert regions.tick(name).phase in ("waiting", "starting")
    assert regions.tick(new.names.stack).phase == "stopped"
    # Nothing is left of the move: the next one begins anew.
    assert "moved_to" not in old.get("control/request.json")


def test_a_drought_is_left_and_the_run_comes_back_with_one_meter(regions: Regions) -> None:
    """us-east-1 → eu-west-1, where no node comes → us-west-2 → back to us-east-1."""
    (name,) = regions.stacks
    assert regions.move(EUROPE, name)[0] == 0
    dry = regions.stacks[f"{name}-{EUROPE}"]
    regions.dry_out(dry.names.stack)
    for _ in range(5):
        regions.clock.sleep(60)
    # AWS refuses at once, and is asked again every five minutes.
    assert dry.get("control/state.json")["phase"] == "waiting" and dry.group.nodes == ()
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


def test_two_runs_of_one_job_do_not_become_one(regions: Regions) -> None:
    ((name, old),) = regions.stacks.items()
    second = f"{name}-{EUROPE}"
    write_stack_file(regions.directory / f"Pulumi.{second}.yaml", plan_in(EUROPE))
    regions.carry_out(second, regions.directory)
    regions.run(second)
    code, _, err = regions.move(EUROPE, name)
    assert code == 2 and f"gpufleet stop --stack {second}" in err
    assert len(old.group.nodes) == len(regions.stacks[second].group.nodes) == 2


def test_a_ceiling_that_the_rest_does_not_fit_keeps_the_run_where_it_is(regions: Regions) -> None:
    ((name, old),) = regions.stacks.items()
    code, _, err = regions.move(EUROPE, name, "--config", "ceilingUsd=70")
    assert code == 3 and "USD of the ceiling are left" in err
    assert len(old.held("InService")) == 2 and len(regions.stacks) == 1


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        ({}, ["moon-base-1"], "moon-base-1"),
        ({"gpufleet:mode": "workers"}, [EUROPE], "gpufleet:mode"),
        ({"gpufleet:vpcId": "vpc-1"}, [EUROPE, "--plans", "same.json"], "has gpufleet:vpcId"),
        ({"gpufleet:secret": {"secure": "x"}}, [EUROPE, "--plans", "same.json"], "encrypted for its stack"),
        ({"gpufleet:data": "s3://BUCKET/tokens"}, [EUROPE, "--plans", "same.json"], f"a bucket in {EUROPE}"),
        ({}, [EUROPE, "--yes", "--plans", "other.json"], "are of one job"),
        ({}, [EUROPE, "--yes"], "then --plans PLAN"),
        ({}, [EUROPE, "--plans", "same.json"], "days old"),
        ({}, [EUROPE, "--plans", "same.json", "--accept-stale-prices"], "--yes"),
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
    path = deployed.file
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
    given = (f"--config=data=s3://{deployed.names.bucket}/tokens", "--config=nat=true", "--accept-stale-prices")
    (deployed.directory / f"plans.{deployed.names.stack}.json").write_text(json.dumps({"request": request}))
    asked: list[Any] = []

    def recommend(path: str, answer: Path, *flags: str) -> str:
        asked.append((json.loads(Path(path).read_text()), *flags))
        answer.write_text(plan_in(EUROPE).to_json())
        return str(answer)

    def enough(place: StackFile, *_: Any, **__: Any) -> None:
        asked.append(place.plan.region)
        raise KeyboardInterrupt

    monkeypatch.setattr("optimizer.commands.move.run_recommend", recommend)
    monkeypatch.setattr(move, "stand_up", enough)
    code, _, _ = gpufleet("move", EUROPE, *deployed.arguments, "--yes", *given)
    assert code != 0
    flags = ("--region", EUROPE, "--global-batch", "128")
    assert asked == [({**request, "workload": {**work, "data_region": REGION}}, *flags), EUROPE]
