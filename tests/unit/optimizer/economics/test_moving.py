"""Price of a move to another region."""

from __future__ import annotations

import pytest

from optimizer.catalog import load
from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.moving import price_move
from tests.plans import sample_plan

GIB = 2**30


def test_a_move_pays_for_saving_bytes_and_booting() -> None:
    catalog, old, new = load(), sample_plan(), sample_plan(region="us-west-2", zone_ids=["usw2-az1"])
    cost = price_move(catalog, old, new, gib=15.0, writes=60, copies=16)
    per_hour = old.cost_usd.expected / old.hours.expected
    write_usd = catalog.unit_price("s3-write-request", "us-west-2").usd
    assert cost.copy_usd == pytest.approx(15 * GIB / 1e9 * 0.02 + 60 * write_usd)
    assert cost.copy_hours * 3600 == pytest.approx(15 * GIB / (16 * 85e6))
    assert cost.drain_hours * 3600 == old.terminate_timeout_s
    assert cost.drain_usd == pytest.approx(cost.drain_hours * per_hour)
    assert cost.start_hours == RESTART_HOURS
    assert cost.usd == pytest.approx(cost.drain_usd + cost.copy_usd + cost.start_usd)
    assert cost.hours == pytest.approx(cost.drain_hours + cost.copy_hours + RESTART_HOURS)
