from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from optimizer.catalog import load
from optimizer.catalog.snapshot import SHIPPED
from tests.unit.optimizer.commands.conftest import Gpufleet

DESIGNED = (
    "instance_type,region,gpu,gpu_count,gpu_memory_gib,vcpus,memory_gib,network_gbit_per_s,efa_cards,interconnect,"
    "on_demand_usd_per_hour,reserved_1yr_usd_per_hour,spot_usd_per_hour,spot_source,as_of"
)


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(gpufleet: Gpufleet) -> Gpufleet:
    return lambda *arguments: gpufleet("offers", *arguments)


def test_csv_begins_with_the_designed_columns_and_holds_every_offer(run: Gpufleet) -> None:
    code, out, _ = run("--format", "csv")
    assert code == 0
    assert out.splitlines()[0].startswith(DESIGNED + ",")
    rows = list(csv.DictReader(io.StringIO(out)))
    offers = load(SHIPPED).offers
    assert len(rows) == len(offers)
    assert len({(row["instance_type"], row["region"]) for row in rows}) == len(rows)
    for offer in offers:
        (row,) = (r for r in rows if (r["instance_type"], r["region"]) == (offer.instance.name, offer.region))
        assert row["on_demand_usd_per_hour"] == (repr(offer.on_demand.usd_per_hour) if offer.on_demand else "")
        assert row["spot_source"] == (offer.spot.source if offer.spot else "")


def test_filters_reach_the_selection(run: Gpufleet) -> None:
    filters = ("--gpu", "H100", "--count", "8..", "--memory", "80..", "--region", "us-*", "--type", "p5*")
    code, out, _ = run(*filters, "--max-price", "60", "--format", "json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["instance_type"], row["region"]) for row in rows] == [
        ("p5.48xlarge", "us-east-1"),
        ("p5.48xlarge", "us-east-2"),
        ("p5.48xlarge", "us-west-2"),
    ]
    assert rows[0]["on_demand_usd_per_hour"] == 55.04 and rows[0]["gpu_count"] == 8
    assert rows[0]["reserved_1yr_usd_per_hour"] is None
    assert (rows[0]["as_of"], rows[0]["spot_as_of"]) == ("2026-07-20", "2025-07-28")


def test_the_price_to_sort_by_can_be_chosen(run: Gpufleet) -> None:
    _, out, _ = run("--price", "spot", "--sort", "price", "--format", "json", "--max-price", "2")
    prices = [row["spot_usd_per_hour"] for row in json.loads(out)]
    assert prices == sorted(prices) and prices[-1] <= 2


def test_the_table_says_where_a_spot_price_comes_from(run: Gpufleet) -> None:
    code, out, err = run("--gpu", "H100", "--region", "us-east-1")
    assert code == 0
    assert "p5.48xlarge" in out and "55.04" in out and "advisor-derived" in out and ">20%" in out
    assert "note: spot prices (advisor-derived) are up to" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "H101"], "GPU 'H101' is not in the catalog"),
        (["--region", "us-east-9"], "did you mean us-east-"),
        (["--type", "p5.47xlarge"], "p5.48xlarge"),
        (["--count", "8-16"], "'8-16' is not a range"),
        (["--memory", "big"], "'big' is not a range"),
        (["--max-price", "0"], "0.0 is not in the range x>0"),
        (["--max-price", "cheap"], "'cheap' is not a valid float"),
        (["--sort", "colour"], "colour"),
        (["--max-age", "-1"], "-1"),
    ],
)
def test_wrong_input_ends_with_status_2_and_what_is_right(run: Gpufleet, arguments: list[str], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(("output_format", "stdout"), [("table", ""), ("json", "[]\n")])
def test_nothing_found_ends_with_status_3_and_an_empty_result(run: Gpufleet, output_format: str, stdout: str) -> None:
    code, out, err = run("--gpu", "H100", "--count", "16", "--format", output_format)
    assert (code, out) == (3, stdout)
    assert "none of 892 offers passes all the filters" in err


def test_too_old_a_price_ends_with_status_4(run: Gpufleet) -> None:
    code, out, err = run("--gpu", "H100", "--max-age", "7")
    assert (code, out) == (4, "")
    assert "older than --max-age 7 days" in err and "next: gpufleet catalog refresh" in err


def test_an_empty_catalog_ends_with_status_4(run: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"")
    monkeypatch.setenv("GPUFLEET_CATALOG", str(tmp_path))
    code, out, err = run()
    assert (code, out) == (4, "")
    assert f"catalog {tmp_path}/manifest.json is not a catalog manifest" in err
    assert "limit:" in err and "why:" in err and "next: unset GPUFLEET_CATALOG" in err


def test_help_has_an_example(run: Gpufleet) -> None:
    code, out, _ = run("--help")
    assert code == 0 and "Example:\n    gpufleet offers --gpu H100" in out


def test_the_table_is_whole_on_a_narrow_terminal(run: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = run("--type", "p6-b300.48xlarge", "--region", "us-east-1")
    assert "…" not in out
    assert "p6-b300.48xlarge" in out and "142.4" in out
