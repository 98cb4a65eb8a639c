from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import LEASE, LEASE_ACTS, TICK
from bootstrap.controller import decide as decide_module
from bootstrap.controller.decide import decide
from bootstrap.controller.meter import KEEP_ENDED, charge
from bootstrap.controller.observation import AutoScalingGroup, Machine, Observation
from tests.unit.bootstrap.controller.world import START, settings

HOUR = timedelta(hours=1)


def machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "instance_id": "i-1",
        "instance_type": "p4d.24xlarge",
        "lifecycle": "spot",
        "launched_at": START,
        "running": True,
        "ended": False,
        "until": None,
    }
    return Machine(**{**values, **changes})


def ended(until: timedelta | None, **changes: Any) -> Machine:
    return machine(running=False, ended=True, until=None if until is None else START + until, **changes)


def group(**changes: Any) -> AutoScalingGroup:
    values: dict[str, Any] = {"created_at": START, "desired": 0, "min_size": 0, "max_size": 3, "on_demand_base": 0}
    return AutoScalingGroup(**{**values, "members": (), **changes})


def fresh(config: Any = None) -> ControllerState:
    config = config or settings()
    return ControllerState(
        run_id=config.run_id,
        job=config.job,
        phase="running",
        reason="",
        since=START,
        run_started_at=START,
        updated_at=START,
    )


def metered(*ticks: tuple[timedelta, list[Machine]], config: Any = None) -> ControllerState:
    """The state after ticks at these times, each of which saw these machines."""
    config = config or settings()
    state = fresh(config)
    for after, machines in ticks:
        state = replace(charge(config, state, machines, group(), START + after), updated_at=START + after)
    return state


def test_an_instance_costs_from_its_launch_not_from_when_it_was_first_seen() -> None:
    assert metered((HOUR, [machine()])).spent_usd == pytest.approx(10)


@pytest.mark.parametrize(("lifecycle", "usd"), [("spot", 10), ("on-demand", 30), ("capacity-block", 30)])
def test_its_price_is_that_of_its_lifecycle_and_the_dearest_where_that_is_unknown(lifecycle: Any, usd: float) -> None:
    assert metered((HOUR, [machine(lifecycle=lifecycle)])).spent_usd == pytest.approx(usd)


def test_spot_costs_what_the_market_says_while_it_says_so() -> None:
    config = settings(volume_usd_per_node_hour=1.0)
    dear = machine(usd_per_hour=14.0)
    state = metered((HOUR, [dear]), (2 * HOUR, [machine(usd_per_hour=6.0)]), (3 * HOUR, [machine()]), config=config)
    assert state.spent_usd == pytest.approx(15 + 7 + 11)
    assert metered((HOUR, [dear]), config=config).usd_per_hour == pytest.approx(15)


def test_a_type_without_a_price_costs_the_dearest_known() -> None:
    assert metered((HOUR, [machine(instance_type="p4de.24xlarge")])).spent_usd == pytest.approx(30)


def test_an_end_is_where_ec2_says_and_dollars_are_kept() -> None:
    state = metered((HOUR, [machine()]), (2 * HOUR, [ended(1.5 * HOUR)]), (4 * HOUR, [ended(1.5 * HOUR)]))
    assert state.spent_usd == pytest.approx(15)
    assert state.instances["i-1"].ended_at == START + 1.5 * HOUR
    assert state.usd_per_hour == 0


def test_an_end_without_a_time_is_now_as_the_dearer_one() -> None:
    assert metered((HOUR, [machine()]), (2 * HOUR, [ended(None, reclaimed=True)])).spent_usd == pytest.approx(20)


def test_an_instance_that_came_and_went_between_two_ticks_is_charged() -> None:
    assert metered((HOUR, [ended(0.5 * HOUR)])).spent_usd == pytest.approx(5)


def test_the_shortest_life_is_a_minute() -> None:
    assert metered((HOUR, [ended(timedelta(seconds=5))])).spent_usd == pytest.approx(10 / 60)


def test_one_that_disappeared_is_charged_a_tick_more_and_no_gap_is_left_when_it_reappears() -> None:
    gone = metered((HOUR, [machine()]), (HOUR + 3 * TICK, []))
    assert gone.spent_usd == pytest.approx(10 + 10 / 60)
    assert gone.instances["i-1"].ended_at == START + HOUR + TICK
    back = metered((HOUR, [machine()]), (3 * HOUR, []), (4 * HOUR, [machine()]))
    assert back.spent_usd == pytest.approx(40)
    assert back.instances["i-1"].ended_at is None


def test_one_that_ended_itself_while_the_controller_was_silent_is_charged_to_its_lease() -> None:
    gone = metered((HOUR, [machine()]), (24 * HOUR, []))
    drained = timedelta(seconds=settings().drain_s)
    assert gone.instances["i-1"].ended_at == START + HOUR + LEASE + LEASE_ACTS + drained
    # The old group was deleted with its nodes.
    state = metered((HOUR, [machine()]))
    anew = charge(settings(), state, [], group(created_at=START + 20 * HOUR), START + 24 * HOUR)
    assert anew.instances["i-1"].ended_at == START + HOUR + TICK


def test_the_lease_is_the_nodes_own() -> None:
    folder = Path(decide_module.__file__).parents[1]
    (seconds,) = re.findall(r"LEASE_S:=(\d+)", (folder / "lib.sh").read_text())
    assert timedelta(seconds=int(seconds)) == LEASE
    timer = (folder / "gpufleet-lease.timer").read_text()
    # At once, too: a node that fails within five minutes is replaced for as long as nobody counts.
    assert "\nOnActiveSec=0\n" in timer
    (minutes,) = re.findall(r"OnUnitActiveSec=(\d+)min", timer)
    assert timedelta(minutes=int(minutes)) < LEASE_ACTS


def test_a_tick_that_runs_twice_charges_once() -> None:
    assert metered((HOUR, [machine()]), (HOUR, [machine()])).spent_usd == pytest.approx(10)
    # Nor does a clock that stepped back give anything back.
    assert metered((HOUR, [machine()]), (0.5 * HOUR, [machine()]), (HOUR, [machine()])).spent_usd == pytest.approx(10)


def test_a_price_that_changes_holds_from_then_on() -> None:
    dearer = settings(prices={"spot": {"p4d.24xlarge": 20.0}})
    state = metered((HOUR, [machine()]))
    assert charge(dearer, state, [machine()], group(), START + 2 * HOUR).spent_usd == pytest.approx(30)


def test_a_node_that_was_bought_another_way_than_the_plan_buys_now_keeps_its_price() -> None:
    bought = machine(lifecycle="on-demand")
    state = metered((HOUR, [bought]))
    spot_only = settings(prices={"spot": {"p4d.24xlarge": 10.0}})
    later = charge(spot_only, state, [bought], group(), START + 2 * HOUR)
    assert later.spent_usd == pytest.approx(60)
    assert later.usd_per_hour == pytest.approx(30)


def test_a_stopped_node_of_a_warm_pool_costs_its_volume_alone() -> None:
    config = settings(volume_usd_per_node_hour=1.0)
    stopped = machine(running=False, until=START + HOUR)
    again = machine(launched_at=START + 5 * HOUR)
    assert metered((HOUR, [machine()]), config=config).spent_usd == pytest.approx(11)
    assert metered((HOUR, [machine()]), (4 * HOUR, [stopped]), config=config).spent_usd == pytest.approx(14)
    assert metered((4 * HOUR, [stopped]), config=config).spent_usd == pytest.approx(14)
    assert metered((4 * HOUR, [stopped]), (6 * HOUR, [again]), config=config).spent_usd == pytest.approx(26)
    assert metered((4 * HOUR, [stopped]), config=config).usd_per_hour == 1


def test_the_stack_and_its_unused_reservation_cost_too() -> None:
    config = settings(fixed_usd_per_hour=0.5, reserved_nodes=3, prices={"on-demand": {"p4d.24xlarge": 30.0}})
    idle = metered((HOUR, []), config=config)
    assert idle.spent_usd == pytest.approx(0.5 + 3 * 30)
    assert idle.usd_per_hour == pytest.approx(90.5)
    used = [machine(instance_id=f"i-{number}", lifecycle="on-demand") for number in range(3)]
    running = metered((timedelta(0), used), (HOUR, used), config=config)
    assert running.spent_usd == pytest.approx(90.5)
    assert running.usd_per_hour == pytest.approx(90.5)


def test_a_stack_that_was_destroyed_cost_nothing_meanwhile() -> None:
    config = settings(fixed_usd_per_hour=1.0)
    state = metered((HOUR, []), config=config)
    later = group(created_at=START + timedelta(days=30))
    after = charge(config, state, [], later, START + timedelta(days=30) + HOUR)
    assert after.spent_usd == pytest.approx(2)


def test_the_first_tick_charges_from_when_the_group_was_made() -> None:
    config = settings(fixed_usd_per_hour=60.0)
    decision = decide(config, None, Observation(group=group()), START + timedelta(minutes=3))
    assert decision.state.spent_usd == pytest.approx(3)


def test_long_ended_instances_are_folded_and_their_dollars_kept() -> None:
    state = metered((HOUR, [machine()]), (2 * HOUR, [ended(HOUR)]), (2 * HOUR + KEEP_ENDED, []))
    assert state.instances == {}
    assert state.spent_usd == state.ended_usd == pytest.approx(10)
