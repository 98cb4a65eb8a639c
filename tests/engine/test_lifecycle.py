"""The repository's program, carried out by the real engine and judged by the real AWS provider.

Most of a deployment's time is the provider's own waiting (25 seconds for each queue and queue policy), so the three
purchase options run at the same time, each with an emulated AWS of its own; in one test, so that no way of spreading
tests over workers starts them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from optimizer.plan import FleetPlan
from tests.engine import facts
from tests.engine.deployment import Deployment, Tools, deployment, write_project
from tests.engine.inventory import inventory, left_behind
from tests.engine.pulumi_cli import Run
from tests.plans import sample_plan

pytestmark = [
    pytest.mark.engine,
    # Above the longest scenario on a busy machine; each run of the CLI has its own limit.
    pytest.mark.timeout(900),
]

GROUP = "aws:autoscaling/group:Group"


def spot(tools: Tools, scratch: Path) -> None:
    """Everything a fleet goes through: preview, up, up, refresh, a third node, up, destroy."""
    with fleet(tools, scratch, "spot", sample_plan()) as deployed:
        stack, empty = deployed.stack, inventory(deployed.aws)
        planned = stack.preview()
        assert left_behind(empty, inventory(deployed.aws)) == {}, "a preview creates nothing"
        created = stack.up()
        assert created.changed() == planned.changed(), "the preview shows what up does"
        assert list(created.changed()) == ["create"]
        facts.check(deployed, sample_plan())
        facts.names_agree_with_pulumi_aws(tools.aws_provider, created.types())
        assert_settled(stack.up)
        assert_settled(stack.refresh)

        before = facts.group(deployed)
        deployed.set_plan(sample_plan(**THREE_NODES))
        updated = stack.up()
        assert set(updated.changed()) == {"update"}, updated.output
        assert any(GROUP in name for name in updated.changed()["update"])
        after = facts.group(deployed)
        assert after["AutoScalingGroupARN"] == before["AutoScalingGroupARN"], "the same group, not a new one"
        assert (after["MinSize"], after["MaxSize"], after["DesiredCapacity"]) == (3, 3, 3)
        running = {item["InstanceId"] for item in before["Instances"]}
        assert running < {item["InstanceId"] for item in after["Instances"]}, "no node was replaced"
        facts.check(deployed, sample_plan(**THREE_NODES))
        assert_settled(stack.up)

        assert all(item["ProtectedFromScaleIn"] for item in after["Instances"])
        stack.destroy()
        assert left_behind(empty, inventory(deployed.aws)) == {}


def short(option: str) -> Callable[[Tools, Path], None]:
    """The same for another purchase option, without the update."""

    def scenario(tools: Tools, scratch: Path) -> None:
        plan = sample_plan(purchase={"option": option, "on_demand_base": 0})
        with fleet(tools, scratch, option, plan) as deployed:
            empty = inventory(deployed.aws)
            assert list(deployed.stack.up().changed()) == ["create"]
            facts.check(deployed, plan)
            assert_settled(deployed.stack.up)
            assert_settled(deployed.stack.refresh)
            deployed.stack.destroy()
            assert left_behind(empty, inventory(deployed.aws)) == {}

    return scenario


SCENARIOS: dict[str, Callable[[Tools, Path], None]] = {
    "spot": spot,
    "on-demand": short("on-demand"),
    "reserved": short("reserved"),
}
THREE_NODES = {
    "node_count": 3,
    "parallelism": {"data": 24, "micro_batch": 4, "grad_accum": 1},
    "job": {"global_batch": 96, "steps": 2667},
    "step_time_s": 6.0,
}


def test_a_fleet_comes_stays_and_goes(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        runs = {
            option: pool.submit(scenario, tools, tmp_path_factory.mktemp(option))
            for option, scenario in SCENARIOS.items()
        }
    failures = []
    for option, run in runs.items():
        failure = run.exception()
        if failure is not None:
            failure.add_note(f"purchase option: {option}")
            failures.append(failure)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {len(runs)} fleets failed", failures)


@contextmanager
def fleet(tools: Tools, scratch: Path, name: str, plan: FleetPlan) -> Iterator[Deployment]:
    """A stack of the repository's program, with ``plan`` set."""
    write_project(scratch, name)
    with deployment(tools, scratch, name) as deployed:
        deployed.set_plan(plan)
        yield deployed


def assert_settled(run: Callable[..., Run]) -> None:
    """``up`` or ``refresh`` finds nothing to do; the engine itself fails the run otherwise."""
    done = run(expect_no_changes=True)
    assert done.changed() == {}, done.output
