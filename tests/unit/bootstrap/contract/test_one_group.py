"""When one group waits, buys and looks at spot again: the table's answers, its size and its edges."""

from __future__ import annotations

import zlib
from base64 import b85encode
from dataclasses import replace

import pytest

from bootstrap.contract.adaptive import Terms, slack_cells, work_cells
from bootstrap.contract.one_group import ON_DEMAND, WAITING, changes, pack, table, unpack

TERMS = Terms(
    work_hours=48.0,
    deadline_hours=57.6,
    price_ratio=3.3,
    restart_hours=0.2,
    restart_bound_hours=0.4,
    lost_bound_hours=0.25,
)


def change(mode: int, *, slack: float, age: float, work: float = 30.0, terms: Terms = TERMS) -> bool:
    return changes(terms, mode, work_hours=work, left_hours=work + slack, age_hours=age)


def test_a_group_waits_while_slack_is_plenty_and_the_drought_young() -> None:
    assert [change(WAITING, slack=slack, age=0.1) for slack in (8.0, 0.5)] == [False, True]
    assert [change(WAITING, slack=8.0, age=age) for age in (0.1, 10.0)] == [False, True]
    # With next to no work left, slack has no other use.
    assert not change(WAITING, slack=3.0, age=10.0, work=1.0)


def test_on_demand_nodes_end_for_a_look_long_after_the_last_refusal_where_the_deadline_allows_two_launches() -> None:
    assert [change(ON_DEMAND, slack=5.0, age=age) for age in (0.1, 5.0)] == [False, True]
    # Two slow launches, lost work and the look.
    assert [change(ON_DEMAND, slack=slack, age=30.0) for slack in (1.0, 3.0)] == [False, True]
    # The end of the work pays no restart.
    assert not change(ON_DEMAND, slack=5.0, age=30.0, work=0.2)


def test_no_nodes_end_for_a_look_at_spot_that_saves_nothing() -> None:
    assert change(ON_DEMAND, slack=8.0, age=30.0)
    assert not change(ON_DEMAND, slack=8.0, age=30.0, terms=replace(TERMS, price_ratio=1.0))


@pytest.mark.parametrize("deadline_hours", [48.4, 50.0, 96.0, 500.0])
def test_the_table_covers_all_of_a_run_and_stays_small(deadline_hours: float) -> None:
    terms = replace(TERMS, deadline_hours=deadline_hours)
    assert len(table(terms)) == (work_cells(terms) + 1) * (slack_cells(terms) + 1) * 2 * 5 < 60_000
    for work in (0.0, 48.0, 60.0):
        for slack in (-1.0, 0.0, deadline_hours):
            assert change(WAITING, slack=slack, age=1e4, work=work, terms=terms) in (True, False)


@pytest.mark.parametrize("terms", [TERMS, replace(TERMS, work_hours=168.0, deadline_hours=400.0)])
def test_a_packed_table_is_short_and_decides_the_same(terms: Terms) -> None:
    assert len(pack(terms)) < 700
    assert unpack(pack(terms), terms) == table(terms)
    assert '"' not in pack(terms) and "\\" not in pack(terms)


def test_the_packed_table_is_what_decides() -> None:
    packed = b85encode(zlib.compress(bytes(1 - one for one in table(TERMS)))).decode()
    assert not change(WAITING, slack=8.0, age=0.1)
    assert changes(TERMS, WAITING, work_hours=30.0, left_hours=38.0, age_hours=0.1, packed=packed)


@pytest.mark.parametrize(
    "packed", ["no table", "\xe9", b85encode(b"no table").decode(), pack(replace(TERMS, work_hours=40.0))]
)
def test_a_table_of_another_version_is_computed_anew(packed: str) -> None:
    assert unpack(packed, TERMS) == table(TERMS)


def test_a_choice_that_saves_nothing_changes_nothing() -> None:
    # Spot cannot be launched any more, so waiting costs as much as buying, up to rounding.
    terms = replace(TERMS, lost_bound_hours=1.0)
    states = [(slack, age, work) for slack in (1.1, 1.4) for age in (0.1, 1.0, 3.0) for work in range(1, 48)]
    assert not [one for one in states if change(WAITING, slack=one[0], age=one[1], work=one[2], terms=terms)]
