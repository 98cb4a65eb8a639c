"""Places of a gang: where the next attempt goes, when nodes are bought on demand, what is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bootstrap.contract.codec import to_text
from bootstrap.contract.settings import Lifecycle, Place
from bootstrap.contract.state import read_state
from bootstrap.contract.timings import ASK_AGAIN
from tests.unit.bootstrap.controller.world import MINUTE, OWN, PLACES, START, World, place, rotating, trained

SPOT = {name: one for name, one in PLACES.items() if one.purchase == "spot"}


def empty(*zones: str) -> dict[tuple[Lifecycle, str], int]:
    """No spot capacity in these zones."""
    return {("spot", f"subnet-{zone}"): 0 for zone in zones}


def where(world: World) -> str:
    assert world.known.place
    return world.known.place.name


def test_a_refused_gang_goes_to_the_best_other_place_in_the_same_tick_and_pays_nothing() -> None:
    world = World(rotating(), rooms=empty("az1"))
    world.tick()
    assert [request.place for request, _ in world.asked] == ["spot p4d az1", "spot p4d az2"]
    assert "3 nodes asked for, attempt 1, in spot p4d az2: the best of 2 spot places: chance 50%" in world.known.reason
    assert world.sizes == {"spot p4d az2": 3}
    world.run_until("running")
    assert {(node.subnet, node.usd_per_hour) for node in world.nodes.values()} == {("subnet-az2", 12.0)}
    assert world.known.pools["spot p4d az1"].empty_at_s == START.timestamp()
    assert world.known.pools["spot p4d az2"].launched_at_s is not None
    assert world.known.usd_per_hour == 36.0
    answers = {name: (answer.answer, answer.usd_per_hour) for name, answer in world.known.answers.items()}
    assert answers["spot p4d az1"] == ("InsufficientInstanceCapacity: no spot capacity", 10.0)
    assert answers["spot p4d az2"] == ("3 nodes came", 12.0)
    assert read_state(to_text(world.known), "the state") == world.known


# EC2 words it so: https://github.com/aws/eks-anywhere-build-tooling/pull/772
NAMING = (
    "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested (us-east-1a). "
    "Our system will be working on provisioning additional capacity. You can currently get p4d.24xlarge capacity by "
    "not specifying an Availability Zone in your request or choosing {}."
)


@pytest.mark.parametrize(
    ("message", "second"),
    [
        (NAMING.format("us-east-1b, us-east-1c"), "az3"),
        (NAMING.format("us-east-1c"), "az3"),
        (NAMING.format("us-east-1d, us-east-1f"), "az2"),
        (NAMING.format("us-east-1c").replace("p4d", "p4de"), "az2"),
        ("There is no Spot capacity available that matches your request.", "az2"),
    ],
)
@pytest.mark.parametrize("purchase", ["spot", "on-demand"])
def test_a_place_in_a_zone_that_a_refusal_names_is_next(purchase: Lifecycle, message: str, second: str) -> None:
    zones = {"az1": 10.0, "az2": 10.0, "az3": 12.0 if purchase == "spot" else 10.0}
    if "us-east-1b," in message:
        # The first named zone has no place.
        del zones["az2"]
    places = {zone: place(number, zone, purchase, usd) for number, (zone, usd) in enumerate(zones.items(), 1)}
    dear = place(4, "az1", "on-demand", 30.0)
    gone: dict[tuple[Lifecycle, str], int] = {(purchase, f"subnet-{zone}"): 0 for zone in zones}
    gone["on-demand", "subnet-az1"] = 0
    world = World(rotating(places={**places, "dear": dear}), rooms=gone, message=message)
    world.tick()
    tried = [request.place for request, _ in world.asked if request.place != "dear"]
    assert tried == ["az1", second, *sorted(zones.keys() - {"az1", second})]
    # The next round knows nothing of the old names.
    world.asked.clear()
    world.message = "no capacity"
    world.advance(ASK_AGAIN)
    world.tick()
    assert [request.place for request, _ in world.asked if request.place != "dear"] == sorted(zones)


def test_back_off_only_when_all_have_refused_then_on_demand() -> None:
    world = World(rotating(), capacity={"spot": 0, "on-demand": 9, "capacity-block": 0})
    world.tick()
    assert [request.place for request, _ in world.asked] == list(SPOT)
    assert (world.phase, world.desired, world.known.next_attempt_at) == ("waiting", 0, START + ASK_AGAIN)
    world.run_until("running")
    assert (where(world), world.known.on_demand) == ("on-demand p4d az2", True)
    assert "on demand, as no spot place gave all nodes in time" in world.known.reason
    assert world.now - START <= 20 * MINUTE
    assert world.known.spent_usd == pytest.approx(world.true_usd())


def test_a_reclaimed_gang_goes_elsewhere_and_comes_back_when_that_is_reclaimed() -> None:
    # At an equal price a place that was never asked would come before one that took nodes back an hour ago.
    dear = place(3, "az3", "spot", 25.0, instance_type="p4de.24xlarge")
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


@pytest.mark.parametrize(("slower", "why"), [(1, "the cheapest spot place"), (9, "this one is the fastest")])
def test_a_late_spot_place_is_not_chosen_because_it_is_cheap(slower: int, why: str) -> None:
    """Nor where all are late, and nothing can be bought on demand."""
    fast, slow = PLACES["spot p4d az2"], PLACES["spot p4de az3"]
    places = {
        OWN: PLACES[OWN],
        "fast": replace(fast, usd_per_hour=14.0, hours_p95=10.0 * slower),
        "slow": replace(slow, usd_per_hour=12.0, hours_p95=40.0 * slower),
    }
    world = World(rotating(places=places, deadline_hours=24.0), rooms=empty("az1"))
    world.run_until("running")
    assert world.known.place and world.known.place.name == "fast" and why in world.known.place.why


@pytest.mark.parametrize(
    ("deadline_hours", "expected"),
    [
        # At p95 spot takes 20 h.
        (40.0, "on-demand p4d az2: on demand, as no spot place gave all nodes in time"),
        (20.0, "on-demand p4d az2: on demand, as spot would miss the deadline at p95: 19.9 h are left"),
    ],
)
def test_the_deadline_brings_on_demand_nodes_forward(deadline_hours: float, expected: str) -> None:
    world = World(rotating(deadline_hours=deadline_hours), capacity={"spot": 0, "on-demand": 9, "capacity-block": 0})
    world.run_until("running")
    assert expected in world.known.reason
    assert world.known.attempts > 1


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
    world.run(60)
    chosen = {request.place for request, _ in world.asked}
    # 20 h of three nodes: 600, 720, 840 USD; 16 h on demand: 1440.
    assert chosen == {"spot p4d az1", "spot p4d az2"}
    assert not world.nodes


def test_the_plans_own_on_demand_place_comes_first_again_and_spot_only_where_it_saves() -> None:
    places: Mapping[str, Place] = {
        "own": place(1, "az1", "on-demand", 30.0, hours=16),
        "dear spot": place(2, "az2", "spot", 29.0),
        "spot": place(3, "az3", "spot", 12.0),
        "other": place(4, "az2", "on-demand", 30.0, hours=16),
    }
    config = rotating(places=dict(places))
    rooms: dict[tuple[Lifecycle, str], int] = {("on-demand", "subnet-az1"): 0, **empty("az3")}
    world = World(config, rooms=rooms)
    world.run_until("running")
    assert (where(world), world.known.on_demand) == ("other", False)
    tried = [request.place for request, _ in world.asked]
    assert list(dict.fromkeys(tried)) == ["own", "spot", "other"]
    world.rooms = {}
    world.ask("stop")
    world.run_until("stopped")
    world.advance(MINUTE)
    world.ask("run")
    world.run_until("running")
    assert where(world) == "own"


def test_a_plan_without_the_gangs_place_gives_its_nodes_up_and_starts_in_its_own() -> None:
    world = trained(World(rotating(), rooms=empty("az1")))
    assert where(world) == "spot p4d az2"
    world.rooms = {}
    world.config = replace(world.config, places={name: one for name, one in PLACES.items() if "az2" not in name})
    # `pulumi up` deletes the group with its nodes.
    for key in world.alive():
        world.vanish(key)
    world.run(15)
    assert (world.phase, {world.nodes[key].place for key in world.in_service()}) == ("running", {"spot p4d az1"})
    # Or it gives a place another group.
    others = {name: replace(one, number=5 - one.number) for name, one in PLACES.items()}
    world.config = replace(world.config, places=others)
    world.run_until("draining")
    assert "`pulumi up` changed it" in world.known.reason
    world.run_until("running")
