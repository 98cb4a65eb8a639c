"""The dashboard: CloudWatch takes it, it has the plan's numbers, its metrics are published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.dashboard import body
from infra.naming import Names
from tests.infra.deployed import deploy
from tests.plans import sample_plan

NAMES = Names(stack="dev", account_id="123456789012", region="us-east-1", partition="aws")
PLAN = sample_plan()


def widgets(ceiling_usd: float | None = 3000.0) -> list[dict[str, Any]]:
    return list(body(PLAN, NAMES, planned=PLAN, ceiling_usd=ceiling_usd)["widgets"])


def graph(title: str, ceiling_usd: float | None = 3000.0) -> dict[str, Any]:
    """Properties of the only graph whose title begins so."""
    every = [widget["properties"] for widget in widgets(ceiling_usd)]
    (properties,) = [properties for properties in every if properties.get("title", "").startswith(title)]
    return dict(properties)


def lines(title: str, ceiling_usd: float | None = 3000.0) -> list[float]:
    return [line["value"] for line in graph(title, ceiling_usd)["annotations"]["horizontal"]]


def test_cloudwatch_takes_each_graph() -> None:
    """A namespace, a metric, dimensions in pairs, options last; ids of a lower-case letter first, each used once."""
    for widget in widgets():
        if widget["type"] == "text":
            assert widget["properties"]["markdown"]
            continue
        properties = widget["properties"]
        assert properties["region"] == "us-east-1"
        assert properties["title"]
        assert properties["view"] in ("timeSeries", "singleValue")
        ids = [options["id"] for *_, options in properties["metrics"] if "id" in options]
        assert len(ids) == len(set(ids))
        for *metric, options in properties["metrics"]:
            assert isinstance(options, dict)
            if "expression" in options:
                assert metric == []
                assert set(re.findall(r"[a-z]\w*", options["expression"])) <= set(ids)
                continue
            assert len(metric) >= 2 and len(metric) % 2 == 0
            assert all(isinstance(part, str) and part for part in metric)
            assert options["stat"] in ("Average", "Minimum", "Maximum", "Sum")


def test_the_plans_numbers_stand_beside_the_measured_ones() -> None:
    assert lines("Tokens per second") == [PLAN.tokens_per_second]
    assert lines("GPU memory") == [PLAN.memory.peak_gib, PLAN.memory.limit_gib]
    assert lines("Dollars spent") == [PLAN.cost_usd.expected, PLAN.cost_usd.p95, 3000.0]
    assert lines("Dollars spent", None) == [PLAN.cost_usd.expected, PLAN.cost_usd.p95]
    assert lines("Dollars per hour") == [pytest.approx(PLAN.cost_usd.expected / PLAN.hours.expected)]
    assert lines("Nodes") == [PLAN.node_count]
    shares = {
        options["label"]: options["expression"]
        for *_, options in graph("Actual as a share")["metrics"]
        if "expression" in options
    }
    assert shares == {
        "speed": "100 * speed_raw / 36408.9",
        "memory": "100 * memory_raw / 30720",
        "dollars": "100 * dollars_raw / 100",
    }


def test_a_network_without_tokens_shows_samples() -> None:
    cnn = sample_plan(job={"seq_len": 1})
    titles = [
        widget["properties"].get("title", "") for widget in body(cnn, NAMES, planned=cnn, ceiling_usd=None)["widgets"]
    ]
    assert "Samples per second, whole fleet" in titles


def test_every_metric_of_a_graph_is_published(repository: Path) -> None:
    files = [*(repository / "bootstrap").rglob("*.py"), repository / "bootstrap/cloudwatch-agent.json"]
    source = "".join(path.read_text() for path in files)
    own = {
        metric[1]
        for widget in widgets()
        for *metric, _ in widget["properties"].get("metrics", [])
        if metric and metric[0] == "gpufleet/dev"
    }
    assert len(own) == 11
    assert {metric for metric in own if f'"{metric}"' not in source} == set()


def test_the_stack_deploys_it_under_its_name() -> None:
    deployed = deploy(config={"gpufleet:ceilingUsd": "500"}).one("Dashboard")
    names = Names(stack="dev", account_id="000000000000", region="us-east-1", partition="aws")
    assert deployed["dashboardName"] == names.dashboard
    assert json.loads(deployed["dashboardBody"]) == body(PLAN, names, planned=PLAN, ceiling_usd=500.0)
