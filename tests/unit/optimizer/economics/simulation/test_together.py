"""Several pools together: hours by hand, the lower bound, deadlines, and what the order of tries is worth."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bootstrap.contract.pool_policy import Event, Mode
from optimizer.contract.errors import InvalidInputError
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.omniscient import lower_bound_together
from optimizer.economics.simulation.together import NAMES, TogetherResult, replay_together
from optimizer.economics.simulation.traces import Trace
from optimizer.economics.simulation.zone_policies import ZONE_POLICIES, NewPolicy, UniformProgress
from optimizer.economics.simulation.zones import Launching, ZoneRuns, ZoneView, simulate_together
from optimizer.performance.types import Bools

TRY = Launching(try_hours=0.1)


def job(work: float, deadline: float, **changes: float) -> Job:
    return Job(work_hours=work, deadline_hours=deadline, **({"price_ratio": 4.0, "restart_hours": 0.5} | changes))


def pools(*rows: str) -> Bools:
    """One run's pools, a row each."""
    return np.array([[[tick == "1" for tick in row] for row in rows]])


class Script:
    """Tries the pools in order while nothing runs; on-demand from a given hour."""

    beside = True

    def __init__(self, count: int, buys_at: float) -> None:
        self._count, self._buys_at = count, buys_at
        self.events: list[tuple[Event, int, float]] = []
        self._next = 0

    def keep(self, view: ZoneView) -> Mode:
        self._next = 0
        return Mode.ON_DEMAND if view.elapsed_hours >= self._buys_at else view.mode

    def next_try(self, view: ZoneView) -> int | None:
        if view.mode is not Mode.IDLE or view.elapsed_hours >= self._buys_at or self._next == self._count:
            return None
        self._next += 1
        return self._next - 1

    def note(self, event: Event, pool: int, hours: float) -> None:
        self.events.append((event, pool, hours))


def play(
    available: Bools, asked: Job, policy: Script, *, prices: tuple[float, ...] = (0.25, 0.5), move_hours: float = 0.0
) -> ZoneRuns:
    launching = Launching(try_hours=TRY.try_hours, move_hours=move_hours)
    return simulate_together(available, 1.0, asked, launching, np.array([prices]), lambda *_: policy, seed=0)


def test_hours_refusals_and_moves_are_as_counted_by_hand() -> None:
    script = Script(2, buys_at=4)
    played = play(pools("0010" + "0" * 4, "1100" + "0" * 4), job(4, 8), script)
    # Pool 0 refuses for 0.1 h; pool 1 gives 1.9 h, 0.5 of them restart. Pool 0 gives an hour, half of it restart.
    assert played.runs.spot_hours[0] == pytest.approx(1.9 + 1.0)
    # Two refusals at 3 h; from 4 h on-demand: a restart and the rest of 4 h of work.
    assert played.runs.on_demand_hours[0] == pytest.approx(0.5 + 4 - 1.4 - 0.5)
    assert played.runs.cost[0] == pytest.approx(1.9 * 0.5 + 0.25 + 2.6)
    assert (played.refusals[0], played.moves[0], played.runs.interruptions[0]) == (3, 1, 2)
    assert [(event, pool) for event, pool, _ in script.events] == [
        (Event.REFUSED, 0),
        (Event.CAME, 1),
        (Event.RECLAIMED, 1),
        (Event.CAME, 0),
        (Event.RECLAIMED, 0),
        (Event.REFUSED, 0),
        (Event.REFUSED, 1),
    ]


class EndsFirst(Script):
    """On-demand nodes, which end at 2 h for a try of the first pool."""

    beside = False

    def next_try(self, view: ZoneView) -> int | None:
        self._next += 1
        return 0 if view.elapsed_hours == 2 and self._next == 1 else None


def test_nodes_that_end_before_a_try_load_again_where_it_is_refused() -> None:
    refused, given = (play(pools(row), job(4, 8), EndsFirst(1, 0), prices=(0.25,)) for row in ("0" * 8, "00110000"))
    assert refused.runs.on_demand_hours[0] == pytest.approx(2 + 0.5 + 2.5)
    assert refused.runs.cost[0] == pytest.approx(5.0)
    # From 2 h to 3 h spot, half of it restart; then on-demand nodes load again.
    assert (given.runs.spot_hours[0], given.runs.on_demand_hours[0]) == (1.0, pytest.approx(2 + 0.5 + 2.0))


def test_a_move_to_another_pool_takes_the_checkpoints_copy() -> None:
    row = "0010" + "0" * 4, "1100" + "0" * 4
    near, far = (play(pools(*row), job(4, 8), Script(2, 4), move_hours=hours) for hours in (0.0, 0.4))
    assert far.runs.on_demand_hours[0] == pytest.approx(near.runs.on_demand_hours[0] + 0.4)


def cheapest(rows: tuple[str, ...], asked: Job, prices: tuple[float, ...]) -> float:
    """Cost of the cheapest sequence of modes, of all there are; restarts are whole ticks."""
    rates = (0.0, 1.0, *prices)
    states = {(0, 0.0, asked.work_hours): 0.0}
    best = np.inf
    for tick in zip(*rows, strict=True):
        after: dict[tuple[int, float, float], float] = {}
        for ((mode, loading, work), cost), wanted in product(states.items(), range(len(rates))):
            if wanted >= 2 and tick[wanted - 2] == "0":
                continue
            wait = asked.restart_hours if wanted not in (mode, 0) else loading
            key = (0, 0.0, work) if wanted == 0 else (wanted, max(wait - 1, 0.0), work - (wait < 1))
            if key[2] <= 0:
                best = min(best, cost + rates[wanted])
            elif cost + rates[wanted] < after.get(key, np.inf):
                after[key] = cost + rates[wanted]
        states = after
    return float(best)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.tuples(*[st.text("01", min_size=16, max_size=16)] * 3),
    work=st.integers(3, 14),
    restart=st.sampled_from([0.0, 1.0]),
    prices=st.tuples(*[st.sampled_from([0.1, 0.3, 0.8])] * 3),
)
def test_the_lower_bound_is_below_the_optimum_and_equal_to_it_where_launches_are_free(
    rows: tuple[str, ...], work: int, restart: float, prices: tuple[float, ...]
) -> None:
    asked = job(work, 16, restart_hours=restart)
    bound = lower_bound_together(pools(*rows), 3600, asked, np.array([prices])).cost[0]
    optimum = cheapest(rows, asked, prices)
    assert bound <= optimum + 1e-6
    assert restart or optimum <= bound + 1e-6


@pytest.mark.parametrize("count", [1, 3])
def test_the_lower_bound_is_a_third_of_a_launch_below_the_optimum_on_average(count: int) -> None:
    random = np.random.default_rng(0)
    gaps = []
    for _ in range(60):
        # Stretches of three hours on average.
        changes = random.random((count, 16)) < 0.3
        available = (np.cumsum(changes, axis=1) + random.integers(0, 2, (count, 1))) % 2
        rows = tuple("".join(map(str, row)) for row in available)
        asked, prices = job(int(random.integers(3, 15)), 16, restart_hours=1.0), random.choice([0.1, 0.3, 0.8], count)
        bound = lower_bound_together(pools(*rows), 3600, asked, np.array([prices])).cost[0]
        gaps.append(cheapest(rows, asked, tuple(prices)) - bound)
    assert 0.0 < np.mean(gaps) < 0.4
    # On-demand nodes that bridge several stretches make it larger.
    assert np.quantile(gaps, 0.9) < 1.0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.tuples(*[st.text("01", min_size=24, max_size=24)] * 3),
    slack=st.floats(1.05, 3),
    checkpoint=st.sampled_from([0.0, 1.5]),
    gap_hours=st.sampled_from([1.0, 0.02]),
    prices=st.tuples(*[st.floats(0.1, 0.9)] * 3),
)
@example(  # capacity that goes after the work is done takes nothing back
    rows=("0" * 24, "0" * 21 + "110", "0" * 10 + "1" + "0" * 13),
    slack=2.0,
    checkpoint=1.5,
    gap_hours=0.02,
    prices=(0.5, 0.5, 0.5),
)
def test_no_policy_beats_the_bound_and_only_those_without_a_deadline_are_late(
    rows: tuple[str, ...], slack: float, checkpoint: float, gap_hours: float, prices: tuple[float, ...]
) -> None:
    deadline = 24 * gap_hours
    restart = 0.7 * gap_hours
    asked = job(
        (deadline - 2 * restart) / slack, deadline, restart_hours=restart, checkpoint_hours=checkpoint * gap_hours
    )
    bound = lower_bound_together(pools(*rows), gap_hours * 3600, asked, np.array([prices])).cost[0]
    for name, new_policy in ZONE_POLICIES.items():
        runs = simulate_together(pools(*rows), gap_hours, asked, TRY, np.array([prices]), new_policy, seed=0).runs
        assert name in ("spot_only", "fallback") or not runs.late[0], name
        assert runs.late[0] or bound <= runs.cost[0] + 1e-6, name


def random_traces(seed: int, stays: tuple[float, ...]) -> list[Trace]:
    """Pools with these mean stays, h, which are empty for two hours at a time; 400 h in ticks of ten minutes."""
    random = np.random.default_rng(seed)
    traces = []
    for place, stay in enumerate(stays):
        lengths = np.ceil(random.exponential(np.tile([stay * 6, 12.0], 4000)) + 0.01).astype(int)
        nodes = np.repeat(np.tile([4, 1], 4000), lengths)[:2400]
        traces.append(Trace(name=f"pool {place}", gap_s=600, nodes=nodes))
    return traces


def costs(traces: list[Trace], asked: Job, ratios: tuple[float, ...]) -> dict[str, TogetherResult]:
    rows = replay_together(traces, asked, NAMES, launching=TRY, price_ratios=ratios, starts=40, seed=0, nodes=4)
    return {row.policy: row for row in rows}


def test_adaptive_learns_which_pools_keep_their_nodes() -> None:
    rows = costs(random_traces(0, (0.3,) * 5 + (12.0, 12.0)), job(120, 240), (4.0,) * 7)
    assert rows["adaptive"].interruptions < 0.8 * rows["greedy"].interruptions
    assert rows["adaptive"].mean_normalised_cost < rows["greedy"].mean_normalised_cost
    assert rows["omniscient"].mean_normalised_cost <= rows["adaptive"].mean_normalised_cost
    assert rows["adaptive"].refusals and rows["omniscient"].refusals is None


def test_adaptive_takes_cheap_pools_and_moves_to_them() -> None:
    rows = costs(random_traces(1, (8.0, 8.0, 8.0, 8.0)), job(48, 72), (1.4, 1.6, 4.0, 8.0))
    assert rows["adaptive"].mean_normalised_cost < 0.6 * rows["greedy"].mean_normalised_cost
    assert rows["adaptive"].missed_fraction == 0


def test_adaptive_buys_on_demand_early_where_spot_will_not_do() -> None:
    traces = [replace(trace, nodes=4 * trace.nodes) for trace in lomax_pools(2, 1, 400)]
    rows = costs(traces, job(48, 57.6), (4.0,))
    assert rows["adaptive"].mean_normalised_cost < 0.9 * rows["greedy"].mean_normalised_cost


class PaceInOneGroup(UniformProgress):
    """Uniform Progress whose on-demand nodes end before spot is tried."""

    beside = False


def lomax_pools(seed: int, count: int, hours: float) -> list[Trace]:
    """Pools that lose and get capacity at the rate 1 / (age + 0.4 h), in ticks of five minutes."""
    random = np.random.default_rng(seed)
    traces = []
    for number in range(count):
        lengths = np.ceil(np.minimum(0.4 * (1 / random.random(2000) - 1), 24) * 12).astype(np.int64)
        nodes = np.repeat(np.arange(2000) % 2, lengths)[: int(hours * 12)]
        traces.append(Trace(name=f"pool-{number}", gap_s=300, nodes=nodes))
    return traces


@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_one_group_costs_less_than_uniform_progress_and_a_little_more_than_launches_beside_nodes(factor: float) -> None:
    asked = job(24, 24 * factor, price_ratio=3.3, restart_hours=0.2)
    traces = lomax_pools(3, 2, 300)
    windows = np.stack([[trace.nodes[first : first + 288 * 2] > 0 for trace in traces] for first in range(0, 2880, 96)])
    windows = windows[:, :, : round(asked.deadline_hours * 12)]
    prices = np.full((len(windows), 2), 1 / 3.3)

    def cost(new_policy: NewPolicy) -> float:
        played = simulate_together(windows, 1 / 12, asked, Launching(try_hours=2 / 60), prices, new_policy, seed=0)
        assert not played.runs.late.any()
        return float(played.runs.cost.mean())

    one_group, beside = (cost(ZONE_POLICIES[name]) for name in ("adaptive_one_group", "adaptive"))
    assert one_group < cost(PaceInOneGroup)
    assert beside < one_group < 1.1 * beside


def test_traces_that_do_not_fit_together_are_refused() -> None:
    ones = np.ones(100, dtype=np.int64)

    def replay(*traces: Trace) -> None:
        replay_together(
            traces, job(4, 9), ["greedy"], launching=TRY, price_ratios=[4.0] * len(traces), starts=2, seed=0
        )

    with pytest.raises(InvalidInputError, match="ticks of 300, 600 s"):
        replay(Trace(name="a", gap_s=300, nodes=ones), Trace(name="b", gap_s=600, nodes=ones))
    days = [
        Trace(name=str(day), gap_s=600, nodes=ones, start_time=datetime(2025, 10, day, tzinfo=UTC)) for day in (4, 5)
    ]
    with pytest.raises(InvalidInputError, match="begin at 2025-10-04"):
        replay(*days)
    with pytest.raises(InvalidInputError, match="trace b lasts 8"):
        replay(Trace(name="a", gap_s=600, nodes=ones), Trace(name="b", gap_s=600, nodes=ones[:50]))
