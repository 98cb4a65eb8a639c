"""``recommend --compare-clouds`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.optimizer.commands.conftest import Gpufleet

REQUEST = (
    *("--model", "llama-3.1-8b", "--tokens", "1B", "--seq-len", "4096", "--max-nodes", "2"),
    *("--instance-type", "p4d.24xlarge", "--deadline", "48h"),
)


@pytest.fixture
def run(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpufleet:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *arguments: gpufleet("recommend", *REQUEST, *arguments)


def test_json_gains_one_field_and_only_with_the_flag(run: Gpufleet, tmp_path: Path) -> None:
    saved = tmp_path / "answer.json"
    code, out, err = run("--compare-clouds", "--format", "json", "--save", str(saved))
    found = json.loads(out)
    assert code == 0 and json.loads(saved.read_text(encoding="utf-8")) == found
    _, plain, _ = run("--format", "json")
    assert set(found) - set(json.loads(plain)) == {"other_clouds"}
    assert found["plans"] == json.loads(plain)["plans"]
    others = found["other_clouds"]
    assert set(others) == {"basis", "note", "best_aws", "best_aws_on_demand", "rows", "not_compared"}
    assert others["best_aws"]["compute_usd"] == found["plans"][0]["cost_usd"]["breakdown"]["compute"]
    for row in others["rows"]:
        assert row["price_source"] and row["price_as_of"] and row["cloud"] in ("azure", "tencent", "alibaba")
        assert row["keeps_deadline"] == (row["hours_p95"] <= 48)
        assert row["ratio_to_best_aws"] == round(row["compute_usd_expected"] / others["best_aws"]["compute_usd"], 3)
    assert "note: Azure prices: Azure Retail Prices API" in err


def test_the_table_says_what_is_compared_and_that_aws_alone_is_provisioned(run: Gpufleet) -> None:
    code, out, err = run("--compare-clouds")
    assert code == 0
    assert "Other clouds, the best fleet of each type" in out and "Standard_ND96isr_H100_v5" in out
    assert "best AWS plan: " in out and "compute only: nodes at on-demand prices" in out
    assert "gpufleet provisions on AWS only" in out
    assert "retired on 2025-09-30" in out and "V100 does not compute in bf16" in out
    assert "38 of 104 Tencent Cloud rows are unpriced" in err


def test_csv_stays_the_plans(run: Gpufleet) -> None:
    _, with_flag, _ = run("--compare-clouds", "--format", "csv")
    _, without, _ = run("--format", "csv")
    assert with_flag == without


def test_other_clouds_are_shown_where_no_aws_fleet_keeps_the_limits(run: Gpufleet) -> None:
    code, out, err = run("--compare-clouds", "--budget", "1")
    assert code == 3 and "no fleet trains" in err
    assert "best AWS plan: none" in out and "Standard_ND96isr_H100_v5" in out
