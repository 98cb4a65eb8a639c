from __future__ import annotations

from dataclasses import replace

import pytest

from optimizer.catalog import Catalog
from optimizer.contract.errors import DataMissingError


def test_a_known_unit_price_is_its_regions(catalog: Catalog) -> None:
    price = catalog.unit_price("gp3-storage", "eu-central-1")
    assert (price.usd, price.per, price.region) == (0.0952, "GiB-month", "eu-central-1")


def test_an_unknown_unit_price_is_the_highest_known_and_says_so(catalog: Catalog) -> None:
    price = catalog.unit_price("gp3-storage", "il-central-1")
    assert (price.usd, price.region) == (0.152, "il-central-1")
    assert price.source.startswith("upper bound: highest of 10 known regions (sa-east-1), no figure for il-central-1")
    assert all(known.usd <= price.usd for known in catalog.unit_prices if known.item == "gp3-storage")


def test_a_price_that_is_the_same_everywhere_is_no_bound(catalog: Catalog) -> None:
    price = catalog.unit_price("kms-key", "il-central-1")
    assert (price.usd, price.region) == (1, "il-central-1")
    assert price.source.startswith("https://aws.amazon.com/kms/pricing/")


def test_an_item_without_any_price_is_missing_data(catalog: Catalog) -> None:
    with pytest.raises(DataMissingError, match="no price of kms-key"):
        replace(catalog, unit_prices=()).unit_price("kms-key", "us-east-1")


def test_the_description_has_every_source_with_dates(catalog: Catalog) -> None:
    described = catalog.describe()
    assert described["as_of"] == min(o.on_demand.as_of for o in catalog.offers if o.on_demand).isoformat()
    names = {source["name"] for source in described["sources"]}
    assert names == {
        "instance types",
        "GPU table",
        "on-demand prices",
        "reserved prices",
        "Capacity Block rates",
        "spot prices",
        "interruption bands",
        "zones",
        "unit prices",
    }
    assert all(source["as_of"] <= source["newest"] and source["rows"] > 0 for source in described["sources"])
