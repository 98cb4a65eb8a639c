"""``gpufleet up --regions`` between emulated regions, with the controllers' own ticks; Pulumi is a stand-in."""

from __future__ import annotations

import itertools
import json
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bootstrap.contract.state import ControllerState, read_state
from optimizer.commands import deploying, down, stop, up
from optimizer.commands.move import regions
from optimizer.commands.stack import put_plan
from optimizer.commands.status import live
from optimizer.contract.errors import GpufleetError
from optimizer.contract.plan import FleetPlan
from tests.engine.emulated_aws import amazon_image
from tests.plans import sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import IMAGE, REGION, Clock, DeployedStack
from tests.unit.optimizer.emulated_regions import EUROPE, OREGON, Regions, checkpoints, plan_in, save

# Dollars of the sample plan's nodes in each region beyond those in the first.
DEARER = {REGION: 0.0, OREGON: 10.0, EUROPE: 20.0}
REQUEST = {"model": "llama-2-7b", "workload": {"samples": 256000, "seq_len": 2048}}


class World(Regions):
    """The regions of one run; once it has trained for some minutes, ``after_minutes`` is called with its stack."""

    def __init__(self, base: str, directory: Path, clock: Clock, gpufleet: Gpufleet) -> None:
        super().__init__(directory, clock, gpufleet)
        self.base = base
        self.hours: dict[str, dict[str, float]] = {}  # of a region's plan that is slower than the sample
        self.ran_minutes = 0
        self.after_minutes = self.stop

    def up(self, *more: str, given: tuple[str, ...] = (REGION, OREGON, EUROPE)) -> tuple[int, str, str]:
        """Run the command until it has ended."""
        request = self.directory / "request.json"
        request.write_text(json.dumps(REQUEST))
        ami = amazon_image(IMAGE, "x86_64")["ami_id"]
        return self.gpufleet(
            "up", str(request), "--regions", ",".join(given), "--stack", self.base, "--directory", str(self.directory),
            "--config", f"amiId={ami}", "--yes", "--accept-stale-prices", *more,
        )  # fmt: skip

    def stack(self, region: str) -> DeployedStack:
        return self.stacks[f"{self.base}-{region}"]

    def pass_time(self) -> None:
        super().pass_time()
        running = [name for name in self.stacks if self.state(name).phase == "running"]
        assert len(running) <= 1, "one side trains"
        self.ran_minutes += bool(running)
        if self.ran_minutes > 3:
            self.ran_minutes = 0
            self.after_minutes(running[0])

    def stop(self, stack: str) -> None:
        """A person asks the run to stop."""
        stop.ask(self.stacks[stack].names, "stop")

    def state(self, stack: str) -> ControllerState:
        return read_state(json.dumps(self.stacks[stack].get("control/state.json")), "state")


@pytest.fixture
def world(
    emulated_url: str, tmp_path: Path, clock: Clock, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> World:
    """No stack yet; us-east-1 is the cheapest region, eu-west-1 the dearest."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulated_url)
    monkeypatch.setattr("optimizer.commands.preflight.CHECKS", ())
    (tmp_path / "Pulumi.yaml").write_text("name: gpufleet\n")
    world = World(f"s-{uuid.uuid4().hex[:8]}", tmp_path, clock, gpufleet)
    for module in (up, down):
        monkeypatch.setattr(module, "require_pulumi", lambda: None)
    monkeypatch.setattr(deploying, "carry_out", world.carry_out)
    monkeypatch.setattr(down, "take_down", lambda stack, directory: [])
    monkeypatch.setattr(live, "POLL_S", 60)

    def recommend(path: str, answer: Path, *flags: str) -> str:
        given = [word for flag, word in itertools.pairwise(flags) if flag == "--region"]
        region = min(given, key=lambda name: DEARER[name])
        cost = sample_plan().cost_usd.model_dump()
        cost["breakdown"]["compute"] += DEARER[region]
        cost |= {part: cost[part] + DEARER[region] for part in ("expected", "p50", "p95")}
        slower: dict[str, Any] = {"hours": world.hours[region]} if region in world.hours else {}
        answer.write_text(plan_in(region, cost_usd=cost, **slower).to_json())
        return str(answer)

    monkeypatch.setattr(regions, "run_recommend", recommend)
    monkeypatch.setattr(regions, "WAIT", timedelta(minutes=3))
    return world


def test_a_run_begins_in_the_cheapest_region_and_goes_on_where_capacity_comes(world: World) -> None:
    world.dry = {REGION}
    code, out, err = world.up()
    assert code == 0, err
    assert f"{REGION} has refused for 3 minutes: next is {OREGON}" in out
    first, second = (world.stack(region) for region in (REGION, OREGON))
    assert first.get("control/request.json")["moved_to"] == second.names.stack
    state = world.state(second.names.stack)
    assert state.phase == "stopped" and state.spent_usd < 3000
    assert set(state.elsewhere) == {first.names.stack}, "one meter for both"
    assert len(world.stacks) == 2, "no stack waits beside the run, and is paid"

    code, out, err = world.gpufleet(
        "down", "--stack", second.names.stack, "--directory", str(world.directory), "--everywhere", "--yes"
    )
    assert code == 0, err
    assert f"the meter of stack {second.names.stack} counts nothing more of {first.names.stack}" in out


def test_a_run_that_is_reclaimed_for_good_takes_its_checkpoint_along(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of the hand-over; the same command goes on with it."""
    first, second = (f"{world.base}-{region}" for region in (REGION, OREGON))

    def reclaim(stack: str) -> None:
        save(world.stacks[stack], 1000)
        world.dry_out(stack)
        world.after_minutes = world.stop

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    world.after_minutes = reclaim
    with monkeypatch.context() as patch:
        patch.setattr("optimizer.commands.move.copy", interrupt)
        code, _, _ = world.up(given=(REGION, OREGON))
    assert code != 0 and world.stacks[first].get("control/request.json")["moved_to"] == second
    spent = world.state(first).spent_usd
    world.after_minutes = world.stop
    code, out, err = world.up(given=(REGION, OREGON))
    assert code == 0, err
    assert f"stack {second} goes on from step 1,000" in out
    state = world.state(second)
    assert state.phase == "stopped" and state.spent_usd > spent and set(state.elsewhere) == {first}
    assert any("step-00001000" in key for key in checkpoints(world.stacks[second]))


def test_regions_are_ranked_by_the_rest_and_the_hours_that_are_left(world: World) -> None:
    """us-west-2 is cheaper and would keep the whole deadline; half the work and 18 hours are left."""
    world.hours[OREGON] = {"expected": 40.0, "p50": 40.0, "p95": 44.0}

    def reclaim(stack: str) -> None:
        save(world.stacks[stack], 1000)
        world.clock.passed += timedelta(hours=30)
        world.dry_out(stack)
        world.after_minutes = world.stop

    world.after_minutes = reclaim
    code, out, err = world.up()
    assert code == 0, err
    assert f"next is {EUROPE}" in out and f"{world.base}-{OREGON}" not in world.stacks


def test_where_all_regions_refuse_the_run_stays_and_asks_on(world: World) -> None:
    world.dry = {REGION, OREGON}
    minutes = iter(range(60))

    def give_up(passed: Any) -> None:
        world.pass_time()
        if world.clock.passed > timedelta(minutes=25) and next(minutes) == 0:
            stop.ask(world.stack(OREGON).names, "stop")

    world.clock.meanwhile = give_up
    code, out, err = world.up(given=(REGION, OREGON))
    assert code == 0, err
    assert out.count(": next is") == 1, "the first region refused less than half an hour ago"
    assert world.state(f"{world.base}-{OREGON}").phase == "stopped"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan.json", "--regions", "us-east-1"], "plan.json is a plan"),
        (["request.json", "--regions", "us-east-1", "--plan", "2"], "--plan is 2"),
        (["request.json", "--regions", "us-east-1,moon-base-1"], "moon-base-1"),
    ],
)
def test_what_cannot_begin_in_several_regions_says_why(world: World, arguments: list[str], says: str) -> None:
    (world.directory / "plan.json").write_text(sample_plan().to_json())
    (world.directory / "request.json").write_text(json.dumps({"model": "llama-2-7b"}))
    file, *more = arguments
    directory = str(world.directory)
    code, _, err = world.gpufleet("up", f"{directory}/{file}", *more, "--directory", directory, "--yes")
    assert code == 2 and says in err
    assert world.stacks == {}


def test_a_region_that_cannot_carry_out_its_plan_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(plan: FleetPlan, *arguments: Any, **options: Any) -> None:
        if plan.region == REGION:
            raise GpufleetError("the quota is 0")
        put_plan(plan, *arguments, **options)

    monkeypatch.setattr(deploying, "put_plan", refuse)
    code, out, err = world.up("--no-follow", given=(REGION, OREGON))
    assert code == 0, err
    assert f"{REGION} is left out: the quota is 0" in err and f"the run is stack {world.base}-{OREGON}'s" in out
    assert list(world.stacks) == [f"{world.base}-{OREGON}"]


def test_a_region_whose_stack_is_half_made_starts_no_node_beside_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stack: str, directory: Path, **_: Any) -> None:
        world.carry_out(stack, directory)
        if stack.endswith(REGION):
            raise GpufleetError("an alarm is refused")

    monkeypatch.setattr(deploying, "carry_out", fail)
    code, _, err = world.up(given=(REGION, OREGON))
    assert code == 0 and f"{REGION} is left out: an alarm is refused" in err
    assert not world.state(f"{world.base}-{REGION}").instances
    assert world.state(f"{world.base}-{OREGON}").instances
