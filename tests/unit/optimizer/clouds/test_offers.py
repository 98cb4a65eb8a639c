"""Other clouds' offers: conversion of currencies, the join with AWS's catalog, the notes a user gets."""

from __future__ import annotations

from datetime import date

from optimizer.catalog import load
from optimizer.catalog.select import Filter, select, sort
from optimizer.clouds.offers import join_catalog, load_offers, price_notes

TODAY = date(2026, 11, 21)


def test_another_currency_is_converted_and_the_source_says_how() -> None:
    other = next(other for other in load_offers(["alibaba"]) if other.offer.on_demand)
    price = other.offer.on_demand
    assert price is not None
    cny = float(price.source.partition(" CNY at ")[0].rpartition(" ")[2])
    assert price.usd_per_hour == round(cny / 6.7758, 4)
    assert "CNY at 6.7758 CNY/USD (Federal Reserve H.10" in price.source


def test_one_catalog_to_choose_from() -> None:
    catalog, others = load(), load_offers(["azure"])
    both = join_catalog(catalog, others, aws=True)
    assert len(both.offers) == len(catalog.offers) + len(others)
    chosen = sort(select(both, Filter(gpus=["H200"], regions=["eastus2", "us-west-1"])), "on-demand")
    assert [offer.instance.name for offer in chosen] == ["p5en.48xlarge", "Standard_ND96isr_H200_v5"]
    only = join_catalog(catalog, others, aws=False)
    assert {offer.region for offer in select(only, Filter(types=["STANDARD_nd96isr_h200*"]))} <= set(only.regions())
    assert all(offer.instance.name.startswith("Standard_") for offer in only.offers)


def test_notes_give_each_clouds_age_and_the_unpriced_rows() -> None:
    notes = price_notes(load_offers(), TODAY)
    assert "Azure prices are up to 156 days old" in notes
    assert "38 of 104 Tencent Cloud rows are unpriced; their note says why" in notes
    assert "AWS only" in notes[-1]
    assert price_notes(()) == []
