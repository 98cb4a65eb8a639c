from __future__ import annotations

import csv
import io
import json
import math

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
    filters = ("--gpu", "H100", "--count", "8..", "--memory", "80..", "--region", "us-*", "--instance-type", "p5*")
    code, out, _ = run(*filters, "--format", "json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["instance_type"], row["region"]) for row in rows] == [
        ("p5.48xlarge", "us-east-1"),
        ("p5.48xlarge", "us-east-2"),
        ("p5.48xlarge", "us-west-2"),
        ("p5.48xlarge", "us-west-1"),
    ]
    assert rows[0]["on_demand_usd_per_hour"] == 55.04 and rows[0]["gpu_count"] == 8
    assert rows[0]["reserved_1yr_usd_per_hour"] is None
    assert (rows[0]["as_of"], rows[0]["spot_as_of"]) == ("2026-07-20", "2026-07-09")


def test_commitments_say_from_which_use_on_they_pay(run: Gpufleet) -> None:
    _, out, _ = run(
        "--instance-type", "g5.xlarge", "--instance-type", "p5.48xlarge", "--region", "us-east-1", "--format", "json"
    )
    rows = {row["instance_type"]: row for row in json.loads(out)}
    small, large = rows["g5.xlarge"], rows["p5.48xlarge"]
    share = small["reserved_1yr_usd_per_hour"] / small["on_demand_usd_per_hour"]
    assert small["reserved_1yr_break_even_hours"] == math.ceil(8760 * share)
    assert small["reserved_1yr_source"] == "AWS public price list"
    # Spot at less than the reservation is cheaper whatever the use; nobody published the other prices.
    assert small["spot_usd_per_hour"] < small["reserved_1yr_usd_per_hour"]
    assert small["reserved_1yr_spot_break_even_hours"] is small["capacity_block_usd_per_hour"] is None
    assert [large["capacity_block_usd_per_hour"], large["capacity_block_as_of"]] == [41.528, "2026-07-22"]
    assert large["reserved_1yr_break_even_hours"] is None
    code, out, _ = run("--price", "capacity-block", "--format", "csv")
    assert code == 0 and out.splitlines()[1].startswith("p4d.24xlarge,")


@pytest.mark.parametrize(
    ("flags", "says", "next_step"),
    [
        (("--cloud", "azure", "--price", "reserved"), "other clouds' rows have on-demand", "leave out --price"),
        (
            ("--instance-type", "p5.48xlarge", "--region", "us-east-1", "--price", "reserved"),
            "no source has one",
            "leave out",
        ),
    ],
)
def test_a_kind_of_price_that_no_row_has_is_missing_data(
    run: Gpufleet, flags: tuple[str, ...], says: str, next_step: str
) -> None:
    code, out, err = run(*flags)
    assert (code, out) == (4, "")
    assert f"has a {flags[flags.index('--price') + 1]} price" in err
    assert says in err and next_step in err


def test_a_kind_of_price_that_some_rows_have_is_no_error(run: Gpufleet) -> None:
    code, out, _ = run("--cloud", "all", "--price", "reserved", "--gpu", "V100", "--format", "json")
    clouds = [row["cloud"] for row in json.loads(out) if row["reserved_1yr_usd_per_hour"] is None]
    assert code == 0 and "tencent" in clouds


def test_the_table_says_where_a_spot_price_comes_from(run: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run("--gpu", "H100", "--region", "us-east-1")
    assert code == 0
    assert "p5.48xlarge" in out and "17.25" in out and "SkyPilot catalog v9" in out and ">20%" in out
    assert err.splitlines()[-1] == "truer: gpufleet catalog refresh; 6 kinds of data are old"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--instance-type", "p5.47xlarge"], "p5.48xlarge"),
        (["--count", "8-16"], "'8-16' is not a range"),
        (["--region", ""], "region '' is not in the catalog"),
        (["--region", "mars-*"], "region 'mars-*' is not in the catalog"),
        (["--instance-type", "p99*"], "instance type 'p99*' is not in the catalog"),
        (["--cloud", "gcp"], "'gcp' is not one of"),
        (["--cloud", "azure", "--region", "us-east-1"], "region 'us-east-1' is not in the catalog"),
        (["--cloud", "azure", "--gpu", "H200x"], "GPU 'H200x' is not in the catalog"),
        (["--cloud", "tencent", "--instance-type", "GN7.2XLARGE31"], "did you mean GN7.2XLARGE32"),
        (["--price", "colour"], "colour"),
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
    assert "no offer of 892 passes all the filters" in err


def test_aws_rows_are_the_same_with_and_without_other_clouds(run: Gpufleet) -> None:
    _, alone, _ = run("--format", "csv")
    _, together, _ = run("--cloud", "all", "--format", "csv")
    assert alone.splitlines()[0] == together.splitlines()[0]
    rows = list(csv.DictReader(io.StringIO(together)))
    assert {row["cloud"] for row in rows} == {"aws", "azure", "tencent", "alibaba"}
    of_aws = [row for row in rows if row["cloud"] == "aws"]
    assert of_aws == list(csv.DictReader(io.StringIO(alone)))


def test_another_cloud_has_facts_price_source_and_date(run: Gpufleet) -> None:
    code, out, err = run(
        "--cloud", "azure", "--instance-type", "standard_nd96isr_h100*", "--region", "eastus", "--format", "json"
    )
    (row,) = json.loads(out)
    assert code == 0
    assert (row["cloud"], row["gpu"], row["gpu_count"], row["gpu_memory_gib"]) == ("azure", "H100", 8, 80)
    assert (row["vcpus"], row["memory_gib"], row["network_gbit_per_s"]) == (96, 1900, 3200)
    assert (row["fabric"], row["interconnect"], row["efa_cards"]) == ("infiniband", "nvswitch", 0)
    assert (row["on_demand_usd_per_hour"], row["as_of"]) == (98.32, "2026-06-18")
    assert row["on_demand_source"].startswith("Azure Retail Prices API")
    assert (row["nvme_gb"], row["network_cards"], row["spot_usd_per_hour"]) == (None, None, None)
    assert "note: Azure prices are up to" in err and "provisions on AWS only" in err
    assert "AWS public price list" not in err


def test_a_price_nobody_published_is_a_dash_with_its_reason(run: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    _, out, err = run("--cloud", "tencent", "--instance-type", "GN10Xp.20XLARGE320", "--region", "eu-frankfurt")
    line = next(line for line in out.splitlines() if "GN10Xp" in line)
    assert " - " in line and "mainland China" in line
    assert "38 of 104 Tencent Cloud rows are unpriced" in err
    _, out, _ = run("--cloud", "azure", "--instance-type", "Standard_NC6s_v3", "--format", "json")
    assert all("retired on 2025-09-30" in row["note"] for row in json.loads(out))
    assert all(row["network_gbit_per_s"] is None for row in json.loads(out))
