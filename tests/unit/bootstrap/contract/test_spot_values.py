"""Finite-horizon values: when a run without nodes waits, what spot saves a run on demand, the table's edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bootstrap.contract.spot_values import Delays, Terms, should_wait, spot_saving

TERMS = Terms(
    work_hours=48.0,
    deadline_hours=57.6,
    spot_price=0.3,
    delays=Delays(restart_hours=0.2, restart_bound_hours=0.4, lost_bound_hours=0.25),
    return_factor=1.0,
)


def waits(*, slack: float, drought: float, work: float = 30.0, terms: Terms = TERMS) -> bool:
    return should_wait(terms, work_hours=work, slack_hours=slack, drought_hours=drought)


def saving(*, slack: float, age: float, work: float = 30.0, terms: Terms = TERMS) -> float:
    return spot_saving(terms, work_hours=work, slack_hours=slack, age_hours=age)


def test_a_run_waits_while_slack_is_plenty_and_the_drought_young() -> None:
    assert [waits(slack=slack, drought=0.1) for slack in (8.0, 1.0)] == [True, False]
    assert [waits(slack=5.0, drought=drought) for drought in (0.1, 20.0)] == [True, False]
    # With next to no work left, slack has no other use.
    assert waits(slack=2.0, drought=20.0, work=1.0)


def test_many_pools_make_a_longer_drought_worth_a_wait() -> None:
    many = replace(TERMS, return_factor=2.5**3)
    assert [waits(slack=5.0, drought=3.0, terms=terms) for terms in (TERMS, many)] == [False, True]


def test_capacity_that_has_lasted_saves_more_and_little_slack_saves_nothing() -> None:
    assert saving(slack=3.0, age=0.1) < 0 < saving(slack=3.0, age=1.0) < saving(slack=3.0, age=14.0)
    assert saving(slack=0.8, age=14.0) < 0, "a slow launch, lost work and a restart do not fit"
    assert saving(slack=8.0, age=14.0, terms=replace(TERMS, spot_price=1.0)) < 0


@pytest.mark.parametrize("deadline_hours", [48.4, 96.0, 500.0])
def test_the_table_covers_all_of_a_run(deadline_hours: float) -> None:
    terms = replace(TERMS, deadline_hours=deadline_hours)
    for work in (0.0, 48.0, 60.0):
        for slack in (-1.0, 0.0, deadline_hours):
            assert waits(slack=slack, drought=1e4, work=work, terms=terms) in (True, False)
            assert abs(saving(slack=slack, age=1e4, work=work, terms=terms)) <= 1e6
