"""Other clouds' tables: what a row must have, conversion, refreshed prices, the notes a user gets."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from optimizer.catalog import load
from optimizer.catalog.select import Filter, select, sort
from optimizer.clouds import offers as cloud_offers
from optimizer.clouds import tables
from optimizer.clouds.offers import CloudOffers, build_offers, check, join_catalog, load_offers, price_notes
from optimizer.clouds.providers import CLOUDS
from optimizer.clouds.tables import PriceRow, read_newest_prices, refreshed_file, write_prices
from optimizer.contract.errors import DataMissingError

TODAY = date(2026, 11, 21)
ROW: dict[str, Any] = {
    "cloud": "azure",
    "instance_type": "Standard_ND96isr_H100_v5",
    "regions": "eastus westus",
    "on_demand_per_hour": 50.0,
    "spot_per_hour": "",
    "currency": "USD",
    "source": "a price list",
    "as_of": "2026-11-20",
    "unpriced_because": "",
}


def row(**changes: Any) -> PriceRow:
    return PriceRow.model_validate(ROW | changes)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"on_demand_per_hour": 0},
        {"on_demand_per_hour": -1},
        {"on_demand_per_hour": "nan"},
        {"on_demand_per_hour": "inf"},
        {"on_demand_per_hour": ""},
        {"on_demand_per_hour": "", "spot_per_hour": 1, "unpriced_because": "nobody knows"},
        {"currency": ""},
        {"source": ""},
        {"as_of": ""},
        {"regions": ""},
        {"cloud": "aws"},
        {"extra": 1},
    ],
)
def test_a_price_row_has_a_price_with_source_and_date_or_a_reason(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        row(**changes)


def test_one_row_makes_an_offer_in_each_of_its_regions() -> None:
    offers = build_offers([row()]).offers
    assert [other.offer.region for other in offers] == ["eastus", "westus"]
    assert all(other.offer.on_demand and other.offer.on_demand.usd_per_hour == 50 for other in offers)
    assert offers[0].rdma and offers[0].fabric == "infiniband"


def test_another_currency_is_converted_and_the_source_says_how() -> None:
    (other,) = build_offers([row(regions="eastus", currency="CNY", on_demand_per_hour=67.758)]).offers
    price = other.offer.on_demand
    assert price is not None and price.usd_per_hour == 10.0 and price.as_of == date(2026, 11, 20)
    assert price.source.startswith("a price list: 67.758 CNY at 6.7758 CNY/USD (Federal Reserve H.10")
    assert other.origin == "a price list"


def test_a_currency_without_a_rate_is_an_error() -> None:
    with pytest.raises(DataMissingError, match="priced in EUR"):
        build_offers([row(currency="EUR")])


def test_clouds_are_chosen_by_name() -> None:
    assert {other.cloud for other in load_offers(["tencent"]).offers} == {"tencent"}
    assert {other.cloud for other in load_offers().offers} == set(CLOUDS)


def test_refreshed_prices_replace_a_cloud_s_shipped_ones() -> None:
    write_prices(refreshed_file("azure"), [row()])
    rows, notes = read_newest_prices()
    assert [found for found in rows if found.cloud == "azure"] == [row()] and notes == []
    assert {found.cloud for found in rows} == set(CLOUDS)


def test_refreshed_prices_older_than_the_shipped_ones_are_passed_over() -> None:
    shipped, _ = read_newest_prices()
    write_prices(refreshed_file("azure"), [row(as_of="2020-01-01")])
    assert read_newest_prices() == (shipped, [])


@pytest.mark.parametrize("text", ["not,a,price\n1,2,3\n", "\xff\xfe", ""])
def test_a_broken_refreshed_file_is_passed_over_with_a_note(text: str) -> None:
    shipped, _ = read_newest_prices()
    path = refreshed_file("azure")
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    rows, notes = read_newest_prices()
    assert rows == shipped
    assert all("the shipped Azure prices are used" in note and str(path) in note for note in notes)
    assert bool(notes) == bool(text)


def test_a_broken_shipped_table_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    with pytest.raises(DataMissingError, match=r"prices\.csv cannot be used"):
        load_offers()


def test_a_gpu_the_table_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_offers, "gpu_table", dict)
    with pytest.raises(DataMissingError, match=r"which catalog/data/gpus\.csv does not have"):
        load_offers()


def test_one_catalog_to_choose_from() -> None:
    catalog, others = load(), load_offers(["azure"])
    both = join_catalog(catalog, others, aws=True)
    assert len(both.offers) == len(catalog.offers) + len(others.offers)
    chosen = sort(select(both, Filter(gpus=["H200"], regions=["eastus2", "us-west-1"])), "price", "on-demand")
    assert [offer.instance.name for offer in chosen] == ["p5en.48xlarge", "Standard_ND96isr_H200_v5"]
    only = join_catalog(catalog, others, aws=False)
    assert {offer.region for offer in select(only, Filter(types=["STANDARD_nd96isr_h200*"]))} <= set(only.regions())
    assert all(offer.instance.name.startswith("Standard_") for offer in only.offers)


def test_notes_give_each_source_its_age_and_the_unpriced_rows() -> None:
    notes = price_notes(load_offers(), TODAY)
    assert any("Azure prices: Azure Retail Prices API" in note and "156 days old" in note for note in notes)
    assert "38 of 104 Tencent Cloud rows are unpriced; their note says why" in notes
    assert "AWS only" in notes[-1]
    assert price_notes(CloudOffers(offers=())) == []


def test_each_broken_rule_is_named() -> None:
    sound = build_offers([row(regions="eastus", spot_per_hour=20)]).offers[0]
    assert check(CloudOffers(offers=(sound,)), today=TODAY) == []
    offer = sound.offer
    assert offer.on_demand is not None and offer.spot is not None
    breaks = {
        "a type has one offer in a region": (sound, sound),
        "a type without a price says why": (replace(sound, note="", offer=replace(offer, on_demand=None)),),
        "spot is at most on-demand": (replace(sound, offer=replace(offer, spot=replace(offer.spot, usd_per_hour=51))),),
        "a price is above 0 USD per hour": (
            replace(sound, offer=replace(offer, spot=None, on_demand=replace(offer.on_demand, usd_per_hour=0))),
        ),
        "a price has a source and a date not in the future": (
            replace(sound, offer=replace(offer, on_demand=replace(offer.on_demand, as_of=date(2026, 11, 22)))),
        ),
        "GPU memory is the GPU table's, times the fraction": (
            replace(sound, offer=replace(offer, instance=replace(offer.instance, gpu_memory_gib=94))),
        ),
        "a type has processors and memory": (
            replace(sound, offer=replace(offer, instance=replace(offer.instance, vcpus=0))),
        ),
        "a type has a network": (
            replace(sound, offer=replace(offer, instance=replace(offer.instance, network_gbit_per_s=-1))),
        ),
    }
    for rule, offers in breaks.items():
        assert {found.rule for found in check(CloudOffers(offers=offers), today=TODAY)} == {rule}
