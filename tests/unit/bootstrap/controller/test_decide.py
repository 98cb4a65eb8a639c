from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from bootstrap.contract.ending import GiveBack
from bootstrap.contract.settings import OpeningHours
from bootstrap.contract.shared_ceiling import SharedCeiling, StackRow
from bootstrap.contract.timings import ASK_AGAIN, ENDING, LEASE, REFUSED_REPLACEMENT
from bootstrap.controller.actions import GroupAction
from bootstrap.controller.decide import decide
from bootstrap.controller.ends import over_budget
from bootstrap.controller.observation import Tick
from bootstrap.controller.phases import RETRY_WAITS
from tests.unit.bootstrap.controller.world import (
    MINUTE,
    OWN,
    PRICES,
    START,
    World,
    place,
    scarce,
    settings,
    trained,
    union,
)


def test_a_gang_whose_nodes_never_serve_has_failed_after_growing_waits() -> None:
    world = World(settings(), boot=timedelta(hours=2))
    world.run_until("failed")
    begun = sorted({decision.state.since for decision in world.decisions if decision.state.phase == "starting"})
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert len(begun) == len(RETRY_WAITS) + 1
    assert gaps == sorted(gaps)
    assert world.known.unfit_nodes == 0, "they were healthy as far as anybody knows"
    assert "gpufleet resume" in world.known.reason and not world.alive()
    world.run(120)
    assert (world.phase, world.desired) == ("failed", 0)


def test_an_error_that_is_no_lack_of_capacity_fails_the_run_in_the_end() -> None:
    world = World(settings(), capacity=scarce(0), code="InvalidAMIID.NotFound")
    world.run_until("failed")
    assert len(world.asked) == len(RETRY_WAITS) + 1
    assert "InvalidAMIID.NotFound" in world.known.reason and "gpufleet resume" in world.known.reason


def test_a_launch_that_aws_does_not_answer_is_asked_for_with_the_same_token_for_a_while() -> None:
    world = World(settings(), is_silent=True)
    world.run(9)
    asked = {decision.state.launch.asked_at for decision in world.decisions if decision.state.launch}
    assert asked == {START, START + ASK_AGAIN}
    world.is_silent = False
    world.run_until("running")
    assert len(world.nodes) == 3


RESERVED = {"is_reserved": True, "reserved_nodes": 3}
BLOCK = {"opening_hours": {OWN: OpeningHours(start=START, end=START + timedelta(days=1))}}


@pytest.mark.parametrize("paid", [{"is_reserved": True}, RESERVED, BLOCK])
def test_reserved_nodes_whose_slot_is_not_free_yet_are_asked_for_on_and_the_others_wait(paid: dict[str, Any]) -> None:
    """An instance that ends holds its slot for a quarter of an hour; an owned reservation is no market."""
    world = trained(World(settings(prices={"on-demand": PRICES["spot"]}, **paid)))
    world.capacity, world.code = scarce(0, on_demand=2), "ReservationCapacityExceeded"
    world.vanish(world.in_service()[0])
    world.run(25)
    assert (world.phase, len(world.in_service())) == ("running", 2)
    world.capacity["on-demand"] = 3
    world.run(15)
    assert (world.phase, len(world.in_service()), len(world.nodes)) == ("running", 3, 4)


def test_a_part_of_a_gang_that_ended_before_its_answer_was_written_is_paid_once_and_no_bad_node() -> None:
    world = World(settings(), capacity=scarce(2), is_silent=True)
    world.tick()
    assert world.known.launch
    for key in world.launch(world.known.launch).ids:
        world.carry_out(GroupAction(OWN, GiveBack(instance_id=key)))
    world.advance(MINUTE)
    world.is_silent = False
    world.tick()
    assert (world.known.unfit_nodes, len(world.known.instances), world.alive()) == (0, 2, [])
    world.run(1)
    assert world.known.spent_usd == pytest.approx(world.true_usd()) and world.true_usd() > 0.3


def test_a_node_that_ec2_does_not_describe_for_a_while_is_no_bad_node() -> None:
    world = World(settings())
    world.run(3)
    seen = world.observe()
    tick = Tick(settings=world.config, seen=replace(seen, machines=seen.machines[1:]), now=world.now)
    assert decide(tick, world.known).state.unfit_nodes == 0


def test_a_start_in_a_reservation_asks_each_minute_and_never_fails() -> None:
    world = World(settings(prices={"on-demand": PRICES["spot"]}, is_reserved=True), capacity=scarce(0))
    world.run(600)
    assert len(world.asked) > 500 and world.phase in ("starting", "waiting")
    world.capacity["on-demand"] = 3
    world.run_until("running")


def test_a_union_fills_the_reservation_first_and_rents_the_rest_in_the_same_tick() -> None:
    config = union()
    world = World(config, capacity=scarce(0, on_demand=0))
    world.tick()
    # Two owned nodes came without the third: they are given back at once.
    assert world.alive() == [] and [len(answer.ids) for _, answer in world.asked] == [2]
    world.run(300)
    # Nodes of a refused launch cost the reservation's price, too.
    assert world.known.spent_usd == pytest.approx(world.true_usd(), abs=0.05) and len(world.asked) > 30
    world.capacity["on-demand"] = 1
    world.run_until("running")
    assert sorted(world.nodes[key].is_owned for key in world.alive()) == [False, True, True]
    assert world.known.usd_per_hour == pytest.approx(31)
    world.run(60)
    assert world.known.spent_usd == pytest.approx(world.true_usd(), abs=0.6)


def test_a_union_rents_what_a_slow_slot_of_the_reservation_lacks() -> None:
    world = trained(World(union()))
    # The reservation counts the old instance until it is gone.
    world.owned_room = 1
    world.vanish(next(key for key in world.in_service() if world.nodes[key].is_owned))
    world.run(15)
    assert (world.phase, len(world.in_service())) == ("running", 3)
    assert sorted(world.nodes[key].is_owned for key in world.alive()) == [False, False, True]
    assert (world.asked[-1][0].nodes, world.asked[-1][0].first) == (1, 1)


def test_the_ceiling_counts_the_dearest_node_that_a_union_may_get() -> None:
    world = World(union(ceiling_usd=40.0))
    world.run(600)
    # Three rented nodes would have cost 90 USD an hour at the start.
    assert world.phase == "over-budget" and world.known.spent_usd <= 40


def test_stacks_under_a_shared_ceiling_count_on_each_dollar_once() -> None:
    alone = World(settings(shared=SharedCeiling(bucket="team", key="budget.json", usd=1000.0)))
    alone.tick()
    (row,) = alone.rows.values()
    assert row.usd_per_hour == 30
    shared = SharedCeiling(bucket="team", key="budget.json", usd=1.5 * row.usd_until(START))
    rows: dict[str, StackRow] = {}
    first, second = (World(settings(stack=stack, shared=shared), rows=rows) for stack in ("one", "two"))
    # The second stack starts between the first one's read and its write.
    first.meanwhile.append(second.tick)
    first.tick()
    assert (first.phase, len(first.alive())) == ("over-budget", 0)
    assert (second.phase, len(second.alive())) == ("starting", 3)
    assert "gpufleet:sharedCeiling" in first.known.reason and first.known.others_usd == rows[
        second.known.meter
    ].usd_until(START)
    for _ in range(120):
        second.advance(MINUTE)
        second.tick()
    assert (second.phase, second.alive()) == ("over-budget", []) and second.true_usd() < shared.usd
    # The dollars that the second stack's end set free start nothing; a higher ceiling does.
    first.now = second.now
    first.run(5)
    assert first.phase == "over-budget"
    first.config = replace(first.config, shared=replace(shared, usd=100.0))
    first.run_until("running")


def test_the_row_of_a_silent_stack_grows_with_what_it_costs_without_nodes() -> None:
    world = World(settings(fixed_usd_per_hour=2.0, shared=SharedCeiling(bucket="team", key="budget.json", usd=1000.0)))
    world.run(10)
    (row,) = world.rows.values()
    later, month = row.at + timedelta(hours=2), timedelta(days=30)
    # Three nodes of 10 USD/h end with their lease; a file system, the endpoints and the key do not.
    assert row.usd_until(later) >= row.usd + 32 * (LEASE / timedelta(hours=1))
    assert row.usd_until(later + month) - row.usd_until(later) == pytest.approx(month / timedelta(hours=1) * 2.0)


def test_the_youngest_nodes_beyond_a_gang_are_given_back() -> None:
    world = trained(World(union()))
    gang = world.in_service()
    # A person raises the size of the place's own group; the reservation's two nodes stay.
    world.sizes["reserved p4d az1"] = 3
    world.run(30)
    assert (world.phase, world.in_service(), world.alive()) == ("running", gang, gang)


def test_spot_is_asked_for_twice_before_nodes_are_bought_on_demand() -> None:
    world = World(settings(fallback=True), capacity=scarce(1, on_demand=9))
    world.run_until("running")
    assert [request.place for request, _ in world.asked] == [OWN, OWN, "on-demand p4d az1"]
    assert (world.known.on_demand, world.known.usd_per_hour) == (True, 90.0)
    assert {world.nodes[key].lifecycle for key in world.alive()} == {"on-demand"}
    assert world.now - START < timedelta(minutes=30)
    # A new run begins with spot again.
    world.capacity["spot"] = 9
    world.config = replace(world.config, run_id="ffffffffffff")
    world.run_until("draining")
    world.run_until("running")
    assert {world.nodes[key].lifecycle for key in world.alive()} == {"spot"}


def test_survivors_wait_for_a_refused_replacement_as_long_as_their_own_start_takes() -> None:
    world = trained(World(settings()))
    world.capacity["spot"] = 2
    world.interrupt(world.in_service()[0])
    lost_at = world.now
    world.run_until("draining")
    assert REFUSED_REPLACEMENT <= world.now - lost_at <= REFUSED_REPLACEMENT + 2 * MINUTE


@pytest.mark.parametrize("notice", [True, False])
def test_a_lost_node_is_waited_for_within_the_window_and_counted_once(notice: bool) -> None:
    world = trained(World(settings()))
    victim = world.in_service()[0]
    world.interrupt(victim, notice=notice)
    world.run(3)
    if notice:
        world.interrupted.add(victim)  # SQS delivers at least once
    world.run(10)
    assert (world.phase, len(world.in_service()), world.known.incomplete_since) == ("running", 3, None)
    assert (world.known.interruptions, world.known.unfit_nodes) == (1, 0)


def test_a_gang_that_held_forgets_earlier_attempts() -> None:
    world = World(settings(), capacity=scarce(2))
    world.tick()
    world.capacity["spot"] = 9
    world.run_until("running")
    assert world.known.attempts == 2
    world.run(35)
    assert world.known.attempts == 0


def test_a_node_saves_and_is_replaced_before_its_maintenance_where_the_run_lasts_longer() -> None:
    world = trained(World(settings(steps=100)))
    first, second, third = world.in_service()
    # The run takes 20 hours at p95, of which a half is left.
    for key in world.in_service():
        world.say(key, "training", done_steps=50)
    world.maintenance = {first: world.now + timedelta(hours=14), "i-of-somebody-else": world.now}
    world.run(15)
    assert set(world.in_service()) == {first, second, third}
    world.maintenance = {second: world.now + timedelta(hours=6)}
    world.run(3)
    assert world.nodes[second].leaving_at and set(world.in_service()) == {first, third}
    world.run(12)
    assert (world.phase, len(world.in_service())) == ("running", 3) and len(world.nodes) == 4
    assert (world.known.interruptions, world.known.unfit_nodes) == (0, 0)


def test_workers_at_their_smallest_size_are_replaced_before_maintenance() -> None:
    world = World(settings(mode="workers", min_nodes=2), min_size=2, sizes={OWN: 2})
    world.run(10)
    first, second = world.in_service()
    world.maintenance = {first: world.now + timedelta(hours=6)}
    world.run(15)
    assert first not in world.in_service() and second in world.in_service() and len(world.in_service()) == 2


def test_nodes_that_fail_their_tests_are_bounded() -> None:
    world = World(settings(), boot=None)
    world.run_until("unfit")
    assert 3 < world.known.unfit_nodes <= 3 + 3
    assert "node-init/" in world.known.reason and not world.alive()
    # And again only when a person says so.
    world.run(60)
    assert world.phase == "unfit"
    world.boot = timedelta(minutes=8)
    world.ask("run")
    world.run_until("running")
    assert world.known.unfit_nodes == 0


def test_a_bad_node_now_and_then_ends_no_long_run() -> None:
    world = trained(World(settings()))
    for _ in range(3 * 3):
        world.boot = None
        world.interrupt(world.in_service()[0])
        world.run(6)
        world.boot = timedelta(minutes=3)
        world.run(15)
    assert world.phase == "running"
    assert sum(not instance.served for instance in world.known.instances.values()) > 3


def test_new_code_drains_no_workers() -> None:
    world = World(settings(mode="workers", min_nodes=2), min_size=2, sizes={OWN: 2})
    world.run(15)
    working = world.in_service()
    world.config = settings(mode="workers", min_nodes=2, run_id="ffffffffffff")
    world.run(5)
    assert (world.phase, world.known.run_id) == ("running", "ffffffffffff")
    assert world.in_service() == working


def test_one_done_node_is_enough_after_a_while_unless_it_speaks_of_another_run() -> None:
    world = trained(World(settings()))
    for key in world.in_service():
        world.say(key, "done", run_id="eeeeeeeeeeee")
    world.run(10)
    assert world.phase == "running"
    world.say(world.in_service()[0], "done")
    world.run(4)
    assert world.phase == "running"
    world.run_until("done")
    assert "1 of 3" in world.known.reason


@pytest.mark.parametrize(("exit_status", "why"), [(1, "failed again and again"), (78, "what to change is at the end")])
def test_a_node_that_gave_up_fails_the_run(exit_status: int, why: str) -> None:
    world = trained(World(settings()))
    loser = world.in_service()[1]
    world.say(world.in_service()[0], "training")
    world.say(loser, "gave-up", exit_status=exit_status)
    world.run_until("failed")
    assert loser in world.known.reason and why in world.known.reason
    assert not world.alive()


def test_a_worker_s_fault_that_all_would_have_ends_them_and_any_other_does_not() -> None:
    """Each would be replaced or stand by, and be paid, without end."""
    world = World(settings(mode="workers", min_nodes=2), min_size=2, sizes={OWN: 2})
    world.run(10)
    loser = world.in_service()[0]
    world.say(loser, "gave-up", exit_status=1)
    world.run(5)
    assert world.phase == "running"
    world.say(loser, "gave-up", exit_status=78)
    world.run_until("failed")
    assert loser in world.known.reason and not world.alive()


def test_a_failed_run_begins_anew_when_asked_and_old_words_do_not_count() -> None:
    world = trained(World(settings()))
    world.ask("run")  # an old request, from before the failure
    world.run(2)
    world.say(world.in_service()[0], "gave-up")
    world.run_until("failed")
    world.run(10)
    assert world.phase == "failed"
    world.ask("run")
    world.run_until("running")


@pytest.mark.parametrize(("phase", "room"), [("waiting", 2), ("starting", 3), ("draining", 3)])
def test_a_stop_is_obeyed_in_any_phase(phase: str, room: int) -> None:
    world = World(settings(), capacity=scarce(room), boot=timedelta(hours=2))
    world.run_until(phase)
    world.ask("stop")
    world.run_until("stopped", limit=20)
    world.run(1)
    assert not world.alive()


def test_the_fleet_is_drained_while_the_checkpoints_can_still_be_paid() -> None:
    config = settings(ceiling_usd=100.0)
    world = trained(World(config))
    world.run_until("draining")
    reserve = timedelta(seconds=config.drain_s) + ENDING + MINUTE
    assert world.known.spent_usd + 30 * reserve / timedelta(hours=1) >= 100
    world.run_until("over-budget")
    assert 90 < world.known.spent_usd <= 100
    assert world.known.spent_usd == pytest.approx(world.true_usd())
    assert "gpufleet:ceilingUsd" in world.known.reason
    # Resuming changes nothing about it; a higher ceiling does.
    world.advance(MINUTE)
    world.ask("run")
    world.run(30)
    assert (world.phase, world.alive()) == ("over-budget", [])
    world.config = settings(ceiling_usd=300.0)
    world.run_until("running")


@pytest.mark.parametrize("phase", ["draining", "over-budget"])
@pytest.mark.parametrize("ceiling_usd", [200.0, None])
def test_a_raised_ceiling_goes_on_whenever_it_is_raised(phase: str, ceiling_usd: float | None) -> None:
    world = trained(World(settings(ceiling_usd=30.0)))
    world.run_until(phase)
    world.config = replace(world.config, ceiling_usd=ceiling_usd)
    world.advance(MINUTE)
    world.run_until("running", limit=60)


def test_a_reservation_that_the_stack_made_costs_on_and_the_reason_says_so() -> None:
    config = settings(ceiling_usd=100.0, reserved_nodes=3, prices={"on-demand": PRICES["spot"]})
    world = trained(World(config))
    assert world.known.usd_per_hour == 30
    world.run_until("over-budget")
    assert 90 < world.known.spent_usd <= 100
    assert "billed until `pulumi destroy`" in world.known.reason
    assert world.known.usd_per_hour == 30


def test_no_further_start_that_could_not_even_pay_for_booting() -> None:
    world = World(settings(ceiling_usd=40.0), boot=timedelta(hours=2))
    world.run_until("over-budget")
    # Three nodes of 10 USD/h for the window, of 40 USD; the rest would pay for less than booting and ending.
    assert 22 < world.known.spent_usd < 24
    assert world.known.attempts == 1


@pytest.mark.parametrize("job", ["ba9876543210", "ffffffffffff"])
def test_a_new_run_drains_the_old_nodes_first_and_only_another_job_starts_the_meter_at_zero(job: str) -> None:
    world = trained(World(settings()))
    world.run(60)
    old, spent = set(world.alive()), world.known.spent_usd
    world.config = settings(run_id="ffffffffffff", job=job)
    world.tick()
    assert world.phase == "draining" and world.known.earlier_usd == (pytest.approx(spent) if job == "f" * 12 else 0)
    world.run_until("running")
    assert not old & set(world.alive()) and world.known.run_id == "ffffffffffff"
    assert world.known.spent_usd + world.known.earlier_usd == pytest.approx(world.true_usd(), abs=0.01)


def test_a_larger_plan_makes_the_group_larger() -> None:
    world = World(settings(node_count=5), max_size=3)
    world.tick()
    assert (world.max_size, world.desired, world.phase) == (5, 5, "starting")


@pytest.mark.parametrize("bought", [True, False])
def test_the_same_run_goes_on_in_the_next_block_or_without_one(bought: bool) -> None:
    prices = {"capacity-block": {"p4d.24xlarge": 10.0}, "on-demand": {"p4d.24xlarge": 10.0}}
    block = OpeningHours(start=START, end=START + timedelta(hours=24))
    config = settings(opening_hours={OWN: block}, prices=prices)
    world = World(config)
    world.run_until("block-ended")
    world.run(60)
    assert (world.phase, world.desired) == ("block-ended", 0)
    start = world.now + timedelta(hours=3)
    following = OpeningHours(start=start, end=start + timedelta(hours=24))
    world.config = replace(config, opening_hours={OWN: following} if bought else {})
    world.run_until("running")
    assert (world.now >= start) is bought


@pytest.mark.parametrize("goes_to_market", [True, False])
def test_a_run_goes_on_in_the_next_block_and_then_in_the_market(goes_to_market: bool) -> None:
    day, next_block, market = timedelta(days=1), "capacity-block cr-2", "on-demand p4d az1"
    hours = {
        OWN: OpeningHours(start=START + timedelta(hours=1), end=START + day),
        next_block: OpeningHours(start=START + 2 * day, end=START + 3 * day),
    }
    prices = {"on-demand": {"p4d.24xlarge": 30.0}}
    places = {OWN: place(1, "az1", "on-demand", 0.0), next_block: place(2, "az2", "on-demand", 0.0)}
    places |= {market: place(3, "az1", "on-demand", 30.0)} if goes_to_market else {}
    world = World(settings(places=places, opening_hours=hours, prices=prices))
    for name in [OWN, next_block] if goes_to_market else [OWN]:
        world.run_until("running")
        assert world.known.place and world.known.place.name == name
        assert hours[name].start <= world.now < hours[name].end
        world.run_until("draining", limit=3000)
        world.run_until("waiting", "starting")
        assert not world.alive(name)
        assert timedelta(minutes=30) <= hours[name].end - world.now <= timedelta(minutes=50)
    if goes_to_market:
        world.run_until("running")
        assert world.known.place and world.known.place.name == market
        # A block that is bought meanwhile, and set by `pulumi up`, does not close the market before it begins.
        bought = OpeningHours(start=world.now + day, end=world.now + 2 * day)
        world.config = replace(world.config, opening_hours={OWN: hours[OWN], next_block: bought})
        world.run_until("draining", limit=3000)
        assert timedelta(0) <= world.now - bought.start < 2 * MINUTE
        world.run_until("running")
        assert world.known.place.name == next_block
        world.run_until("draining", limit=3000)
        world.run_until("running")
        assert world.known.place.name == market
    else:
        assert "Capacity Block begins at" in world.known.reason
        world.run_until("block-ended", limit=5000)
        assert not world.alive()


def test_a_block_that_its_schedule_drains_is_no_pause() -> None:
    """The controller was late, and the scheduled action of infra/place_group.py has set the size to 0."""
    day, next_block = timedelta(days=1), "capacity-block cr-2"
    hours = {
        OWN: OpeningHours(start=START, end=START + day),
        next_block: OpeningHours(start=START + day, end=START + 2 * day),
    }
    places = {OWN: place(1, "az1", "on-demand", 0.0), next_block: place(2, "az2", "on-demand", 0.0)}
    world = World(settings(places=places, opening_hours=hours, prices={"on-demand": {"p4d.24xlarge": 30.0}}))
    world.run_until("running")
    world.run(int((hours[OWN].end - timedelta(minutes=50) - world.now) / MINUTE))
    assert world.phase == "running"
    world.advance(timedelta(minutes=15))
    world.desired = 0
    world.run_until("waiting")
    world.run_until("running")
    assert world.known.place and world.known.place.name == next_block


@pytest.mark.parametrize("phase", ["draining", "paused"])
def test_a_person_pauses_the_gang_and_ends_the_pause(phase: str) -> None:
    world = trained(World(settings()))
    world.desired = 0
    world.run_until(phase)
    if phase == "paused":
        assert not world.alive()
        # Auto Scaling would launch nodes one by one: `gpufleet resume` starts them.
        world.desired = 3
        world.run(30)
        assert (world.phase, world.desired, world.alive()) == ("paused", 0, [])
    world.advance(MINUTE)
    world.ask("run")
    world.run_until("running")


def left_alone(world: World, silent_minutes: int) -> World:
    """The controller is silent, and the nodes end themselves."""
    world.now += timedelta(minutes=40)
    for key in world.alive():
        world.vanish(key)
    world.desired = 0
    world.now += timedelta(minutes=silent_minutes - 40)
    return world


@pytest.mark.parametrize("silent_minutes", [45, 300])
def test_nodes_that_ended_themselves_stay_away_until_a_person_asks_and_every_dollar_counts(
    silent_minutes: int,
) -> None:
    world = left_alone(trained(World(settings())), silent_minutes)
    world.run(30)
    assert (world.phase, world.desired) == ("paused", 0)
    assert "silent" in world.known.reason
    assert "gpufleet resume" in world.known.reason
    assert world.known.spent_usd >= world.true_usd() - 1e-9
    world.ask("run")
    world.run_until("running")


def test_a_person_who_asks_while_the_controller_is_silent_is_heard() -> None:
    world = trained(World(settings()))
    world.advance(MINUTE)
    world.tick()
    left_alone(world, 50).ask("run")
    world.run_until("running")
    assert world.known.attempts == 2


def test_a_stack_that_is_destroyed_while_it_trains_trains_when_it_is_deployed_again() -> None:
    world = left_alone(trained(World(settings())), 60)
    world.born = world.now
    world.advance(MINUTE)
    world.run_until("running")


def test_whoever_starts_nodes_of_a_run_that_ended_has_them_ended() -> None:
    world = trained(World(settings()))
    world.ask("stop")
    world.run_until("stopped")
    assert "user/ann" in world.known.reason
    world.desired = 3
    world.run(5)
    assert (world.phase, world.desired, world.alive()) == ("stopped", 0, [])


def test_workers_are_left_to_their_policies_and_stopped_by_their_bounds() -> None:
    config = settings(mode="workers", min_nodes=1)
    world = World(config, min_size=1, sizes={OWN: 1})
    world.run(10)
    assert [decision.actions for decision in world.decisions] == [()] * 10
    assert world.phase == "running"
    world.desired = 2  # a policy
    # The worker goes on with the next piece.
    world.say(world.in_service()[0], "done")
    world.run(10)
    assert (world.known.nodes.wanted, world.known.nodes.in_service) == (2, 2)
    world.ask("stop")
    world.run_until("stopped")
    assert (world.min_size, world.max_size, world.desired, world.alive()) == (0, 0, 0, [])
    world.advance(MINUTE)
    world.ask("run")
    world.run(2)
    assert (world.min_size, world.max_size, world.desired) == (1, 3, 1)


@pytest.mark.parametrize("want", ["run", "stop"])
def test_a_gang_takes_over_the_bounds_of_the_workers_before_it(want: str) -> None:
    world = World(settings(mode="workers", min_nodes=1))
    world.run(3)
    world.ask(want)
    world.run(12)
    assert (world.min_size, world.max_size) == ((1, 3) if want == "run" else (0, 0))
    world.config = settings()
    world.advance(MINUTE)
    world.ask("run")
    world.run_until("running")
    world.say_all("done")
    world.run_until("done")
    assert (world.min_size, world.max_size, world.alive()) == (0, 3, [])


def test_workers_respect_the_ceiling_counting_those_still_to_come() -> None:
    world = World(settings(mode="workers", min_nodes=0, ceiling_usd=50.0), sizes={OWN: 3})
    world.run_until("over-budget")
    assert world.known.spent_usd <= 50
    assert not world.alive()


def test_without_a_group_nothing_is_done() -> None:
    world = World(settings())
    facts = replace(world.observe(), groups={})
    decision = decide(Tick(settings=world.config, seen=facts, now=START), None)
    assert decision.actions == ()
    assert "pulumi up" in decision.state.reason


def test_the_ceiling_keeps_what_a_node_beside_a_detached_or_warm_one_would_cost() -> None:
    """Neither is a member, so the group may launch another before the next tick."""
    world = trained(World(settings()))
    seen = world.observe()
    lacks = replace(seen, groups={OWN: replace(seen.groups[OWN], members=seen.groups[OWN].members[1:])})
    # Three nodes of 10 USD/h are paid 9 minutes more, and a fourth.
    for ceiling_usd, with_all, with_one_less in ((4.4, True, True), (5.9, False, True), (6.1, False, False)):
        config = settings(ceiling_usd=world.known.spent_usd + ceiling_usd)
        over = [over_budget(Tick(settings=config, seen=one, now=world.now), world.known) for one in (seen, lacks)]
        assert [reason is not None for reason in over] == [with_all, with_one_less]
