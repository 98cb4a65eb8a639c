"""``gpufleet simulate``: DESIGN's columns in every format, and errors with the right exit status."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from optimizer.cli import cli
from optimizer.contract.errors import InvalidInputError

ASKED = ("--work-hours", "6", "--deadline-hours", "9h", "--starts", "20")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "pool.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1, 1, 1, 1, 0, 2] * 30}))
    return str(path)


def simulate(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["simulate", *arguments, *ASKED], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_row_a_trace_and_policy_with_designs_fields(trace: str, tmp_path: Path) -> None:
    second = tmp_path / "second.json"
    second.write_text(json.dumps({"metadata": {"gap_seconds": 3600}, "data": [0] * 30}))
    rows = json.loads(simulate("--trace", trace, str(second), "--format", "json"))
    assert {(row["trace"], row["policy"]) for row in rows} >= {("pool.json", "greedy"), ("second.json", "omniscient")}
    by_name = {(row["trace"], row["policy"]): row for row in rows}
    for row in rows:
        assert {"mean_normalised_cost", "missed_fraction", "spot_hours", "on_demand_hours", "interruptions"} <= set(row)
    assert by_name["second.json", "greedy"]["mean_normalised_cost"] == 1
    assert by_name["second.json", "spot_only"]["missed_fraction"] == 1
    cheap = by_name["pool.json", "greedy"]
    assert by_name["pool.json", "omniscient"]["mean_normalised_cost"] <= cheap["mean_normalised_cost"] < 0.9
    as_csv = list(csv.DictReader(io.StringIO(simulate("--trace", trace, "--policy", "greedy", "--format", "csv"))))
    assert [float(row["mean_normalised_cost"]) for row in as_csv] == [cheap["mean_normalised_cost"]]
    assert "Means over 2 traces" in simulate("--trace", trace, "--trace", str(second))


def test_errors_of_the_user(trace: str) -> None:
    with pytest.raises(InvalidInputError, match="no trace is given"):
        simulate()
    with pytest.raises(InvalidInputError, match="is given twice"):
        simulate(trace, trace)
    wrong = CliRunner().invoke(cli, ["simulate", trace, "--work-hours", "long", "--deadline-hours", "9"])
    assert wrong.exit_code == 2 and "not a duration" in wrong.stderr
    endless = CliRunner().invoke(cli, ["simulate", trace, "--work-hours", "1", "--restart-hours", "nan"])
    assert endless.exit_code == 2 and "not a finite number" in endless.stderr


def test_one_run_in_the_pools_of_all_traces(trace: str, tmp_path: Path) -> None:
    second = tmp_path / "second.json"
    second.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [0, 2, 2, 2, 2, 2] * 30}))
    pools = (trace, str(second), "--together")
    rows = {row["policy"]: row for row in json.loads(simulate(*pools, "--format", "json"))}
    assert {row["trace"] for row in rows.values()} == {"2 traces"} and set(rows) >= {"adaptive", "omniscient"}
    assert rows["omniscient"]["mean_normalised_cost"] <= rows["adaptive"]["mean_normalised_cost"] < 0.75
    assert rows["adaptive"]["moves"] > 0 and rows["omniscient"]["moves"] is None
    gangs = {row["policy"]: row for row in json.loads(simulate(*pools, "--nodes", "2", "--format", "json"))}
    assert gangs["omniscient"]["mean_normalised_cost"] > rows["omniscient"]["mean_normalised_cost"]
