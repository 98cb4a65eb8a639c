"""The simulator: hours by hand, the published policies, the lower bound, deadlines, worth of the order of tries."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bootstrap.contract.pool_policy import Mode
from bootstrap.contract.pools import PoolEvent, came, reclaimed, refused
from optimizer.contract.errors import InvalidInputError
from optimizer.economics.simulation.omniscient import lower_bound
from optimizer.economics.simulation.policies import POLICIES
from optimizer.economics.simulation.replay import NAMES, PolicyFigures, replay
from optimizer.economics.simulation.simulator import DONE_HOURS, PoolsView, Runs, SimulatedJob, SimulatedRun, simulate
from optimizer.economics.simulation.traces import CapacityTrace, read_trace
from optimizer.performance.types import Bools


@pytest.fixture(autouse=True)
def _refusals_take_six_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("optimizer.economics.simulation.simulator", "bootstrap.contract.pool_policy"):
        monkeypatch.setattr(f"{module}.TRY_HOURS", 0.1)


HOUR = CapacityTrace(name="one-hour ticks", gap_s=3600, nodes=np.array([1, 1, 0, 1, 1, 1, 0, 0, 1, 1]))


def job(work: float, deadline: float, **changes: float) -> SimulatedJob:
    return SimulatedJob(
        work_hours=work, deadline_hours=deadline, **({"price_ratio": 4.0, "restart_hours": 0.5} | changes)
    )


def pools(*rows: str) -> Bools:
    """One run's pools, a row each."""
    return np.array([[[tick == "1" for tick in row] for row in rows]])


class Script:
    """Tries the pools in order while nothing runs; on-demand from a given hour."""

    def __init__(self, count: int, buys_at: float) -> None:
        self._count, self._buys_at = count, buys_at
        self.events: list[tuple[PoolEvent, int, float]] = []
        self._next = 0

    def keep(self, view: PoolsView) -> Mode:
        self._next = 0
        return Mode.ON_DEMAND if view.elapsed_hours >= self._buys_at else view.mode

    def next_try(self, view: PoolsView) -> int | None:
        if view.mode is not Mode.IDLE or view.elapsed_hours >= self._buys_at or self._next == self._count:
            return None
        self._next += 1
        return self._next - 1

    def note(self, event: PoolEvent, pool: int, hours: float) -> None:
        self.events.append((event, pool, hours))


def play(
    available: Bools,
    asked: SimulatedJob,
    policy: Script,
    *,
    prices: tuple[float, ...] = (0.25, 0.5),
) -> Runs:
    return simulate(available, 1.0, asked, np.array([prices]), lambda *_: policy, seed=0)


def test_hours_refusals_and_moves_are_as_counted_by_hand() -> None:
    script = Script(2, buys_at=4)
    played = play(pools("0010" + "0" * 4, "1100" + "0" * 4), job(4, 8), script)
    # Pool 0 refuses for 0.1 h; pool 1 gives 1.9 h, 0.5 of them restart. Pool 0 gives an hour, half of it restart.
    assert played.spot_hours[0] == pytest.approx(1.9 + 1.0)
    # Two refusals at 3 h; from 4 h on-demand: a restart and the rest of 4 h of work.
    assert played.on_demand_hours[0] == pytest.approx(0.5 + 4 - 1.4 - 0.5)
    assert played.cost[0] == pytest.approx(1.9 * 0.5 + 0.25 + 2.6)
    assert played.refusals is not None and played.moves is not None
    assert (played.refusals[0], played.moves[0], played.interruptions[0]) == (3, 1, 2)
    assert [(event, pool) for event, pool, _ in script.events] == [
        (refused, 0),
        (came, 1),
        (reclaimed, 1),
        (came, 0),
        (reclaimed, 0),
        (refused, 0),
        (refused, 1),
    ]


def test_an_interruption_loses_work_since_the_checkpoint_and_never_more_than_the_node_did() -> None:
    def restarted(checkpoint_hours: float, capacity: int) -> float:
        """On-demand hours of a run that is reclaimed after ``capacity`` hours."""
        asked = job(4, 24, checkpoint_hours=checkpoint_hours)
        row = "1" * capacity + "0" * (24 - capacity)
        return float(play(pools(row), asked, Script(1, capacity), prices=(0.25,)).on_demand_hours[0])

    # The restart, the half hour of work that the spot nodes' restart took, and lost work.
    assert 0 < restarted(2.0, 4) - 0.5 - 0.5 < 2
    assert restarted(1e3, 1) == pytest.approx(0.5 + 4)


def test_on_demand_costs_one() -> None:
    (row,) = replay([HOUR], job(4, 6), ["on_demand"], starts=5, seed=0)
    assert row.mean_normalised_cost == row.normalised_cost_p95 == 1 and row.missed_fraction == 0


def published(name: str, row: str) -> str:
    """Modes that a policy takes in one run with 4 h of work in 12 h, a letter a tick."""
    taken: list[str] = []

    class Recorded(SimulatedRun):
        def advance(self, hours: float) -> None:
            if hours > 0.5 and self.work > DONE_HOURS:
                taken.append({Mode.IDLE: "i", Mode.ON_DEMAND: "d", Mode.SPOT: "s"}[self.mode])
            super().advance(hours)

    asked = job(4, 12)
    prices, policy = [{0: 0.25}] * len(row), POLICIES[name](1, asked)
    Recorded(pools(row)[0].tolist(), 1.0, asked, prices, policy, [0.0]).play()
    return "".join(taken)


def test_greedy_waits_until_work_a_tick_and_a_restart_are_left() -> None:
    assert published("greedy", "000000000000") == "iiiiiiiddddd"
    assert published("greedy", "000000011111") == "iiiiiiiddddd"  # and never goes back
    assert published("greedy", "111110000000") == "sssss"
    # Spot nodes that work may run on.
    assert published("greedy", "000000111111") == "iiiiiisssss"


def test_uniform_progress_follows_its_rules() -> None:
    # Behind from the second tick on; on-demand until two restarts (1 h) ahead of pace, 1/3; without spot it stays.
    assert published("uniform_progress", "000000000000") == "iddddd"
    # Spot comes while it is behind the hysteresis: stays; with 1.5 h done at 4 h, 1.67 h are asked; 2.5 h do.
    assert published("uniform_progress", "000111111111").startswith("idds")
    assert published("uniform_progress", "111000000000")[:7] == "sssiiii"


def cheapest(rows: tuple[str, ...], asked: SimulatedJob, prices: tuple[float, ...]) -> float:
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
    bound = lower_bound(pools(*rows), 3600, asked, np.array([prices])).cost[0]
    optimum = cheapest(rows, asked, prices)
    assert bound <= optimum + 1e-6
    assert restart or optimum <= bound + 1e-6


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
    bound = lower_bound(pools(*rows), gap_hours * 3600, asked, np.array([prices])).cost[0]
    for name, new_policy in POLICIES.items():
        runs = simulate(pools(*rows), gap_hours, asked, np.array([prices]), new_policy, seed=0)
        assert name in ("spot_only", "fallback") or not runs.late[0], name
        assert runs.late[0] or bound <= runs.cost[0] + 1e-6, name


def random_traces(seed: int, stays: tuple[float, ...]) -> list[CapacityTrace]:
    """Pools with these mean stays, h, which are empty for two hours at a time; 400 h in ticks of ten minutes."""
    random = np.random.default_rng(seed)
    traces = []
    for place, stay in enumerate(stays):
        lengths = np.ceil(random.exponential(np.tile([stay * 6, 12.0], 4000)) + 0.01).astype(int)
        nodes = np.repeat(np.tile([4, 1], 4000), lengths)[:2400]
        traces.append(CapacityTrace(name=f"pool {place}", gap_s=600, nodes=nodes))
    return traces


def costs(traces: list[CapacityTrace], asked: SimulatedJob, ratios: tuple[float, ...]) -> dict[str, PolicyFigures]:
    rows = replay(traces, asked, NAMES, price_ratios=ratios, together=True, starts=40, seed=0, nodes=4)
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


def lomax_pools(seed: int, count: int, hours: float) -> list[CapacityTrace]:
    """Pools that lose and get capacity at the rate 1 / (age + 0.4 h), in ticks of five minutes."""
    random = np.random.default_rng(seed)
    traces = []
    for number in range(count):
        lengths = np.ceil(np.minimum(0.4 * (1 / random.random(2000) - 1), 24) * 12).astype(np.int64)
        nodes = np.repeat(np.arange(2000) % 2, lengths)[: int(hours * 12)]
        traces.append(CapacityTrace(name=f"pool-{number}", gap_s=300, nodes=nodes))
    return traces


def test_traces_that_do_not_fit_together_are_refused() -> None:
    ones = np.ones(100, dtype=np.int64)

    def together(*traces: CapacityTrace) -> None:
        replay(traces, job(4, 9), ["greedy"], together=True, starts=2, seed=0)

    with pytest.raises(InvalidInputError, match="ticks of 300 s, 600 s"):
        together(CapacityTrace(name="a", gap_s=300, nodes=ones), CapacityTrace(name="b", gap_s=600, nodes=ones))
    days = [
        CapacityTrace(name=str(day), gap_s=600, nodes=ones, start_time=datetime(2025, 10, day, tzinfo=UTC))
        for day in (4, 5)
    ]
    with pytest.raises(InvalidInputError, match="begin at 2025-10-04"):
        together(*days)
    with pytest.raises(InvalidInputError, match="trace b lasts 8"):
        together(CapacityTrace(name="a", gap_s=600, nodes=ones), CapacityTrace(name="b", gap_s=600, nodes=ones[:50]))


def test_a_trace_has_the_same_starts_whatever_the_others_are_and_processes_change_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces = [HOUR, CapacityTrace(name="minutes", gap_s=60, nodes=np.arange(2000) // 50 % 2)]

    def play_all(traces: list[CapacityTrace], processes: int) -> list[PolicyFigures]:
        return replay(traces, job(3, 8), NAMES, starts=4, seed=0, processes=processes)

    rows = play_all(traces, 1)
    assert [(row.trace, row.policy) for row in rows] == [(trace.name, name) for trace in traces for name in NAMES]
    assert play_all(traces[1:], 1) == rows[len(NAMES) :]
    monkeypatch.setattr("optimizer.economics.simulation.replay._WORTH_PROCESSES", 0)
    assert play_all(traces, 2) == rows


def test_one_pool_is_cheaper_than_the_published_policies_and_never_late() -> None:
    traces = lomax_pools(5, 3, 400)
    cost: dict[str, float] = {}
    for name in ("greedy", "uniform_progress", "adaptive", "omniscient"):
        rows = replay(traces, job(48, 57.6, price_ratio=3.3, restart_hours=0.2), [name], starts=30, seed=0)
        cost[name] = float(np.mean([row.mean_normalised_cost for row in rows]))
    assert cost["omniscient"] < cost["adaptive"] < 0.98 * min(cost["greedy"], cost["uniform_progress"])
    uncertain = job(48, 57.6, price_ratio=3.3, restart_hours=0.2, checkpoint_hours=0.5)
    rows = replay(traces, uncertain, ["adaptive"], starts=60, seed=0)
    assert [row.missed_fraction for row in rows] == [0, 0, 0]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[1, 0", "is not JSON"),
        ('{"data": [1]}', "metadata.gap_seconds: missing"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "metadata.gap_seconds: must be above 0"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, -1]}', "data.1: must be at least 0"),
        ('{"metadata": {"gap_seconds": 60}, "data": []}', "data: must have at least 1 entry"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_fault(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=named):
        read_trace(path)


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="lasts 10 h"):
        replay([HOUR], job(4, 11), ["greedy"], starts=1, seed=0)
    with pytest.raises(InvalidInputError, match=r"work and one restart, 48\.5 h"):
        job(48, 48.2)
    with pytest.raises(InvalidInputError, match="No such file"):
        read_trace(tmp_path / "absent.json")
    (tmp_path / "t.json").write_text(json.dumps({"metadata": {"gap_seconds": 60, "nodes": 2}, "data": [2, 0]}))
    assert read_trace(tmp_path / "t.json").nodes.tolist() == [2, 0]
