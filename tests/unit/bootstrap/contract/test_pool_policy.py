"""The adaptive policy for several pools: margins of the guard, and when on-demand nodes end for spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bootstrap.contract import pool_policy
from bootstrap.contract.pool_policy import Adaptive, Mode, RunView, has_no_time, may_launch, must_buy
from bootstrap.contract.pools import PoolRecord, came, reclaimed, refused
from bootstrap.contract.spot_values import Delays, Terms

HOUR = 3600.0
DELAYS = Delays(restart_hours=0.5, restart_bound_hours=1.0, lost_bound_hours=0.25)


def view(mode: Mode, left_hours: float, **changes: Any) -> RunView[str]:
    """Ten hours of work are left at the tenth hour; spot costs a third."""
    seen = RunView(
        delays=DELAYS,
        now_s=10 * HOUR,
        elapsed_hours=10.0,
        left_hours=left_hours,
        step_hours=0.1,
        work_hours=10.0,
        whole_hours=20.0,
        prices={"a": 0.3, "b": 0.3},
        mode=mode,
        pool="a",
        loading_hours=0.0,
    )
    return replace(seen, **changes)


@pytest.mark.parametrize(
    ("needed_hours", "holds"),
    [
        # A tick, the work, a slow launch.
        (0.1 + 10 + 1, lambda left: not has_no_time(view(Mode.IDLE, left))),
        (0.1 + 10 + 1, lambda left: not must_buy(view(Mode.ON_DEMAND, left))),
        # The work of spot nodes in the tick comes off; work that a reclaim takes comes on top.
        (0.1 + 9.9 + 0.25 + 1, lambda left: not must_buy(view(Mode.SPOT, left))),
        (0.1 + 10 + 0.25 + 1, lambda left: not must_buy(view(Mode.SPOT, left, loading_hours=0.5))),
        (0.1 + 0.5 + 10 + 0.25 + 1, lambda left: may_launch(view(Mode.IDLE, left))),
    ],
)
def test_margins(needed_hours: float, holds: Callable[[float], bool]) -> None:
    assert holds(needed_hours + 1e-6) and not holds(needed_hours - 1e-6)


def test_the_work_that_ends_within_the_tick_is_not_bought_again() -> None:
    assert not must_buy(view(Mode.SPOT, 0.01, work_hours=0.1))


def test_on_demand_nodes_end_for_spot_where_chance_and_stay_pay_the_restarts_and_the_deadline_allows_it() -> None:
    fresh = {"a": PoolRecord(), "b": PoolRecord()}
    lately = dict.fromkeys(fresh, refused(PoolRecord(), 8 * HOUR))
    flapping = PoolRecord()
    for quarter in range(24):
        flapping = reclaimed(came(flapping, quarter * HOUR / 4), (quarter / 4 + 0.05) * HOUR)
    seen = view(Mode.ON_DEMAND, 15.0)

    def tried(records: dict[str, PoolRecord], seen: RunView[str]) -> str | None:
        return Adaptive(records).next_try(seen)

    assert tried(fresh, seen) == "a"
    # Half of the capacity that is met an hour after a refusal is younger than 21 minutes: not worth two restarts.
    just_now = dict.fromkeys(fresh, refused(PoolRecord(), 9 * HOUR))
    assert (tried(lately, seen), tried(just_now, seen)) == ("a", None)
    assert tried({"a": flapping}, seen) is None
    assert tried(fresh, replace(seen, prices={"a": 0.9, "b": 0.9})) is None
    assert tried(fresh, replace(seen, left_hours=11.5)) is None


def test_spot_nodes_are_left_for_much_cheaper_spot() -> None:
    records = {"a": came(PoolRecord(), 0.0), "b": PoolRecord(), "c": PoolRecord()}
    seen = view(Mode.SPOT, 20.0, prices={"a": 0.7, "b": 0.2, "c": 0.68})
    policy = Adaptive(records)
    assert policy.may_leave(seen)
    assert list(iter(lambda: policy.next_try(seen), None)) == ["b"]
    assert not policy.may_leave(replace(seen, loading_hours=0.2))
    assert not policy.may_leave(replace(seen, prices=dict.fromkeys("abc", 0.3)))


def test_the_rates_at_which_empty_pools_come_back_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def should_wait(terms: Terms, *, work_hours: float, slack_hours: float, drought_hours: float) -> bool:
        assert (work_hours, slack_hours) == (10.0, 10.0)
        asked.append((terms.return_factor, drought_hours))
        return True

    monkeypatch.setattr(pool_policy, "should_wait", should_wait)
    # Five pools are empty since about two hours; another, whose spot costs more than on-demand, ends no wait.
    hours = {"a": 2.0, "b": 2.1, "c": 2.2, "d": 2.3, "e": 2.4, "dear": 1.0}
    records = {name: refused(PoolRecord(), (10 - since) * HOUR) for name, since in hours.items()}
    seen = view(Mode.IDLE, 20.0, prices=dict.fromkeys(hours, 0.3) | {"dear": 1.2})
    for names in (list(hours), ["a", "dear"]):
        assert Adaptive({name: records[name] for name in names}).keep(seen) is Mode.IDLE
    # The sum of the rates, 4.6 times the youngest one's, is 2.5 squared to the nearest power.
    assert [round(value, 6) for state in asked for value in state] == [6.25, 2.0, 1.0, 2.0]
