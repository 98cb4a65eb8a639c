"""Other clouds beside AWS: the same economics, the limits, what is left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from optimizer.catalog import Catalog, load
from optimizer.clouds.compare import Comparison, compare_clouds
from optimizer.clouds.offers import CloudOffer, load_offers
from optimizer.contract.request import request_from_dict
from optimizer.performance.calibration import load as load_calibration
from optimizer.recommend import Recommendation, recommend

TYPES = ("p4d.24xlarge", "p5.48xlarge")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


@pytest.fixture(scope="module")
def clouds() -> Sequence[CloudOffer]:
    return load_offers()


def answer(catalog: Catalog, **changes: Any) -> Recommendation:
    data: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "workload": {
            "tokens": "1B",
            "seq_len": changes.pop("seq_len", 4096),
            "precision": changes.pop("precision", "bf16"),
        },
        "objective": changes.pop("objective", "cost"),
        "constraints": {"instance_types": list(TYPES), "max_nodes": 4, **changes},
    }
    return recommend(request_from_dict(data), catalog, load_calibration())


def as_other_cloud(catalog: Catalog, name: str, **changes: Any) -> CloudOffer:
    """An AWS offer in another cloud's clothes, at its own price."""
    offer = catalog.offer(name, "us-east-1")
    assert offer is not None
    offer = replace(offer, instance=replace(offer.instance, efa_cards=0, **changes), spot=None, reserved_1yr=None)
    return CloudOffer(
        cloud="azure", series="twin", fabric="infiniband", offer=offer, retired=None, origin="AWS", note=""
    )


def test_the_twin_of_an_aws_type_costs_what_it_costs_on_aws(catalog: Catalog) -> None:
    # A plan of no tie: a comparison has the cheapest layout.
    found = answer(catalog, purchase_options=["on-demand"], regions=["us-east-1"], seq_len=2048)
    result = compare_clouds(found, [as_other_cloud(catalog, name) for name in TYPES])
    plans = {plan.instance_type: plan for plan in found.plans}
    assert {row.instance_type for row in result.rows} == set(plans) == set(TYPES)
    for row in result.rows:
        plan = plans[row.instance_type]
        assert row.node_count == plan.node_count
        assert row.parallelism == plan.parallelism.model_dump()
        assert (row.hours_expected, row.hours_p95) == (plan.hours.expected, plan.hours.p95)
        assert row.compute_usd_expected == plan.cost_usd.breakdown.compute
        assert row.compute_usd_expected < row.compute_usd_p95 < plan.cost_usd.p95
        expected = round(row.compute_usd_expected / found.plans[0].cost_usd.breakdown.compute, 3)
        assert row.ratio_to_best_aws == row.ratio_to_best_aws_on_demand == expected


def test_ratios_are_to_the_best_plan_and_to_the_best_on_demand_plan(
    catalog: Catalog, clouds: Sequence[CloudOffer]
) -> None:
    found = answer(catalog)
    result = compare_clouds(found, clouds)
    best = found.plans[0]
    assert result.best_aws == best and best.purchase.option == "on-demand", "an old spot price heads no ranking"
    on_demand = min(plan.cost_usd.breakdown.compute for plan in found.plans if plan.purchase.option == "on-demand")
    assert result.best_aws_on_demand is not None
    assert result.best_aws_on_demand.cost_usd.breakdown.compute == on_demand
    row = result.rows[0]
    assert row.ratio_to_best_aws_on_demand == round(row.compute_usd_expected / on_demand, 3)
    assert row.ratio_to_best_aws == round(row.compute_usd_expected / best.cost_usd.breakdown.compute, 3)


def test_every_type_is_compared_or_left_out_with_its_reason(catalog: Catalog, clouds: Sequence[CloudOffer]) -> None:
    result = compare_clouds(answer(catalog), clouds)
    reasons = {entry["instance_type"]: entry["reason"] for entry in result.not_compared}
    compared = {row.instance_type for row in result.rows}
    assert compared | set(reasons) == {other.offer.instance.name for other in clouds}
    assert not compared & set(reasons)
    assert reasons["Standard_NC6s_v3"].startswith("retired on 2025-09-30")
    assert reasons["ecs.gn6v-c8g1.4xlarge"].startswith("unpriced: ")
    assert reasons["GN10Xp.20XLARGE320"] == "V100 does not compute in bf16"
    assert {"Standard_ND96isr_H100_v5", "ecs.gn7e-c16g1.32xlarge", "GT4.41XLARGE948"} <= compared


def test_v100_and_t4_are_compared_in_a_precision_they_have(catalog: Catalog, clouds: Sequence[CloudOffer]) -> None:
    result = compare_clouds(answer(catalog, precision="fp16"), clouds)
    assert "GN10Xp.20XLARGE320" in {row.instance_type for row in result.rows}


def test_a_row_is_the_cheapest_region_at_its_own_price(catalog: Catalog, clouds: Sequence[CloudOffer]) -> None:
    row = next(r for r in compare_clouds(answer(catalog), clouds).rows if r.instance_type == "Standard_ND96isr_H200_v5")
    offers = [o.offer for o in clouds if o.offer.instance.name == row.instance_type]
    prices = {offer.region: offer.on_demand.usd_per_hour for offer in offers if offer.on_demand}
    assert row.usd_per_node_hour == prices[row.region] == min(prices.values()) == 84.8
    assert row.price_as_of == "2026-06-18" and row.price_source.startswith("Azure Retail Prices API")


def test_limits_are_marked_and_what_keeps_them_comes_first(catalog: Catalog, clouds: Sequence[CloudOffer]) -> None:
    result = compare_clouds(answer(catalog, budget_usd=700, deadline_hours=15), clouds)
    marks = [row.feasible for row in result.rows]
    assert True in marks and False in marks and marks == sorted(marks, reverse=True)
    for row in result.rows:
        assert row.keeps_budget == (row.compute_usd_p95 <= 700)
        assert row.keeps_deadline == (row.hours_p95 <= 15)
    free = compare_clouds(answer(catalog), clouds)
    assert {(row.keeps_budget, row.keeps_deadline) for row in free.rows} == {(None, None)}


def test_a_deadline_is_kept_with_more_nodes_where_they_help(catalog: Catalog, clouds: Sequence[CloudOffer]) -> None:
    def nd(found: Comparison) -> Any:
        return next(row for row in found.rows if row.instance_type == "Standard_ND96amsr_A100_v4")

    slow = nd(compare_clouds(answer(catalog), clouds))
    fast = nd(compare_clouds(answer(catalog, deadline_hours=slow.hours_p95 * 0.6), clouds))
    assert fast.node_count > slow.node_count and fast.keeps_deadline


def test_the_objective_time_sorts_by_hours(catalog: Catalog, clouds: Sequence[CloudOffer]) -> None:
    hours = [row.hours_expected for row in compare_clouds(answer(catalog, objective="time"), clouds).rows]
    assert hours == sorted(hours)


def test_infiniband_counts_as_kernel_bypass(catalog: Catalog) -> None:
    twin = as_other_cloud(catalog, "p4d.24xlarge")
    found = answer(catalog, objective="time")
    (bypass,) = compare_clouds(found, [twin]).rows
    (tcp,) = compare_clouds(found, [replace(twin, fabric="ethernet")]).rows
    assert bypass.node_count > 1 and bypass.hours_expected < tcp.hours_expected


def test_a_type_of_unknown_network_is_left_out(catalog: Catalog) -> None:
    twin = as_other_cloud(catalog, "p4d.24xlarge", network_gbit_per_s=0.0)
    result = compare_clouds(answer(catalog), [twin])
    assert not result.rows and result.not_compared[0]["reason"].startswith("its network is unknown")


def test_without_an_aws_plan_there_is_no_ratio(catalog: Catalog, clouds: Sequence[CloudOffer]) -> None:
    found = answer(catalog, budget_usd=0.01)
    assert not found.plans
    result = compare_clouds(found, clouds)
    assert result.best_aws is None and result.to_dict()["best_aws"] is None
    assert {row.ratio_to_best_aws for row in result.rows} == {None}
    assert not any(row.feasible for row in result.rows)
