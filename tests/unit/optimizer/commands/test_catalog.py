from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.catalog import refresh, snapshot
from optimizer.catalog.snapshot import FILE, SHIPPED, read_snapshot, write_snapshot
from optimizer.catalog.sources import Skipped
from optimizer.catalog.sources.price_list import InstancePrice
from optimizer.catalog.tables import Tables
from tests.unit.optimizer.commands.conftest import Gpufleet


@pytest.fixture
def run(gpufleet: Gpufleet) -> Gpufleet:
    return lambda *arguments: gpufleet("catalog", *arguments)


def test_show_gives_sources_dates_and_ages(run: Gpufleet) -> None:
    code, out, _ = run("show", "--format", "json")
    shown = json.loads(out)
    assert code == 0
    assert shown["catalog"] == "shipped" and shown["offers"] == 892 and shown["instance_types"] == 68
    spot = [source for source in shown["sources"] if source["name"] == "spot prices"]
    assert [(source["origin"], source["as_of"], source["ttl_days"], source["rows"]) for source in spot] == [
        ("SkyPilot catalog v9", "2026-07-09", 1, 1259),
        ("advisor-derived", "2025-07-28", 30, 211),
    ]
    assert {source["stale"] for source in spot} == {"yes"} and spot[1]["age_days"] > 480


def test_verify_passes_the_shipped_catalog(run: Gpufleet) -> None:
    code, out, err = run("verify")
    assert (code, out) == (0, "")
    assert "68 types, 892 offers, 78 unit prices: no broken invariants" in err


def test_verify_lists_every_violation_with_status_1(run: Gpufleet, tmp_path: Path) -> None:
    tables = Tables.of(shipped := read_snapshot(SHIPPED))
    offers = tables.offers
    broken = [index for index, row in enumerate(offers) if row.on_demand and row.spot][:2]
    made_at = shipped.made_at.replace(year=2999)  # a reading refused what verify passed
    facts: tuple[dict[str, Any], ...] = {"usd_per_hour": -1.0}, {"as_of": made_at.date()}
    for index, kind, fact in zip(broken, ("on_demand", "spot"), facts, strict=True):
        offers[index] = replace(offers[index], **{kind: replace(getattr(offers[index], kind), **fact)})
    write_snapshot(tmp_path, tables, made_at=made_at)
    code, out, err = run("verify", str(tmp_path), "--format", "json")
    # The negative price also makes that offer's other prices dearer than on-demand.
    rules = {(row["place"], row["rule"].split(" and ")[0]) for row in json.loads(out)}
    first, second = (f"{offers[index].instance.name} in {offers[index].region}" for index in broken)
    assert {(first, "a price is above 0 USD per hour"), (second, "a price has a source")} <= rules
    assert {place for place, _ in rules} == {first, second}
    assert code == 1 and f"{len(json.loads(out))} broken invariants" in err
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"vcpus":48', '"vcpus":"48"'))
    assert run("verify", str(tmp_path))[0] == 4  # a traceback


def test_refresh_reports_each_region_and_what_failed(
    run: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read_region(region: str, *_: Any, **__: Any) -> refresh.RegionAnswer:
        answer = refresh.RegionAnswer(region=region)
        if region == "us-east-1":
            answer.prices = {"p5.48xlarge": InstancePrice(on_demand=20, reserved_1yr=9)}
            answer.skipped = [Skipped(source="spot prices", place="p5.48xlarge in us-east-1a", reason="no price")]
        else:
            answer.failures = [Skipped("zones", region, "the account says no")]
        return answer

    monkeypatch.setattr(refresh, "read_region", read_region)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run("refresh", "--region", "us-east-1", "--region", "us-east-2", "--format", "json")
    assert code == 0
    first, second = json.loads(out)
    assert (first["region"], first["on_demand"], first["reserved_1yr"], first["failed"]) == ("us-east-1", 1, 1, 0)
    assert (second["on_demand"], second["failed"]) == (None, 1)
    assert "note: zones, us-east-2: the account says no; the last good data stays" in err
    assert "note: spot prices, p5.48xlarge in us-east-1a: no price" in err
    assert "note: spot price of p5.48xlarge in us-east-1: 22.9825 USD per hour" in err
    assert f"written to {snapshot.user_directory()}" in err
