"""Costs of a stack's resources, for each variant of the program."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.contract.state import ControllerState
from bootstrap.controller.handler import publish_metrics
from infra.offline.preview import Resource, resources
from infra.offline.resource_types import FREE
from optimizer.catalog import Catalog, load
from optimizer.commands.preview.cost import CostLine, cost_lines, totals
from optimizer.contract.plan import FleetPlan
from optimizer.economics.running_costs import METRICS, controller_usd_per_hour
from tests.infra.deployed import ALARM, LINKED, LUSTRE, WORKERS, capacity_block, on_demand, reserved, topped_up, workers
from tests.plans import sample_plan

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "spot": ({}, {}),
    "alarms and nat": ({}, {**ALARM, "gpufleet:nat": "true", "gpufleet:trainCommand": "train.py"}),
    "on demand": (on_demand(), {}),
    "reserved": ({**reserved(), **LUSTRE}, LINKED),
    "an existing reservation": (reserved("cr-0123456789abcdef0"), {}),
    "topped up": (topped_up(), {}),
    "capacity block": (capacity_block(), {}),
    "workers": (
        WORKERS,
        workers(scaling={"minNodes": 1, "gpuUtilizationPercent": 60}, trainCommand="serve.py"),
    ),
}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


def bill(
    catalog: Catalog, changes: Mapping[str, Any], config: Mapping[str, str]
) -> tuple[FleetPlan, list[Resource], list[CostLine]]:
    plan, stack_resources = declared(json.dumps(changes), json.dumps(config))
    return plan, stack_resources, cost_lines(stack_resources, catalog, plan)


@cache  # the program takes a second
def declared(changes: str, config: str) -> tuple[FleetPlan, list[Resource]]:
    plan = sample_plan(**json.loads(changes))
    return plan, resources(plan, stack="dev", config=json.loads(config))


def by_item(lines: list[CostLine]) -> dict[str, CostLine]:
    return {line.item: line for line in lines}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_resource_is_free_or_has_a_price(catalog: Catalog, variant: str) -> None:
    """A new type of resource must say which; only what AWS sells upfront or by the e-mail has no price here."""
    _, stack_resources, lines = bill(catalog, *VARIANTS[variant])
    unpriced = {line.item for line in lines if line.basis == "unpriced"}
    assert unpriced <= {"e-mails of alarms, beyond the first thousand a month", "p4d.24xlarge, capacity block"}
    billed = {(line.type, line.name) for line in lines}
    silent = {
        resource.kind
        for resource in stack_resources
        if resource.parent and resource.kind not in FREE and (resource.type, resource.name) not in billed
    }
    # A gateway endpoint is free, and a union's nodes are billed with its own group.
    assert silent <= {"VpcEndpoint", "Group"}
    assert all(line.as_of and line.source for line in lines if line.unit_usd is not None)


def test_nodes_are_billed_as_they_are_bought(catalog: Catalog) -> None:
    _, _, spot = bill(catalog, {}, {})
    assert by_item(spot)["p4d.24xlarge, spot"].usd_per_hour == 10
    assert by_item(spot)["p4d.24xlarge, on-demand"].quantity == 1
    _, _, bought = bill(catalog, on_demand(), {})
    assert "p4d.24xlarge, spot" not in by_item(bought) and by_item(bought)["p4d.24xlarge, on-demand"].quantity == 2


def test_a_topped_up_fleet_is_billed_by_owned_and_rented_nodes(catalog: Catalog) -> None:
    _, _, lines = bill(catalog, *VARIANTS["topped up"])
    billed = [(one.item, one.quantity, one.usd_per_hour) for one in lines if one.per == "node-hour"]
    assert billed == [("p4d.24xlarge, owned reservation", 1, 0.5), ("p4d.24xlarge, on-demand", 1, 21.96)]


def test_a_reservation_is_billed_without_nodes_and_its_nodes_are_not_billed_again(catalog: Catalog) -> None:
    _, _, lines = bill(catalog, reserved(), {})
    line = by_item(lines)["reservation of p4d.24xlarge"]
    assert line.basis == "always" and line.quantity == 2
    assert not [line for line in lines if line.per == "node-hour" and line.basis == "nodes"]
    assert line.usd_per_hour is not None and totals(lines)["without_nodes_usd_per_hour"] > line.usd_per_hour


def test_a_capacity_block_is_paid_before(catalog: Catalog) -> None:
    price = {"item": "capacity block p4d.24xlarge us-east-1", "usd": 8.0, "per": "hour", "source": "offer"}
    _, _, lines = bill(catalog, {**capacity_block(), "prices": [{**price, "as_of": "2026-11-21"}]}, {})
    line = by_item(lines)["p4d.24xlarge, capacity block"]
    assert line.usd_per_hour == 16 and "when the block was bought" in line.note


def test_the_metrics_of_nodes_and_controller_are_billed(catalog: Catalog, repository: Path) -> None:
    data: list[dict[str, Any]] = []
    cloudwatch = SimpleNamespace(put_metric_data=lambda **given: data.extend(given["MetricData"]))
    now = datetime(2026, 11, 28, tzinfo=UTC)
    state = ControllerState(
        run_id="r", job="j", phase="waiting", reason="", since=now, run_started_at=now, updated_at=now
    )
    clients: Any = SimpleNamespace(cloudwatch=cloudwatch)
    settings: Any = SimpleNamespace(metric_namespace="gpufleet/dev")
    publish_metrics(clients, settings, state, None)
    renamed = re.findall('"rename": "([A-Za-z]+)"', (repository / "bootstrap/cloudwatch-agent.json").read_text())
    assert len({item["MetricName"] for item in data}.union(renamed, ["TokensPerSecond"])) == METRICS
    _, _, lines = bill(catalog, *VARIANTS["alarms and nat"])
    assert by_item(lines)["own metrics"].usd_per_hour == pytest.approx(METRICS * 0.3 / 730)
    # An alarm on an expression is billed for each metric in it.
    assert {line.name: line.quantity for line in lines if line.item == "metric alarm"}[
        "gpufleet-dev-missing-nodes"
    ] == 2


def test_the_optimizer_prices_the_controller_that_the_program_declares(catalog: Catalog) -> None:
    """The optimizer may not look into infra: a longer time limit or another metric there must show here."""
    _, _, lines = bill(catalog, {}, {})
    own = [line for line in lines if line.type.endswith(":Function")]
    declared = sum(line.usd_per_hour or 0 for line in own)
    assert controller_usd_per_hour(catalog, "us-east-1") == pytest.approx(declared, rel=1e-9)


def test_a_price_that_is_not_known_is_unpriced_and_never_guessed(catalog: Catalog) -> None:
    plan, stack_resources, _ = bill(catalog, {}, {})
    without = Catalog(
        offers=(),
        instance_types=(),
        gpus=(),
        unit_prices=tuple(price for price in catalog.unit_prices if price.item != "vpc-endpoint"),
        sources=(),
        made_at=catalog.made_at,
        as_of=catalog.as_of,
    )
    unpriced = plan.model_copy(update={"prices": ()})
    lines = cost_lines(stack_resources, without, unpriced)
    endpoint = by_item(lines)["interface endpoint"]
    assert (endpoint.basis, endpoint.unit_usd, endpoint.usd_per_hour) == ("unpriced", None, None)
    assert by_item(lines)["p4d.24xlarge, spot"].basis == "unpriced"


def test_a_resource_of_a_type_nobody_knows_is_shown_unpriced(catalog: Catalog) -> None:
    lake = Resource(type="aws:fsx/openZfsVolume:OpenZfsVolume", name="x", parent="storage", inputs={}, protected=False)
    (line,) = cost_lines([lake], catalog, sample_plan())
    assert (line.item, line.basis) == ("OpenZfsVolume", "unpriced")


def test_a_file_system_is_billed_with_and_without_nodes(catalog: Catalog) -> None:
    _, _, lines = bill(catalog, *VARIANTS["reserved"])
    line = by_item(lines)["FSx for Lustre"]
    assert (line.basis, line.quantity, line.unit_usd) == ("always", 2400, 0.145)
    assert line.usd_per_hour == pytest.approx(2400 * 0.145 / 730)
