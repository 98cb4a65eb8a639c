from __future__ import annotations

import json

import pytest

from optimizer.catalog.model import UNIT_ITEMS
from optimizer.catalog.sources import price_list
from optimizer.catalog.sources.price_list import InstancePrice
from tests.unit.optimizer.catalog.price_documents import UNIT_PRODUCTS, instance_document, unit_document

REGION = "us-east-1"
TYPES = {"p5.48xlarge", "p4d.24xlarge"}
STANDARD = ("1yr", "No Upfront", "standard")


def test_reads_on_demand_and_the_reserved_term_that_counts() -> None:
    document = instance_document(
        "p4d.24xlarge",
        on_demand="21.9576420000",
        reserved={
            STANDARD: "13.9210940000",
            ("1yr", "No Upfront", "convertible"): "15.9",
            ("3yr", "No Upfront", "standard"): "8.5",
            ("1yr", "All Upfront", "standard"): "0",
        },
    )
    found, skipped = price_list.parse_instances([document], REGION, TYPES)
    assert skipped == []
    assert found == {"p4d.24xlarge": InstancePrice(on_demand=21.957642, reserved_1yr=13.921094)}


@pytest.mark.parametrize(
    "other",
    [
        {"operatingSystem": "Windows", "preInstalledSw": "NA"},
        {"operatingSystem": "RHEL"},
        {"tenancy": "Dedicated"},
        {"tenancy": "Host"},
        {"capacitystatus": "UnusedCapacityReservation"},
        {"capacitystatus": "AllocatedCapacityReservation"},
        {"preInstalledSw": "SQL Ent"},
        {"marketoption": "CapacityBlock"},
        {"operation": "RunInstances:0102"},
        {"regionCode": "us-west-2"},
        {"instanceType": "m5.large"},
    ],
)
def test_products_of_another_kind_pass_silently(other: dict[str, str]) -> None:
    weird = instance_document(on_demand="0.0100000000", attributes=other)
    found, skipped = price_list.parse_instances([weird, instance_document()], REGION, TYPES)
    assert (found["p5.48xlarge"].on_demand, skipped) == (55.04, [])


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (instance_document(on_demand="0.0000000000"), "above 0 USD, got 0.0"),
        (instance_document(on_demand="-1"), "above 0 USD, got -1.0"),
        (instance_document(on_demand="nan"), "above 0 USD, got nan"),
        (instance_document(on_demand="a lot"), "malformed document"),
        (instance_document(unit="Quantity"), "priced per 'Quantity'"),
        ("{not json", "malformed document"),
        ("[]", "a JSON list, not a product"),
        ("{}", "malformed document"),
        (
            json.dumps({"product": {"attributes": json.loads(instance_document())["product"]["attributes"]}}),
            "malformed",
        ),
        (json.dumps({**json.loads(instance_document()), "terms": {}}), "no on-demand term"),
    ],
)
def test_a_product_without_a_usable_price_is_reported_and_the_others_kept(document: str, reason: str) -> None:
    good = instance_document("p4d.24xlarge", on_demand="21.95")
    found, skipped = price_list.parse_instances([document, good], REGION, TYPES)
    assert set(found) == {"p4d.24xlarge"}
    assert len(skipped) == 1 and reason in skipped[0].reason


def test_of_two_different_prices_the_higher_is_kept_and_reported() -> None:
    documents = [instance_document(on_demand="55.04"), instance_document(on_demand="60.00"), instance_document()]
    prices, skipped = price_list.parse_instances(documents, REGION, TYPES)
    assert (prices["p5.48xlarge"].on_demand, prices["p5.48xlarge"].reserved_1yr) == (60, None)
    assert all("two prices" in line.reason for line in skipped) and skipped
    assert price_list.parse_instances([instance_document()] * 2, REGION, TYPES)[1] == []


@pytest.mark.parametrize("item", UNIT_PRODUCTS)
def test_unit_prices_are_in_our_units(item: str) -> None:
    usd, products = UNIT_PRODUCTS[item]
    documents = [unit_document(usage, unit, ("0", "Inf", price), region=REGION) for usage, unit, price in products]
    price, skipped = price_list.parse_unit(documents, item, REGION)
    assert price == pytest.approx(usd)
    assert skipped == []


def test_a_unit_price_is_of_the_first_tier() -> None:
    tiers = (("51200", "512000", "0.022"), ("0", "51200", "0.023"))
    document = unit_document("TimedStorage-ByteHrs", "GB-Mo", *tiers)
    assert price_list.parse_unit([document], "s3-standard-storage", REGION) == (0.023, [])


def test_every_unit_price_has_a_query() -> None:
    assert set(price_list.UNIT_QUERIES) == set(UNIT_ITEMS) == set(UNIT_PRODUCTS)


def test_a_unit_price_in_another_unit_or_region_is_none() -> None:
    other_region = unit_document("EBS:VolumeUsage.gp3", "GB-Mo", ("0", "Inf", "0.08"), region="eu-west-1")
    assert price_list.parse_unit([other_region], "gp3-storage", REGION) == (None, [])
    other_unit = unit_document("EBS:VolumeUsage.gp3", "GB-Hr", ("0", "Inf", "0.08"))
    found, skipped = price_list.parse_unit([other_unit], "gp3-storage", REGION)
    assert found is None and "priced per 'GB-Hr'" in skipped[0].reason
