"""The interval against a brute-force search for the cheapest one."""

from __future__ import annotations

import pytest

from bootstrap.training.saver import young_daly_interval_s


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [(1.5, 3600.0), (8.0, 6 * 3600.0), (0.1, 1800.0)])
def test_it_is_near_the_minimum_of_the_time_lost(stall_s: float, mtbf_s: float) -> None:
    def lost_share(interval_s: float) -> float:
        return stall_s / interval_s + interval_s / 2 / mtbf_s

    best = min((one / 10 for one in range(1, 100_000)), key=lost_share)
    assert young_daly_interval_s(stall_s=stall_s, mtbf_s=mtbf_s) == pytest.approx(best, rel=0.01)


def test_it_is_never_shorter_than_the_write() -> None:
    assert young_daly_interval_s(stall_s=0.01, mtbf_s=100, write_s=30) == 30
