"""Dollars of instances, of the stack and of its reservation, tick by tick."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import TICK
from bootstrap.controller.decide import decide
from bootstrap.controller.meter import KEEP_ENDED
from bootstrap.controller.meter import charge as charge_tick
from bootstrap.controller.observation import AutoScalingGroup, Machine, Observation, Tick
from tests.unit.bootstrap.controller.world import OWN, START, settings

HOUR = timedelta(hours=1)


def machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "instance_id": "i-1",
        "instance_type": "p4d.24xlarge",
        "lifecycle": "spot",
        "launched_at": START,
        "ended": False,
        "until": None,
    }
    return Machine(**{**values, **changes})


def ended(until: timedelta | None, **changes: Any) -> Machine:
    return machine(ended=True, until=None if until is None else START + until, **changes)


def group(created_at: datetime = START) -> AutoScalingGroup:
    return AutoScalingGroup(created_at=created_at, desired=0, min_size=0, max_size=3, members=())


def charge(
    config: ControllerSettings, state: ControllerState, machines: list[Machine], now: datetime, created_at: datetime
) -> ControllerState:
    seen = Observation(groups={OWN: group(created_at)}, machines=tuple(machines))
    return charge_tick(Tick(settings=config, seen=seen, now=now), state)


def metered(*ticks: tuple[timedelta, list[Machine]], config: ControllerSettings | None = None) -> ControllerState:
    """The state after ticks at these times, each of which saw these machines."""
    config = config or settings()
    times: Any = {"since": START, "run_started_at": START, "updated_at": START}
    state = ControllerState(run_id=config.run_id, job=config.job, phase="running", reason="", **times)
    for after, machines in ticks:
        state = replace(charge(config, state, machines, START + after, START), updated_at=START + after)
    return state


@pytest.mark.parametrize(
    ("ticks", "usd"),
    [
        pytest.param([(1, machine())], 10, id="from the launch, not from when it was first seen"),
        pytest.param([(1, machine(lifecycle="on-demand"))], 30, id="the price of the lifecycle"),
        pytest.param([(1, machine(lifecycle="capacity-block"))], 30, id="an unknown lifecycle is the dearest"),
        pytest.param([(1, machine(instance_type="p4de.24xlarge"))], 30, id="an unknown type is the dearest"),
        pytest.param([(1, ended(0.5 * HOUR))], 5, id="came and went between two ticks"),
        pytest.param([(1, ended(timedelta(seconds=5)))], 10 / 60, id="the shortest life is a minute"),
        pytest.param([(1, machine()), (2, ended(None, reclaimed=True))], 20, id="an end without a time is now"),
        pytest.param([(1, machine()), (1, machine())], 10, id="a tick that runs twice charges once"),
        pytest.param([(1, machine()), (0.5, machine()), (1, machine())], 10, id="a clock that steps back"),
    ],
)
def test_an_instance_costs_its_price_while_it_lives(ticks: list[tuple[float, Machine]], usd: float) -> None:
    assert metered(*((hours * HOUR, [seen]) for hours, seen in ticks)).spent_usd == pytest.approx(usd)


def test_spot_costs_the_markets_price_while_there_is_one() -> None:
    config = settings(volume_usd_per_node_hour=1.0)
    dear = machine(usd_per_hour=14.0)
    state = metered((HOUR, [dear]), (2 * HOUR, [machine(usd_per_hour=6.0)]), (3 * HOUR, [machine()]), config=config)
    assert state.spent_usd == pytest.approx(15 + 7 + 11)
    assert metered((HOUR, [dear]), config=config).usd_per_hour == pytest.approx(15)


def test_an_end_is_where_ec2_says_and_dollars_are_kept() -> None:
    state = metered((HOUR, [machine()]), (2 * HOUR, [ended(1.5 * HOUR)]), (4 * HOUR, [ended(1.5 * HOUR)]))
    assert (state.spent_usd, state.usd_per_hour) == pytest.approx((15, 0))
    assert state.instances["i-1"].ended_at == START + 1.5 * HOUR


def test_an_instance_that_disappeared_costs_the_tick_and_no_gap_when_it_reappears() -> None:
    gone = metered((HOUR, [machine()]), (HOUR + TICK, []))
    assert gone.spent_usd == pytest.approx(10 + 10 / 60)
    assert gone.instances["i-1"].ended_at == START + HOUR + TICK
    back = metered((HOUR, [machine()]), (3 * HOUR, []), (4 * HOUR, [machine()]))
    assert back.spent_usd == pytest.approx(40)
    assert back.instances["i-1"].ended_at is None


def test_nodes_that_no_tick_saw_in_an_outage_are_charged_and_not_kept() -> None:
    """Auto Scaling tells of them; a known node is kept, as its report counts."""
    gone = {"until": START + 3 * HOUR, "ended": True, "forgotten": True}
    seen = [machine(**gone), machine(instance_id="i-2", launched_at=START + 2.5 * HOUR, **gone)]
    state = metered((HOUR, [machine()]), (24 * HOUR, seen), (25 * HOUR, []))
    assert state.spent_usd == pytest.approx(30 + 5)
    assert state.instances.keys() == {"i-1"} and state.ended_usd == pytest.approx(5)


def test_a_node_of_another_lifecycle_than_the_plan_has_now_keeps_its_price() -> None:
    bought = machine(lifecycle="on-demand")
    spot_only = settings(prices={"spot": {"p4d.24xlarge": 10.0}})
    later = charge(spot_only, metered((HOUR, [bought])), [bought], START + 2 * HOUR, START)
    assert (later.spent_usd, later.usd_per_hour) == pytest.approx((60, 30))


def test_the_stack_and_its_unused_reservation_cost_too() -> None:
    config = settings(fixed_usd_per_hour=0.5, reserved_nodes=3, prices={"on-demand": {"p4d.24xlarge": 30.0}})
    used = [machine(instance_id=f"i-{number}", lifecycle="on-demand") for number in range(3)]
    for state in (metered((HOUR, []), config=config), metered((timedelta(0), used), (HOUR, used), config=config)):
        assert (state.spent_usd, state.usd_per_hour) == pytest.approx((0.5 + 3 * 30, 90.5))


def test_a_stack_costs_nothing_while_it_is_destroyed() -> None:
    config, month = settings(fixed_usd_per_hour=1.0), timedelta(days=30)
    after = charge(config, metered((HOUR, []), config=config), [], START + month + HOUR, START + month)
    assert after.spent_usd == pytest.approx(2)


def test_what_a_stack_spent_is_settled_for_the_next_and_counts_while_it_stands() -> None:
    config = settings(fixed_usd_per_hour=2.0)
    old = metered((HOUR, [machine()]), (2 * HOUR, [ended(1.5 * HOUR)]), config=config)
    assert old.spent_usd == pytest.approx(15 + 4)
    spend = old.settle(START + 3 * HOUR)
    assert spend.usd == pytest.approx(15 + 6) and spend.usd_per_hour == 2.0
    # A node that the last tick saw alive counts until then, and no longer.
    silent = metered((HOUR, [machine()]), config=config).settle(START + 3 * HOUR)
    assert silent.usd == pytest.approx(12 + 24) and silent.usd_per_hour == 2.0
    other = replace(spend, job="another job")
    new = replace(metered((HOUR, [machine()])), elsewhere={"old": spend, "other": other})
    later = START + 5 * HOUR
    charged = charge(settings(), new, [machine()], later, START)
    assert charged.spent_usd == pytest.approx(50 + spend.usd + 4)
    assert charged.usd_per_hour == pytest.approx(10 + 2)


def test_the_first_tick_charges_from_when_the_group_was_made() -> None:
    config = settings(fixed_usd_per_hour=60.0)
    seen = Observation(groups={OWN: group()})
    decision = decide(Tick(settings=config, seen=seen, now=START + timedelta(minutes=3)), None)
    assert decision.state.spent_usd == pytest.approx(3)


def test_long_ended_instances_are_folded_and_their_dollars_kept() -> None:
    state = metered((HOUR, [machine()]), (2 * HOUR, [ended(HOUR)]), (2 * HOUR + KEEP_ENDED, []))
    assert state.instances == {}
    assert state.spent_usd == state.ended_usd == pytest.approx(10)
