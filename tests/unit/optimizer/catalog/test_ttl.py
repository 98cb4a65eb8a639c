from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta

from optimizer.catalog import Catalog, ttl


def test_every_source_but_a_datasheet_ages(catalog: Catalog) -> None:
    for source in catalog.sources:
        assert (ttl.source_ttl_days(source.name, source.origin) is None) == (source.name == "GPU table")


def test_old_prices_and_reclaim_rates_are_said_with_age_and_dates(catalog: Catalog) -> None:
    lines = ttl.stale_lines(catalog, date(2026, 11, 21))
    assert lines == [
        "on-demand prices (SkyPilot catalog v9) are up to 135 days old: the oldest from 2026-07-09",
        "reserved prices (AWS public price list) are up to 304 days old: the oldest from 2026-01-21",
        "spot prices (SkyPilot catalog v9) are up to 135 days old: the oldest from 2026-07-09",
        "interruption bands (AWS Spot Advisor) are up to 481 days old: the oldest from 2025-07-28",
        "on-demand prices (AWS public price list) are up to 304 days old: the oldest from 2026-01-21, "
        "the newest from 2026-07-20",
        "spot prices (advisor-derived) are up to 481 days old: the oldest from 2025-07-28",
    ]


def test_a_price_is_fresh_to_the_last_day_of_its_life(catalog: Catalog) -> None:
    on_demand = next(s for s in catalog.sources if s.name == "on-demand prices")
    only = replace(catalog, sources=(on_demand,))
    last = on_demand.as_of + timedelta(days=ttl.DAYS_BY_FACT[on_demand.name])
    assert ttl.stale_lines(only, last) == []
    assert len(ttl.stale_lines(only, last + timedelta(days=1))) == 1
