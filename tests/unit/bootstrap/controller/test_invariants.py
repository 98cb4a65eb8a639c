"""Invariants over random histories of AWS, nodes and people.

``HISTORIES=2500 python -m pytest tests/unit/bootstrap/controller/test_invariants.py`` runs so many in each test
(tests/benchmarks/results/histories_202611.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from bootstrap.contract.codec import to_text
from bootstrap.contract.request import read_request
from bootstrap.contract.settings import ControllerSettings, Lifecycle, OpeningHours
from bootstrap.contract.shared_ceiling import SharedCeiling, StackRow
from bootstrap.contract.state import ENDED, read_state
from bootstrap.contract.timings import ENDING, TICK
from tests.unit.bootstrap.controller.world import MINUTE, START, World, adaptive, place, rotating, settings, union

WINDOW_S = 1200
# One place, several, several between which an adaptive gang moves, and a reservation topped up on demand.
MAKES = st.sampled_from([settings, rotating, adaptive, union])


def few(count: int) -> examples:
    """So many histories, or those that the environment asks for."""
    return examples(max_examples=int(os.environ.get("HISTORIES", count)), deadline=None)


@dataclass(frozen=True)
class Event:
    """Something that happens after some minutes."""

    kind: str
    after: int
    which: int


KINDS = (
    "interrupt silent-interrupt no-capacity capacity slow fast bad hang stop run gave-up done new-run lost-actions "
    "actions outage external-0 external-n drought rain maintenance reservation named"
)
EVENTS = st.builds(
    Event,
    kind=st.sampled_from(KINDS.split()),
    after=st.integers(0, 40),
    which=st.integers(0, 5),
)


def made(make: Callable[..., ControllerSettings], fallback: bool, **changes: Any) -> ControllerSettings:
    """Settings of one place with its fallback, or of several that have one."""
    return settings(fallback=fallback, **changes) if make is settings else make(**changes)


def happen(world: World, event: Event) -> None:
    alive = world.in_service()
    victim = alive[event.which % len(alive)] if alive else None
    spot: dict[Lifecycle, int] = {"on-demand": 9, "capacity-block": 9}
    if event.kind in ("interrupt", "silent-interrupt") and victim:
        world.interrupt(victim, notice=event.kind == "interrupt")
    elif event.kind == "maintenance" and victim:
        world.maintenance[victim] = world.now + timedelta(hours=10 * event.which)
    elif event.kind in ("no-capacity", "capacity"):
        world.capacity = {**spot, "spot": event.which % 3 if event.kind == "no-capacity" else 9}
    elif event.kind in ("drought", "rain"):
        zone = f"subnet-az{1 + event.which % 3}"
        world.rooms[("spot", zone)] = event.which % 3 if event.kind == "drought" else 9
    elif event.kind == "reservation":
        # A slow slot, or a free one.
        world.owned_room = event.which % 3
    elif event.kind == "named":
        zone = f"us-east-1{'abc'[event.which % 3]}"
        world.message = f"you can currently get capacity by not specifying a zone in your request or choosing {zone}."
    elif event.kind in ("slow", "fast", "bad"):
        world.boot = {"slow": timedelta(minutes=25), "fast": timedelta(minutes=3), "bad": None}[event.kind]
    elif event.kind == "hang":
        world.saves_after = None
    elif event.kind in ("stop", "run"):
        world.ask(event.kind)
    elif event.kind in ("gave-up", "done") and victim:
        world.say(victim, "done" if event.kind == "done" else "gave-up")
    elif event.kind == "new-run":
        world.config = replace(world.config, run_id=f"{event.after:012x}")
    elif event.kind in ("lost-actions", "actions"):
        world.lose_actions = event.kind == "lost-actions"
    elif event.kind == "outage":
        world.advance(event.which * MINUTE)
    elif event.kind.startswith("external"):
        # AWS refuses a size above the largest.
        world.desired = min(3, world.max_size) if event.kind.endswith("n") else 0


def live(world: World, events: list[Event], *, forbidden: tuple[str, ...] = ()) -> list[tuple[int, Any]]:
    """Ticks through the events, and nodes in service with the state after each."""
    seen = []
    for event in events:
        for _ in range(event.after):
            world.tick()
            seen.append((len(world.in_service()), world.known))
            world.advance(MINUTE)
        if event.kind not in forbidden:
            happen(world, event)
    return seen


@few(40)
@given(
    events=st.lists(EVENTS, max_size=14),
    ceiling=st.integers(20, 400),
    fallback=st.booleans(),
    make=MAKES,
)
def test_the_ceiling_holds(
    events: list[Event], ceiling: int, fallback: bool, make: Callable[..., ControllerSettings]
) -> None:
    # Short runs, which any ceiling pays at p95 in some place.
    config = made(make, fallback, ceiling_usd=float(ceiling), gang_window_s=WINDOW_S)
    config = replace(config, places={name: replace(one, usd_p95=100.0) for name, one in config.places.items()})
    world = World(config)
    # While the function does not run, or AWS refuses its calls, nobody can keep any ceiling.
    live(world, events, forbidden=("outage", "lost-actions"))
    world.run(60)
    most = max(decision.state.spent_usd for decision in world.decisions)
    rate = max(decision.state.usd_per_hour for decision in world.decisions)
    assert most <= ceiling + rate * (TICK / timedelta(hours=1))
    unseen = max(rate, 3 * config.dearest_usd_per_hour)
    assert world.known.spent_usd == pytest.approx(world.true_usd(), abs=0.02 + unseen / 60)
    # The nodes of a tick's launches are counted in the next one.
    world.ask("stop")
    world.tick()
    pools = world.known.capacity.values()
    assert sum(pool.launched for pool in pools) == len(world.nodes)
    lived = sum(((node.ended_at or world.now) - node.launched_at).total_seconds() for node in world.nodes.values())
    assert sum(pool.node_hours for pool in pools) == pytest.approx(lived / 3600, abs=(len(world.nodes) + 3) / 60)


@few(40)
@given(
    events=st.lists(EVENTS, max_size=8),
    later=st.lists(EVENTS, max_size=8),
    ceiling=st.integers(20, 400),
    idle=st.sampled_from([0.0, 0.5]),
    moves=st.integers(1, 3),
)
# Each stack's nodes end in the minute of their launch.
@example(events=[Event("interrupt", 1, 0)], later=[Event("interrupt", 1, 0)], ceiling=21, idle=0.0, moves=2)
def test_a_run_that_moves_has_one_meter_and_one_ceiling(
    events: list[Event], later: list[Event], ceiling: int, idle: float, moves: int
) -> None:
    config = settings(ceiling_usd=float(ceiling), gang_window_s=WINDOW_S, fixed_usd_per_hour=idle)
    # Another run, or a lost call, has tests of its own.
    forbidden = ("outage", "lost-actions", "new-run", "hang")
    worlds = [World(config)]
    live(worlds[0], events, forbidden=forbidden)
    for number in range(1, moves + 1):
        old = worlds[-1]
        old.ask("stop")
        for _ in range(60):
            old.tick()
            if old.phase in ENDED and not old.alive():
                break
            old.advance(MINUTE)
        assert not old.alive()
        elsewhere = {**old.known.elsewhere, f"stack {number}": old.known.settle(old.now)}
        new = World(replace(config, stack=f"stack {number + 1}"), now=old.now, born=old.now)
        new.ask("run")
        assert new.request
        # A controller reads what the command line wrote.
        began = old.known.run_started_at
        text = replace(new.request, elsewhere=elsewhere, begun_at=began, progress=number / 4).to_text()
        new.request = read_request(text, "control/request.json")
        worlds.append(new)
        new.tick()
        spent_usd = sum(spend.usd_until(new.now) for spend in elsewhere.values())
        assert new.known.spent_usd == pytest.approx(spent_usd, abs=0.01)
        assert new.known.run_started_at == began and new.known.progress == number / 4
        live(new, later, forbidden=forbidden)
    new = worlds[-1]
    new.tick()
    true_usd = sum(world.true_usd() for world in worlds)
    true_usd += sum((new.now - world.born).total_seconds() / 3600 * idle for world in worlds)
    rate = max(decision.state.usd_per_hour for world in worlds for decision in world.decisions)
    assert new.known.spent_usd == pytest.approx(true_usd, abs=0.02 * len(worlds) + rate / 60)
    for state in (decision.state for world in worlds for decision in world.decisions):
        if any(instance.ended_at is None for instance in state.instances.values()):
            assert state.spent_usd <= ceiling + rate * (TICK / timedelta(hours=1))


@few(40)
@given(
    histories=st.lists(st.lists(EVENTS, max_size=8), min_size=2, max_size=3),
    makes=st.lists(MAKES, min_size=3, max_size=3),
    ceiling=st.integers(20, 600),
    turns=st.randoms(use_true_random=False),
)
def test_stacks_that_tick_at_any_time_hold_their_shared_ceiling(
    histories: list[list[Event]], makes: list[Callable[..., ControllerSettings]], ceiling: int, turns: Random
) -> None:
    shared, rows = SharedCeiling(bucket="team", key="budget.json", usd=float(ceiling)), dict[str, StackRow]()
    worlds = [
        World(replace(make(gang_window_s=WINDOW_S), stack=f"stack {number}", shared=shared), rows=rows)
        for number, make in enumerate(makes[: len(histories)])
    ]
    ahead = [[(event, event.after) for event in history] for history in histories]
    for minute in range(400):
        order = turns.sample(worlds, len(worlds))
        for world in order:
            if turns.random() < 0.2:
                # A tick of another stack, between a read and a write of the rows.
                world.meanwhile.append(next(other for other in worlds if other is not world).tick)
            world.tick()
            world.meanwhile.clear()
        for world, events in zip(worlds, ahead, strict=True):
            world.advance(MINUTE)
            if events and minute % 40 == events[0][1]:
                event = events.pop(0)[0]
                if event.kind not in ("outage", "lost-actions", "external-n"):
                    happen(world, event)
        assert sum(world.true_usd() for world in worlds) <= ceiling
        if all(world.phase in ENDED and not world.alive() for world in worlds) and not any(ahead):
            break
    held = sum(row.usd_until(worlds[0].now) for row in rows.values())
    assert held >= sum(world.true_usd() for world in worlds) - 0.02


@few(40)
@given(events=st.lists(EVENTS, max_size=14), fallback=st.booleans(), make=MAKES)
def test_an_incomplete_gang_never_stands_longer_than_the_window_and_its_drain(
    events: list[Event], fallback: bool, make: Callable[..., ControllerSettings]
) -> None:
    world = World(made(make, fallback, gang_window_s=WINDOW_S))
    longest = current = 0
    for in_service, _ in live(world, events, forbidden=("outage", "lost-actions")):
        current = current + 1 if 0 < in_service < 3 else 0
        longest = max(longest, current)
        places = {world.nodes[key].place.removesuffix(", first") for key in world.alive()}
        assert len(places) <= 1 + (world.known.beside is not None), "a gang in two places"
    assert longest <= (timedelta(seconds=WINDOW_S + world.config.drain_s) + ENDING) / MINUTE


@few(40)
@given(events=st.lists(EVENTS, max_size=14), fallback=st.booleans(), make=MAKES)
def test_a_part_of_a_gang_is_paid_in_no_tick_but_the_one_that_asked_for_it(
    events: list[Event], fallback: bool, make: Callable[..., ControllerSettings]
) -> None:
    world = World(made(make, fallback, gang_window_s=WINDOW_S))
    live(world, events, forbidden=("outage", "lost-actions"))
    for request, answer in world.asked:
        assert not answer.message or all(world.nodes[key].ended_at == request.asked_at for key in answer.ids)
    refused = {key for _, answer in world.asked if answer.message for key in answer.ids}
    state = world.tick().state
    assert {key for key, one in state.instances.items() if one.given_back} <= refused


@few(25)
@given(events=st.lists(EVENTS, max_size=14), gap=st.integers(-60, 120), has_market=st.booleans())
def test_no_node_runs_outside_the_hours_of_its_place(events: list[Event], gap: int, has_market: bool) -> None:
    first = OpeningHours(start=START + 30 * MINUTE, end=START + 200 * MINUTE)
    second = OpeningHours(start=first.end + gap * MINUTE, end=first.end + (gap + 150) * MINUTE)
    places = {"block 1": place(1, "az1", "on-demand", 0.0), "block 2": place(2, "az2", "on-demand", 0.0)}
    places |= {"market": place(3, "az1", "on-demand", 30.0)} if has_market else {}
    hours = {"block 1": first, "block 2": second}
    prices = {"on-demand": {"p4d.24xlarge": 30.0}}
    world = World(settings(places=places, opening_hours=hours, prices=prices, gang_window_s=WINDOW_S))
    # A person who raises a group's size starts nodes without the controller.
    live(world, events, forbidden=("outage", "lost-actions", "external-n"))
    for node in world.nodes.values():
        if node.place == "market":
            assert node.launched_at > second.end - timedelta(hours=1)
        else:
            assert hours[node.place].start <= node.launched_at
            assert (node.ended_at or world.now) <= hours[node.place].end - timedelta(minutes=30)


@few(25)
@given(events=st.lists(EVENTS, max_size=10), lacks=st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_a_refused_gang_is_asked_for_elsewhere_in_the_same_tick(events: list[Event], lacks: list[int]) -> None:
    world = World(rotating(gang_window_s=WINDOW_S), saves_after=timedelta(minutes=1))
    live(world, events, forbidden=("outage", "lost-actions", "actions", "bad", "hang"))
    world.boot, world.capacity = timedelta(minutes=8), {"spot": 9, "on-demand": 9, "capacity-block": 9}
    world.rooms = {("spot", f"subnet-az{zone}"): room for zone, room in enumerate(lacks, start=1)}
    for key in world.alive():
        world.vanish(key)
    world.advance(MINUTE)
    world.ask("stop")
    world.run_until("stopped", "done", "failed", "unfit")
    world.ask("run")
    before = len(world.asked)
    world.run(30)
    # The three spot places refuse, then all nodes come on demand.
    assert (world.phase, len(world.in_service())) == ("running", 3)
    assert {world.nodes[key].lifecycle for key in world.in_service()} == {"on-demand"}
    refused = [request for request, answer in world.asked[before:] if answer.message]
    assert len({request.asked_at for request in refused}) <= 2


@few(40)
@given(events=st.lists(EVENTS, max_size=14), make=MAKES)
def test_a_run_that_is_done_ends_at_zero_nodes_whatever_was_before(
    events: list[Event], make: Callable[..., ControllerSettings]
) -> None:
    world = World(make(gang_window_s=WINDOW_S))
    live(world, events)
    world.lose_actions, world.rooms = False, {}
    world.boot, world.capacity = timedelta(minutes=3), {"spot": 9, "on-demand": 9, "capacity-block": 9}
    world.advance(MINUTE)
    world.ask("run")
    # Bad nodes that were launched before may still end it.
    world.run_until("paused", "running", "done", "failed", "unfit")
    if world.phase == "paused":
        world.advance(MINUTE)
        world.ask("run")
        world.run_until("running", "done", "failed", "unfit")
    if world.phase == "running":
        # Its nodes may be on their way, or given back before all are there.
        for _ in range(2000):
            if world.phase in ENDED or (world.phase, len(world.in_service())) == ("running", 3):
                break
            world.run(1)
        assert len(world.in_service()) <= 3, "nodes beyond the gang are paid"
        world.say_all("done")
        world.run_until("done", "failed")
    world.run(15)
    assert (world.desired, world.alive()) == (0, [])


@few(30)
@given(events=st.lists(EVENTS, max_size=10), make=MAKES)
def test_dollars_never_decrease_and_the_state_survives_its_file(
    events: list[Event], make: Callable[..., ControllerSettings]
) -> None:
    world = World(make(fixed_usd_per_hour=0.1, volume_usd_per_node_hour=0.02))
    spent = 0.0
    for event in events:
        for _ in range(event.after):
            state = world.tick().state
            assert state.spent_usd >= spent
            spent = state.spent_usd
            world.advance(MINUTE)
        if world.state:
            assert read_state(to_text(world.state), "the state") == world.state
        happen(world, event)
