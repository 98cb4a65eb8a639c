"""Capacity events of the stack's pools: launched, refused, taken back, lived, empty."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from bootstrap.contract.capacity import PoolEvents, PoolName
from tests.unit.bootstrap.controller.world import MINUTE, START, World, rotating, scarce, settings, trained

OWN = "us-east-1/use1-az1/p4d.24xlarge/spot"


def test_a_pools_name_is_read_back_and_another_text_refused() -> None:
    assert str(PoolName.parse(OWN)) == OWN
    for text in ("us-east-1/use1-az1/p4d.24xlarge", "us-east-1//p4d.24xlarge/spot"):
        with pytest.raises(ValueError, match="is no pool: region/zone_id"):
            PoolName.parse(text)


def test_nodes_are_counted_where_they_ran_over_a_reclaim_and_its_drought() -> None:
    world = trained(World(settings()))
    # The tick that asks for them comes a minute before their launch.
    world.run(60)
    lived = world.known.capacity[OWN]
    assert (lived.asked, lived.launched, lived.refused, lived.reclaimed) == (3, 3, 0, 0)
    assert lived.node_hours == pytest.approx(3 * lived.hours)
    first = world.nodes[min(world.nodes)].launched_at
    assert lived.hours == pytest.approx((world.known.updated_at - first).total_seconds() / 3600)
    # Two go in one minute, and the third two minutes later: one reclaim of three nodes.
    world.capacity = scarce(0)
    keys = world.in_service()
    world.interrupt(keys[0])
    world.interrupt(keys[1], notice=False)
    world.run(2)
    world.interrupt(keys[2])
    world.run(10)
    gone = world.known.capacity[OWN]
    assert (gone.reclaims, gone.reclaimed, gone.returns) == (1, 3, 0)
    # Replacements are asked for each minute, and the whole gang every five.
    assert gone.refused >= 3 and gone.empty_since and gone.empty_at and gone.empty_at > gone.empty_since
    world.capacity = scarce(9)
    world.run(6)
    back = world.known.capacity[OWN]
    assert (back.launched, back.returns, back.empty_since) == (6, 1, None)
    assert back.empty_hours == pytest.approx((gone.empty_at - gone.empty_since).total_seconds() / 3600, abs=4 / 60)
    assert world.known.capacity.keys() == {OWN}


def test_the_next_reclaim_counts_and_a_drought_that_nobody_watched_has_no_end() -> None:
    world = trained(World(settings()))
    world.run(5)
    world.interrupt(world.in_service()[0])
    world.run(10)
    world.interrupt(world.in_service()[0])
    world.run(10)
    events = world.known.capacity[OWN]
    assert (events.reclaims, events.reclaimed, events.returns) == (2, 2, 2)
    world.capacity = scarce(0)
    world.interrupt(world.in_service()[0])
    world.run(2)
    before = world.known.capacity[OWN]
    # A person stops the run for a week; the pool's state in that time is unknown.
    world.ask("stop")
    world.run(10)
    world.advance(timedelta(days=7))
    world.capacity = scarce(9)
    world.ask("run")
    world.run(10)
    events = world.known.capacity[OWN]
    assert events.launched > before.launched
    assert events.returns == before.returns
    assert events.empty_hours - before.empty_hours < 0.2


def test_each_place_has_its_own_events_and_a_quota_is_no_pools() -> None:
    world = World(rotating(), rooms={("spot", "subnet-az1"): 0})
    world.run_until("running")
    pools = world.known.capacity
    assert pools[OWN].refused > 0 and pools[OWN].launched == 0
    (other,) = pools.keys() - {OWN}
    assert pools[other].launched == 3 and PoolName.parse(other).zone_id in ("use1-az2", "use1-az3")
    world.code, world.rooms = "VcpuLimitExceeded", {("spot", "subnet-az1"): 0, ("spot", "subnet-az2"): 2}
    world.interrupt(world.in_service()[0])
    world.run(3)
    assert world.known.failed_launches > 1
    assert sum(events.refused for events in world.known.capacity.values()) == pools[OWN].refused


def test_pools_of_unknown_zones_are_left_out_and_workers_come_alone() -> None:
    world = World(replace(settings(), zones={}))
    world.run(30)
    assert world.known.capacity == {}
    world = World(settings(mode="workers", min_nodes=1), sizes={"spot p4d az1": 2})
    world.run(30)
    assert {events.asked for events in world.known.capacity.values()} == {1}


def test_events_of_a_first_tick_have_its_time() -> None:
    world = World(settings(), sizes={"spot p4d az1": 3}, now=START + MINUTE)
    world.advance(MINUTE)
    world.tick()
    events = world.known.capacity[OWN]
    assert events == PoolEvents(first_at=world.now, last_at=world.now, asked=3, launched=3)
