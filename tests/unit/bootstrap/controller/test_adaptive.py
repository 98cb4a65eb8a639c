"""An adaptive gang: on demand in time for the deadline, back to spot where that pays; progress by reported steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from bootstrap.contract.codec import to_text
from bootstrap.contract.settings import ControllerSettings, Lifecycle
from bootstrap.contract.state import read_state
from tests.unit.bootstrap.controller.world import MINUTE, PLACES, START, World, adaptive, trained

ZONES = ("az1", "az2", "az3")
NO_SPOT: dict[tuple[Lifecycle, str], int] = {("spot", f"subnet-{zone}"): 0 for zone in ZONES}


@dataclass
class Training:
    """The job on the world's nodes: a step a minute, checkpoints as the settings say, a report every five minutes."""

    world: World
    done: int = 0

    def minute(self) -> None:
        """One tick, and what the nodes do until the next."""
        world = self.world
        world.tick()
        before = world.in_service()
        world.advance(MINUTE)
        if len(before) == 3 and world.in_service() == before:
            self.done += 1
            if self.done >= world.config.steps:
                world.say_all("done")
            elif self.done % 5 == 0:
                world.say(before[0], "training", done_steps=self.done)

    def reclaim(self, most: int) -> None:
        """EC2 takes spot nodes back, with the work since the last checkpoint."""
        taken = [key for key in self.world.alive() if self.world.nodes[key].lifecycle == "spot"][:most]
        if len(self.world.in_service()) == 3 and taken:
            self.done -= self.done % int(self.world.config.checkpoint_interval_s / 60)
        for key in taken:
            self.world.interrupt(key)

    def finish(self) -> timedelta:
        """Train to the end, and return the time that it took."""
        for _ in range(3000):
            if self.world.state and self.world.phase in ("done", "failed", "unfit", "over-budget"):
                break
            self.minute()
        assert self.world.phase == "done", self.world.known.reason
        return self.world.now - START


def bought(world: World) -> list[Lifecycle]:
    """Lifecycle of each gang, in order."""
    return [node.lifecycle for node in world.nodes.values()][::3]


def test_a_working_spot_gang_is_left_for_on_demand_nodes_while_the_deadline_can_still_be_kept() -> None:
    # 3 h of work, 0.6 h of a slow launch and 0.25 h of lost work: spot is left before 4 h are over at this pace.
    training = Training(World(adaptive(deadline_hours=5.0)))
    world = training.world
    while not world.state or world.phase != "running":
        training.minute()
    # A gang that stands and does not train makes no progress.
    first = world.in_service()[0]
    world.say(first, "training", done_steps=10)
    world.run_until("draining")
    assert world.known.next_place and world.known.next_place.name == "on-demand p4d az2"
    reason = world.known.reason
    assert "so the gang saves and moves: on demand, as the deadline allows no more risk" in reason
    # The spot nodes worked until then.
    assert len(world.in_service()) == 6
    assert "2.8 h of work and a slow launch must fit" in reason
    world.run_until("running")
    assert {world.nodes[key].lifecycle for key in world.in_service()} == {"on-demand"}
    needed = timedelta(hours=3 * 170 / 180)
    assert world.now + needed <= START + timedelta(hours=5)
    assert world.known.pools["spot p4d az1"].launched_at_s is None
    assert world.known.spent_usd == pytest.approx(world.true_usd())


def test_spot_that_works_to_the_end_is_never_left() -> None:
    training = Training(World(adaptive(deadline_hours=4.4)))
    assert training.finish() <= timedelta(hours=3.4)
    assert set(bought(training.world)) == {"spot"}


@pytest.mark.parametrize("deadline_hours", [3.5, 4.3])
def test_without_time_to_load_spot_nodes_the_first_gang_is_bought_on_demand(deadline_hours: float) -> None:
    # 3 h of work, 0.6 h of a slow launch, 0.25 h of lost work, half an hour of loading.
    training = Training(World(adaptive(deadline_hours=deadline_hours)))
    assert training.finish() <= timedelta(hours=3.5)
    assert bought(training.world) == ["on-demand"]


def test_no_spot_at_all_waits_free_of_charge_and_ends_in_time() -> None:
    training = Training(World(adaptive(), rooms=dict(NO_SPOT)))
    world = training.world
    assert training.finish() <= timedelta(hours=8)
    assert set(bought(world)) == {"on-demand"}
    first = min(node.launched_at for node in world.nodes.values())
    # Places that refuse are asked again every few minutes, and refusals alone fail no run.
    assert first - START >= timedelta(minutes=20)
    assert any("waiting longer for spot costs more" in one.state.reason for one in world.decisions)


def standing() -> World:
    """A world with a spot gang in service that has done ten steps, and does no more."""
    training = Training(World(adaptive(deadline_hours=5.0)))
    while not training.world.state or training.world.phase != "running":
        training.minute()
    training.world.say(training.world.in_service()[0], "training", done_steps=10)
    return training.world


def test_a_stop_in_the_middle_of_a_move_ends_the_nodes_beside_at_once_too() -> None:
    world = standing()
    for node in world.nodes.values():
        node.saves_after = timedelta(minutes=4)
    world.run_until("draining")
    assert world.known.beside and len(world.staying(world.known.beside.name)) == 3
    world.ask("stop")
    world.tick()
    world.advance(MINUTE)
    assert world.phase == "draining"
    assert not world.in_service()
    world.run_until("stopped")
    assert world.known.spent_usd == pytest.approx(world.true_usd())


@pytest.mark.parametrize("boot", [None, timedelta(days=1)], ids=["fail", "never serve"])
def test_nodes_beside_that_do_not_come_are_given_up_and_not_launched_again_and_again(boot: timedelta | None) -> None:
    world = standing()
    works, world.boot = world.in_service(), boot
    world.run(180)
    # A place that did not give the nodes is asked again after half an hour at the earliest.
    assert 9 <= len(world.nodes) <= 3 + 3 * 6
    assert (world.phase, world.in_service(), world.known.unfit_nodes) == ("running", works, 0)


def test_a_gang_that_cannot_leave_spot_for_the_deadline_works_on() -> None:
    world = standing()
    world.capacity["on-demand"] = 0
    world.run(300)
    # On demand is asked again half an hour after a refusal, and the same spot nodes work.
    asked = [request.asked_at for request, _ in world.asked if request.place == "on-demand p4d az2"]
    assert 4 <= len(set(asked)) <= 11
    assert (bought(world), world.phase) == (["spot"], "running")


@pytest.mark.parametrize("comes", [True, False])
def test_spot_nodes_are_left_for_much_cheaper_spot_once_and_asked_again_where_that_refuses(comes: bool) -> None:
    # On-demand nodes cost 30 USD/h.
    prices = {"spot p4d az1": 24.0, "spot p4d az2": 9.0, "spot p4de az3": 25.0}
    places = {name: replace(one, usd_per_hour=prices.get(name, 30.0), hours_p95=15.0) for name, one in PLACES.items()}
    config = adaptive(places=places, deadline_hours=40.0, steps=900)
    training = Training(World(config, rooms={} if comes else {("spot", "subnet-az2"): 0}))
    world = training.world
    for _ in range(90):
        training.minute()
    assert world.phase == "running" and world.known.place
    assert world.known.place.name == ("spot p4d az2" if comes else "spot p4d az1")
    # A refusal costs nothing: the gang works on.
    assert bought(world) == ["spot"] * (1 + comes)
    reasons = [one.state.reason for one in world.decisions]
    assert any("nodes are asked for beside these, in spot p4d az2" in reason for reason in reasons)
    assert training.finish() <= timedelta(hours=40)
    assert world.known.spent_usd == pytest.approx(world.true_usd())


def test_on_demand_nodes_that_aws_refused_before_are_kept() -> None:
    places = {name: replace(one, hours_p95=15.0) for name, one in PLACES.items()}
    training = Training(World(adaptive(places=places, deadline_hours=40.0, steps=900), rooms=dict(NO_SPOT)))
    world = training.world
    world.capacity["on-demand"] = 2
    while not (world.state and world.known.pools.get("on-demand p4d az2")):
        training.minute()
    world.capacity["on-demand"] = 9
    while world.phase != "running":
        training.minute()
    world.rooms = {}
    training.finish()
    assert bought(world)[-1] == "on-demand"


def test_an_on_demand_gang_of_before_the_stack_was_adaptive_is_not_left_for_on_demand() -> None:
    world = World(replace(adaptive(deadline_hours=3.8), spot_policy="fallback", gang_window_s=600))
    world.capacity["spot"] = 0
    world.run_until("running")
    world.say(world.in_service()[0], "training", done_steps=1)
    world.config = adaptive(deadline_hours=3.8)
    world.run(200)
    assert (world.phase, len(world.nodes)) == ("running", 3)


def test_steps_are_the_progress_once_a_node_reports_them_and_a_new_run_forgets_them() -> None:
    world = trained(World(adaptive(deadline_hours=40.0)))
    world.run(30)
    assert world.known.progress == pytest.approx(30 / 180, abs=0.02)
    key = world.in_service()[0]
    world.say(key, "training", done_steps=9)
    world.run(20)
    assert (world.known.done_steps, world.known.progress) == (9, 0.05)
    world.say(key, "training", done_steps=99, run_id="fedcba987654")
    world.run(1)
    assert world.known.done_steps == 9
    assert read_state(to_text(world.known), "the state") == world.known
    world.config = replace(world.config, run_id="fedcba987654")
    world.tick()
    assert world.known.progress == 0.0


@dataclass(frozen=True)
class Hour:
    """Weather of one hour: nodes that each spot zone has, the boot, and the minute of a reclaim of so many nodes."""

    rooms: tuple[int, int, int]
    boot: int
    reclaim: int | None
    taken: int = 1


HOURS = st.builds(
    Hour,
    rooms=st.tuples(*[st.sampled_from([0, 0, 2, 9])] * 3),
    boot=st.integers(3, 18),
    reclaim=st.none() | st.integers(0, 59),
    taken=st.sampled_from([1, 3]),
)


def live(config: ControllerSettings, hours: list[Hour], *, saves: bool) -> Training:
    """Train through the hours; nodes complete their hooks, or run into its limit."""
    training = Training(World(config, saves_after=MINUTE if saves else None))
    world = training.world
    for hour in hours:
        for zone, room in zip(ZONES, hour.rooms, strict=True):
            world.rooms[("spot", f"subnet-{zone}")] = room
        world.boot = timedelta(minutes=hour.boot)
        for minute in range(60):
            if minute == hour.reclaim:
                training.reclaim(hour.taken)
            training.minute()
            if world.phase == "done":
                return training
    return training


@examples(max_examples=15, deadline=None)
@given(
    hours=st.lists(HOURS, min_size=1, max_size=8),
    deadline=st.floats(3.9, 8.0),
    saves=st.booleans(),
)
@example(hours=[Hour((9, 9, 9), 15, 59)] * 8, deadline=6.0, saves=False)
# Replaced nodes that take 44 minutes of work along, each just before the checkpoint.
@example(hours=[Hour((9, 9, 9), 18, minute) for minute in (None, 2, 5, 8)], deadline=5.0, saves=True)
def test_the_deadline_is_kept_whatever_spot_does(hours: list[Hour], deadline: float, saves: bool) -> None:
    config = adaptive(deadline_hours=deadline, checkpoint_interval_s=2700.0)
    training = live(config, hours, saves=saves)
    took = training.finish()
    world = training.world
    assert took <= timedelta(hours=deadline)
    assert world.desired == 0
    # A minute of all nodes.
    assert world.known.spent_usd == pytest.approx(world.true_usd(), abs=90 / 60)
