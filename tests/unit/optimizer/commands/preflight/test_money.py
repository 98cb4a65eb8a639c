"""Today's prices, the run's cost at them, its limits, and the account's own budgets."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.commands.preflight.money import check_prices
from optimizer.contract.plan import FleetPlan
from tests.plans import ON_DEMAND_P4D, SPOT_P4D, SPOT_P4DE, sample_plan
from tests.unit.optimizer.catalog.price_documents import instance_document
from tests.unit.optimizer.commands.preflight.account import DENIED_EC2, FakeAws, aws, context, only, spot_price

__all__ = ["aws"]

STANDARD = ("1yr", "No Upfront", "standard")
SPOT = "price of spot p4d.24xlarge us-east-1"
ONLY_SPOT = ("spot p4d.24xlarge", 10.0)


def priced(*items: tuple[str, float], **changes: Any) -> FleetPlan:
    """The sample plan with prices per hour of ``items``."""
    prices = [
        {"item": f"{item} us-east-1", "usd": usd, "per": "hour", "source": "test", "as_of": "2026-01-21"}
        for item, usd in items
    ]
    return sample_plan(prices=prices, **changes)


@pytest.mark.parametrize(
    ("today", "level", "change"), [("10.50", "ok", "+5.0%"), ("10.51", "warning", "+5.1%"), ("5.00", "ok", "-50.0%")]
)
def test_a_price_that_rose_is_a_warning(aws: FakeAws, today: str, level: str, change: str) -> None:
    aws.answers["DescribeSpotPriceHistory"] = {"SpotPriceHistory": [spot_price(today), spot_price("1", "us-east-1b")]}
    row = next(check_prices(context()))
    assert (row.check, row.level, row.value, row.limit) == (SPOT, level, float(today), 10.0)
    assert row.text.startswith(f"{float(today):.4f} USD an hour (spot in use1-az2), and the plan has 10.0000 (test")
    assert row.text.endswith(change)


def test_a_negotiated_price_holds_whatever_the_list_says(aws: FakeAws) -> None:
    quoted = [{**price, "source": "quote: EDP 2026-17"} for price in SPOT_P4D["prices"]]
    row = only(check_prices(context(sample_plan(prices=quoted))))
    assert (row.check, row.level) == ("budget", "ok") and not aws.calls


def test_a_lone_node_pays_its_cheapest_zones_price(aws: FakeAws) -> None:
    row = next(check_prices(context(mode="workers")))
    assert (row.value, row.level) == (9.0, "ok") and "spot in use1-az6" in row.text


def test_every_kind_of_price_is_asked_for_by_itself(aws: FakeAws) -> None:
    aws.answers["GetProducts"] = [
        {"PriceList": [instance_document("p4d.24xlarge", on_demand="99", attributes={"operatingSystem": "Windows"})]},
        {
            "PriceList": [
                instance_document("p4d.24xlarge", on_demand="22.0000000000", reserved={STANDARD: "14.0000000000"})
            ]
        },
    ]
    plan = priced(
        ("reserved, one year, no upfront, paid to its end p4d.24xlarge", 14.0),
        ("on-demand p4d.24xlarge", 20.0),
        ("owned reservation p4d.24xlarge", 3.0),
        ("capacity block p4d.24xlarge", 9.0),
        ("gp3-storage", 0.08),
    )
    rows = list(check_prices(context(plan)))
    assert [(row.check, row.level, row.value) for row in rows[:-1]] == [
        ("price of reserved, one year, no upfront, paid to its end p4d.24xlarge us-east-1", "ok", 14.0),
        ("price of on-demand p4d.24xlarge us-east-1", "warning", 22.0),
    ]
    filters = {entry["Field"]: entry["Value"] for entry in aws.asked("GetProducts")[0]["Filters"]}
    assert (filters["instanceType"], filters["regionCode"]) == ("p4d.24xlarge", "us-east-1")


RESERVED = "reserved, one year, no upfront, paid to its end p4d.24xlarge"


@pytest.mark.parametrize(
    ("item", "documents", "says"),
    [
        ("on-demand p4d.24xlarge", [], "the price list has no p4d.24xlarge in us-east-1"),
        ("on-demand p4d.24xlarge", [instance_document("p4d.24xlarge", on_demand="0")], "a price is above 0 USD"),
        ("on-demand p4d.24xlarge", ["{broken"], "malformed document"),
        (RESERVED, [instance_document("p4d.24xlarge", on_demand="21")], "sells no one-year no-upfront term"),
    ],
)
def test_a_price_that_is_not_listed_is_unknown(aws: FakeAws, item: str, documents: list[str], says: str) -> None:
    aws.answers["GetProducts"] = {"PriceList": documents}
    row = next(check_prices(context(priced((item, 20.0)))))
    assert row.level == "unknown" and says in row.text


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (DENIED_EC2, "ec2:DescribeSpotPriceHistory is missing"),
        ({"SpotPriceHistory": []}, "p4d.24xlarge has no spot price in use1-az2"),
        ({"SpotPriceHistory": [spot_price("free")]}, "has no spot price"),
    ],
)
def test_an_unknown_price_leaves_the_budget_to_the_plans(aws: FakeAws, answer: Any, says: str) -> None:
    aws.answers["DescribeSpotPriceHistory"] = answer
    price, budget = check_prices(context(priced(ONLY_SPOT)))
    assert price.level == "unknown" and says in price.text
    assert budget.level == "ok" and "at the plan's prices, as none of today's is known" in budget.text


@pytest.mark.parametrize(
    ("budget", "ceiling", "level", "limit"),
    [
        (3000, None, "ok", 3000),
        (3000, 124, "ok", 124),
        (124, 3000, "ok", 124),
        (123, 3000, "warning", 123),
        (104, None, "warning", 104),
        (103, None, "error", 103),
        (None, 103, "error", 103),
        (None, None, "warning", None),
    ],
)
def test_the_smaller_of_budget_and_ceiling_binds(
    aws: FakeAws, budget: float | None, ceiling: float | None, level: str, limit: float | None
) -> None:
    plan = priced(ONLY_SPOT, job={"budget_usd": budget})
    row = list(check_prices(context(plan, ceiling_usd=ceiling)))[-1]
    # To save and end takes 9 minutes of two nodes of 10 USD/h, and of 5 USD besides in 4.5 h.
    value = 120.0 if limit is None else 123.17
    assert (row.check, row.level, row.value, row.limit) == ("budget", level, value, limit)


def test_a_next_place_above_the_ceiling_is_a_warning_with_its_price(aws: FakeAws) -> None:
    dear = ON_DEMAND_P4D | {"cost_usd": ON_DEMAND_P4D["cost_usd"] | {"p95": 200.0}}
    plan = priced(ONLY_SPOT, alternates=[dear, SPOT_P4DE])
    for ceiling, level in ((300, "ok"), (150, "warning")):
        row = list(check_prices(context(plan, ceiling_usd=ceiling)))[-1]
        says = "are the next places, p4d.24xlarge on-demand in use1-az6 at 21.96 USD an hour a node"
        assert (row.level, row.text.endswith(says)) == (level, level == "warning")


def test_todays_price_moves_the_cost_by_the_share_of_the_nodes(aws: FakeAws) -> None:
    # Two spot nodes at twice the price: of 100 USD the nodes are 95, so 195; of 120 at the 95th percentile 234.
    aws.answers["DescribeSpotPriceHistory"] = {"SpotPriceHistory": [spot_price("20.00")]}
    plan = priced(ONLY_SPOT, purchase={"on_demand_base": 0})
    row = list(check_prices(context(plan)))[-1]
    assert row.text.startswith("195.00 USD expected and 234.00 at the 95th percentile at today's prices (+95.0%)")


def test_the_base_is_paid_at_its_own_price(aws: FakeAws) -> None:
    # One node on demand at 20, one on spot at 10: spot doubles, so the fleet goes from 30 to 40 an hour.
    aws.answers["DescribeSpotPriceHistory"] = {"SpotPriceHistory": [spot_price("20.00")]}
    aws.answers["GetProducts"] = {"PriceList": [instance_document("p4d.24xlarge", on_demand="20")]}
    plan = priced(("spot p4d.24xlarge", 10.0), ("on-demand p4d.24xlarge", 20.0))
    row = list(check_prices(context(plan)))[-1]
    assert row.text.startswith(f"{100 * (1 + 0.95 / 3):.2f} USD expected")


def test_a_rise_counts_for_the_rented_nodes_of_a_topped_up_fleet(aws: FakeAws) -> None:
    aws.answers["GetProducts"] = {"PriceList": [instance_document("p4d.24xlarge", on_demand="40")]}
    purchase = {
        "option": "reserved",
        "on_demand_base": 0,
        "on_demand_top_up": 1,
        "capacity_reservation_id": "cr-0123456789abcdef0",
    }
    plan = priced(("owned reservation p4d.24xlarge", 5.0), ("on-demand p4d.24xlarge", 20.0), purchase=purchase)
    row = list(check_prices(context(plan)))[-1]
    # 20 of the nodes' 95 / 4.5 USD an hour double, and the nodes are 95 of 100 USD.
    assert row.text.startswith(f"{100 + 20 * 4.5:.2f} USD expected")
