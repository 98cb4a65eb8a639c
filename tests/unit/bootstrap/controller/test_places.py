"""Places of a gang: where the next attempt goes, when nodes are bought on demand, what is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from bootstrap.contract.settings import Lifecycle, Place
from bootstrap.contract.state import ChosenPlace, read_state
from bootstrap.controller.actions import SetGroup
from bootstrap.controller.observation import FailedLaunch
from tests.unit.bootstrap.controller.world import MINUTE, PLACES, START, World, place, rotating, trained

SPOT = {name: one for name, one in PLACES.items() if one.purchase == "spot"}


def empty(*zones: str) -> dict[tuple[Lifecycle, str], int]:
    """No spot capacity in these zones."""
    return {("spot", f"subnet-{zone}"): 0 for zone in zones}


def where(world: World) -> str:
    assert world.known.place
    return world.known.place.name


def test_a_refused_gang_goes_to_the_best_other_place_within_two_ticks_and_pays_nothing() -> None:
    world = World(rotating(), rooms=empty("az1"))
    assert world.tick().actions == (SetGroup(desired=3),)
    assert where(world) == "spot p4d az1"
    world.advance(MINUTE)
    # The refusal is seen; no launch may be under way when the group moves.
    assert world.tick().actions == (SetGroup(desired=0),)
    assert "AWS refuses the others (AWS: no spot capacity): next is spot p4d az2, the best of 2" in world.known.reason
    world.advance(MINUTE)
    assert world.tick().actions == (SetGroup(desired=3, subnets="subnet-az2"),)
    assert "3 nodes asked for, attempt 1, in spot p4d az2: the best of 2 spot places: chance 50%" in world.known.reason
    world.run_until("running")
    assert {(node.subnet, node.usd_per_hour) for node in world.nodes.values()} == {("subnet-az2", 12.0)}
    assert world.known.pools["spot p4d az1"].empty_at_s == (START + MINUTE).timestamp()
    assert world.known.pools["spot p4d az2"].launched_at_s is not None
    assert world.known.usd_per_hour == 36.0
    assert read_state(world.known.to_text(), "the state") == world.known


def test_another_type_and_a_partial_gang() -> None:
    world = World(rotating(), rooms={**empty("az1"), ("spot", "subnet-az2"): 2})
    world.run_until("running")
    assert where(world) == "spot p4de az3"
    assert {world.nodes[key].instance_type for key in world.alive()} == {"p4de.24xlarge"}
    partial = [node for node in world.nodes.values() if node.subnet == "subnet-az2"]
    assert len(partial) == 2
    assert all(node.ended_at and node.ended_at - node.launched_at <= 3 * MINUTE for node in partial)
    assert world.known.spent_usd == pytest.approx(world.true_usd())


def test_back_off_only_when_all_have_refused_then_on_demand() -> None:
    world = World(rotating(), capacity={"spot": 0, "on-demand": 9, "capacity-block": 0})
    world.run(6)
    # The last place is asked on, free of charge.
    assert (world.phase, world.desired, world.known.next_attempt_at) == ("starting", 3, START + 10 * MINUTE)
    assert "all places worth a try have refused, the next attempt is at 12:10 UTC" in world.known.reason
    world.run_until("running")
    assert (where(world), world.known.attempts, world.known.on_demand, world.base) == ("on-demand p4d az2", 2, True, 3)
    assert "on demand, as no spot place gave all nodes in time" in world.known.reason
    assert world.now - START <= 25 * MINUTE
    assert world.known.spent_usd == pytest.approx(world.true_usd())


def test_capacity_that_comes_while_the_last_place_is_asked_on_is_taken() -> None:
    world = World(rotating(places=SPOT), rooms=empty("az1", "az2", "az3"))
    world.run(7)
    world.rooms = {}
    world.run_until("running")
    assert (where(world), world.known.attempts, world.known.next_attempt_at) == ("spot p4de az3", 1, None)


def test_a_reclaimed_gang_goes_elsewhere_and_comes_back_when_that_is_reclaimed() -> None:
    # At an equal price a place that was never asked would come before one that took nodes back an hour ago.
    dear = place("az3", "spot", 25.0, instance_type="p4de.24xlarge")
    world = trained(World(rotating(places={**PLACES, "spot p4de az3": dear})))
    for gone, following in (("az1", "spot p4d az2"), ("az2", "spot p4d az1")):
        world.run(40)
        world.rooms = empty(gone)
        for key in world.alive():
            world.interrupt(key)
        lost_at = world.now
        world.run_until("starting")
        assert where(world) == following
        assert world.now - lost_at <= 3 * MINUTE
        world.run_until("running")
    assert [world.known.pools[f"spot p4d {zone}"].reclaims for zone in ("az1", "az2")] == [1, 1]
    assert world.known.pools["spot p4d az1"].returns == 1


def test_a_place_that_takes_nodes_back_but_replaces_them_is_remembered() -> None:
    world = trained(World(rotating()))
    world.run(5)
    world.interrupt(world.in_service()[0])
    world.run(15)
    assert (world.phase, where(world)) == ("running", "spot p4d az1")
    record = world.known.pools["spot p4d az1"]
    assert (record.reclaims, record.returns) == (1, 1)


@pytest.mark.parametrize(
    ("deadline_hours", "on_demand_hours", "expected"),
    [
        # At p95 spot takes 20 h.
        (40.0, 16.0, "on-demand p4d az2: on demand, as no spot place gave all nodes in time"),
        (20.0, 16.0, "on-demand p4d az2: on demand, as spot would miss the deadline at p95: 20.0 h are left"),
    ],
)
def test_the_deadline_brings_on_demand_nodes_forward(
    deadline_hours: float, on_demand_hours: float, expected: str
) -> None:
    places = {**PLACES, "on-demand p4d az2": place("az2", "on-demand", 30.0, hours=on_demand_hours)}
    config = rotating(deadline_hours=deadline_hours, places=places)
    world = World(config, capacity={"spot": 0, "on-demand": 9, "capacity-block": 0})
    world.run_until("running")
    assert expected in world.known.reason
    assert (world.known.attempts > 1) is (deadline_hours == 40)


def test_progress_leaves_time_for_spot_again() -> None:
    world = trained(World(rotating(deadline_hours=30.0)))
    world.run(15 * 60)
    assert world.known.progress == pytest.approx(0.75, abs=0.01)
    world.rooms = empty("az1")
    for key in world.alive():
        world.interrupt(key)
    world.run_until("starting")
    # 15 h are left, and a quarter of 20 h to do.
    assert where(world) == "spot p4d az2"


def test_places_that_the_ceiling_cannot_pay_at_p95_are_not_used() -> None:
    world = World(rotating(ceiling_usd=800.0), capacity={"spot": 0, "on-demand": 9, "capacity-block": 0})
    world.run_until("failed")
    chosen = {decision.state.place.name for decision in world.decisions if decision.state.place}
    # 20 h of three nodes: 600, 720, 840 USD; 16 h on demand: 1440.
    assert chosen == {"spot p4d az1", "spot p4d az2"}
    assert not world.nodes


def test_the_plans_own_on_demand_place_comes_first_again_and_spot_only_where_it_saves() -> None:
    places: Mapping[str, Place] = {
        "own": place("az1", "on-demand", 30.0, hours=16),
        "dear spot": place("az2", "spot", 29.0),
        "spot": place("az3", "spot", 12.0),
        "other": place("az2", "on-demand", 30.0, hours=16),
    }
    config = rotating(places=dict(places))
    rooms: dict[tuple[Lifecycle, str], int] = {("on-demand", "subnet-az1"): 0, **empty("az3")}
    world = World(config, base=3, rooms=rooms)
    world.run_until("running")
    assert (where(world), world.known.on_demand) == ("other", False)
    tried = [decision.state.place.name for decision in world.decisions if decision.state.place]
    assert list(dict.fromkeys(tried)) == ["own", "spot", "other"]
    world.rooms = {}
    world.ask("stop")
    world.run_until("stopped")
    world.advance(MINUTE)
    world.ask("run")
    world.run_until("running")
    assert where(world) == "own"


def test_a_late_refusal_of_the_place_before_is_not_the_new_places() -> None:
    world = World(rotating(), rooms=empty("az1"))
    world.run(3)
    assert where(world) == "spot p4d az2"
    began = world.now - 3 * MINUTE
    world.failed = [FailedLaunch(at=world.now, message="late", no_capacity=True, began_at=began)]
    world.tick()
    assert (world.phase, world.known.refused_since, where(world)) == ("starting", None, "spot p4d az2")


def test_a_plan_without_the_chosen_place_and_an_old_state_start_in_the_own_place() -> None:
    world = World(rotating(), rooms=empty("az1"))
    world.run(2)
    assert world.known.next_place == ChosenPlace(name="spot p4d az2", why=world.known.next_place.why)  # type: ignore[union-attr]
    world.config = replace(world.config, places={name: one for name, one in PLACES.items() if "az2" not in name})
    world.run(1)
    assert where(world) in world.config.places
    # A state of before places: running nodes stay, whatever the settings say now.
    old = trained(World(replace(world.config, places={})))
    old.config = rotating()
    old.run(5)
    assert (old.phase, old.known.place, old.base, len(old.in_service())) == ("running", None, 0, 3)
    # On demand, `pulumi up` has made the mixed instances policy with all nodes in its base, which must stay.
    demand = {"own": place("az1", "on-demand", 30.0), "other": place("az2", "on-demand", 30.0)}
    old.config, old.base = rotating(places=demand), 3
    assert old.tick().actions == ()
    old.config, old.base = rotating(), 0
    for key in old.alive():
        old.interrupt(key)
    old.capacity["spot"] = 0
    old.run_until("starting")
    assert where(old) == "spot p4d az1"


def test_a_gang_goes_on_where_it_is_when_the_plan_has_no_alternates_any_more() -> None:
    world = World(rotating(), rooms=empty("az1"))
    trained(world)
    world.config = replace(world.config, places={}, on_demand_base=1)
    assert world.tick().actions == (SetGroup(on_demand_base=1),)
    world.run(5)
    assert (world.phase, world.subnets) == ("running", "subnet-az2")


def test_nodes_that_a_schedule_starts_are_where_the_group_was_left() -> None:
    world = World(rotating(scheduled=True), rooms=empty("az1"))
    world.run(2)
    world.desired = 3
    world.run_until("running")
    assert where(world) == "spot p4d az2"
    world.desired = 0
    world.run_until("paused")
    world.rooms = {}
    world.run(int(timedelta(hours=1) / MINUTE))
    world.desired = 3
    world.run_until("running")
    assert where(world) == "spot p4d az2"
    assert {world.nodes[key].subnet for key in world.alive()} == {"subnet-az2"}


def test_scores_order_places_of_equal_cost_that_nothing_is_known_of() -> None:
    equal = {name: replace(one, usd_per_hour=10.0, usd_p95=600.0) for name, one in SPOT.items()}
    config = rotating(places={**equal, "on-demand p4d az2": PLACES["on-demand p4d az2"]})
    for scores, first, second in (
        ({}, "spot p4d az1", "spot p4d az2"),
        ({"use1-az1": 3, "use1-az2": 3, "use1-az3": 3}, "spot p4d az1", "spot p4d az2"),
        ({"use1-az1": 5, "use1-az2": 1, "use1-az3": 3}, "spot p4d az1", "spot p4de az3"),
        ({"use1-az3": 9, "use1-az2": 8}, "spot p4de az3", "spot p4d az2"),
    ):
        world = World(config, rooms=empty("az1", "az2", "az3"), scores=scores)
        world.tick()
        assert where(world) == first
        world.advance(MINUTE)
        world.tick()
        assert world.known.next_place and world.known.next_place.name == second
    # A dearer place is no rival, whatever its score, and what the run has seen counts more.
    world = World(rotating(), scores={"use1-az3": 9, "use1-az2": 8})
    world.tick()
    assert where(world) == "spot p4d az1"
    assert "placement score" not in world.known.reason


def test_an_on_demand_plan_stays_where_it_is_whatever_the_scores() -> None:
    own = {"on-demand p4d az1": place("az1", "on-demand", 10.0)}
    world = World(rotating(places={**own, **{n: replace(one, usd_per_hour=10.0) for n, one in SPOT.items()}}), base=0)
    world.scores = {"use1-az2": 9}
    world.tick()
    assert where(world) == "on-demand p4d az1"
