"""Refresh against a real moto server, with Pricing GetProducts (which moto lacks) answered by botocore's Stubber."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from moto.server import ThreadedMotoServer

from optimizer.aws import clients
from optimizer.catalog import invariants, load, refresh, snapshot
from optimizer.catalog.model import UNIT_ITEMS
from optimizer.catalog.sources.price_list import InstancePrice
from optimizer.catalog.sources.spot_history import ZonePrice
from optimizer.catalog.tables import Tables
from optimizer.contract.errors import GpufleetError
from optimizer.contract.hardware import Offer
from tests.unit.optimizer.catalog.price_documents import UNIT_PRODUCTS, instance_document, unit_document

REGION = "us-west-2"
STANDARD = ("1yr", "No Upfront", "standard")
INSTANCES = [
    instance_document("p5.48xlarge", REGION, on_demand="50.0000000000"),
    instance_document("p4d.24xlarge", REGION, on_demand="22.0000000000", reserved={STANDARD: "14.0000000000"}),
    instance_document("p5.48xlarge", REGION, on_demand="90.0", attributes={"operatingSystem": "Windows"}),
    instance_document("p5.48xlarge", REGION, on_demand="55.0", attributes={"tenancy": "Dedicated"}),
    instance_document(
        "p5.48xlarge", REGION, on_demand="0.0", attributes={"capacitystatus": "UnusedCapacityReservation"}
    ),
    instance_document("g5.xlarge", REGION, on_demand="0.0000000000"),
    "{broken",
]
UNITS = [
    [unit_document(usage, unit, ("0", "Inf", price), region=REGION)]
    for _, [(usage, unit, price), *_] in UNIT_PRODUCTS.values()
]


@pytest.fixture(scope="module")
def moto_server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(moto_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def pricing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    client = boto3.client("pricing", region_name="us-east-1")
    with Stubber(client) as stubber:
        monkeypatch.setattr(clients, "pricing", lambda: client)
        yield stubber


def _answer_all(pricing: Stubber) -> None:
    # Two pages: the paginator must follow the token.
    pricing.add_response("get_products", {"PriceList": INSTANCES[:1], "NextToken": "more"})
    pricing.add_response("get_products", {"PriceList": INSTANCES[1:]})
    for documents in UNITS:
        pricing.add_response("get_products", {"PriceList": documents})


@pytest.mark.usefixtures("aws")
def test_everything_that_answers_is_taken(pricing: Stubber) -> None:
    before = load()
    _answer_all(pricing)
    today = datetime.now(UTC).date()
    lines: list[str] = []
    result = refresh.refresh([REGION], progress=lines.append)
    after = load()

    (answer,) = result.answers
    assert lines == [f"{REGION}: read"]
    assert answer.failures == []
    assert {line.place for line in answer.skipped} >= {f"g5.xlarge in {REGION}", f"{REGION}, document 7"}
    assert after.origin == str(snapshot.user_directory()) == str(result.directory)
    assert invariants.check(after) == []

    offer = after.offer("p4d.24xlarge", REGION)
    assert offer is not None and offer.on_demand is not None and offer.reserved_1yr is not None
    assert (offer.on_demand.usd_per_hour, offer.on_demand.as_of) == (22, today)
    assert offer.on_demand.source == "AWS Price List API GetProducts"
    assert offer.reserved_1yr.usd_per_hour == 14
    assert offer.zone_ids and all(re.fullmatch("usw2-az[1-4]", zone) for zone in offer.zone_ids)
    # moto answers with one constant spot price; that it is live, of a zone and of today is what counts here.
    assert offer.spot is not None
    assert (offer.spot.source, offer.spot.as_of) == ("spot-price-history", today)
    assert offer.spot.zone_id in offer.zone_ids
    # A type whose price AWS no longer gives has none; its facts and zones stay.
    g5 = after.offer("g5.xlarge", REGION)
    assert g5 is not None and g5.on_demand is None and g5.zone_ids
    # The interruption band is not in any API: it stays.
    old = before.offer("p4d.24xlarge", REGION)
    assert old is not None and offer.interruptions == old.interruptions
    assert after.instance_type("p4d.24xlarge").source == "EC2 DescribeInstanceTypes"
    assert after.instance_type("p3.2xlarge") == before.instance_type("p3.2xlarge")
    for item, (usd, _) in UNIT_PRODUCTS.items():
        price = after.unit_price(item, REGION)
        assert price.usd == pytest.approx(usd)
        assert (price.source, price.as_of) == ("AWS Price List API GetProducts", today)
    assert set(answer.units) == set(UNIT_ITEMS)
    # Other regions have their old prices, and the type's facts of today.
    elsewhere, was = after.offer("p5.48xlarge", "us-east-1"), before.offer("p5.48xlarge", "us-east-1")
    assert elsewhere is not None and was is not None
    assert replace(elsewhere, instance=was.instance) == was
    assert elsewhere.instance.as_of == today


@pytest.mark.usefixtures("aws")
def test_the_price_list_is_asked_for_shared_linux_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    client = boto3.client("pricing", region_name="us-east-1")
    client.meta.events.register("provide-client-params.*", lambda params, **_: asked.append(params))
    monkeypatch.setattr(clients, "pricing", lambda: client)
    with Stubber(client) as stubber:
        _answer_all(stubber)
        refresh.refresh([REGION])
    filters = {entry["Field"]: entry["Value"] for entry in asked[0]["Filters"]}
    assert filters == {
        "regionCode": REGION,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
    }
    services = [call["ServiceCode"] for call in asked[2:]]
    assert services[:7] == ["AmazonEC2"] * 3 + ["AmazonS3", "AmazonFSx", "AmazonVPC", "AmazonVPC"]
    assert len(services) == len(UNIT_ITEMS)


@pytest.mark.usefixtures("aws")
def test_a_failed_source_keeps_its_last_good_data_and_says_why(pricing: Stubber) -> None:
    before = load()
    # One answer is enough: what refuses GetProducts once refuses it always.
    pricing.add_client_error(
        "get_products", "AccessDeniedException", "User is not authorized to perform: pricing:GetProducts"
    )
    (answer,) = refresh.refresh([REGION]).answers
    pricing.assert_no_pending_responses()
    after = load()
    old, new = before.offer("p5.48xlarge", REGION), after.offer("p5.48xlarge", REGION)
    assert old is not None and new is not None
    assert new.on_demand == old.on_demand
    assert new.spot is not None and new.spot.source == "spot-price-history"
    assert after.unit_price("gp3-storage", "us-east-1") == before.unit_price("gp3-storage", "us-east-1")
    assert len(answer.failures) == 1 + len(UNIT_ITEMS)
    assert answer.notes[0] == (
        "on-demand and reserved prices, us-west-2: the credentials may not do this (AccessDeniedException): "
        "User is not authorized to perform: pricing:GetProducts; the last good data stays"
    )


@pytest.mark.usefixtures("aws")
def test_a_throttled_source_stops_no_other_of_its_service(pricing: Stubber) -> None:
    pricing.add_client_error("get_products", "ThrottlingException", "Rate exceeded")
    for documents in UNITS:
        pricing.add_response("get_products", {"PriceList": documents})
    (answer,) = refresh.refresh([REGION]).answers
    assert [failure.source for failure in answer.failures] == ["on-demand and reserved prices"]
    assert set(answer.units) == set(UNIT_ITEMS)


@pytest.mark.usefixtures("aws")
def test_an_empty_answer_is_a_failure_where_there_were_prices(pricing: Stubber) -> None:
    for _ in range(1 + len(UNIT_ITEMS)):
        pricing.add_response("get_products", {"PriceList": []})
    (answer,) = refresh.refresh([REGION]).answers
    assert {failure.reason for failure in answer.failures} == {"AWS answered with nothing usable"}
    offer = load().offer("p5.48xlarge", REGION)
    assert offer is not None and offer.on_demand is not None and offer.on_demand.source == "SkyPilot catalog v9"


def test_with_nothing_answering_nothing_is_written(pricing: Stubber, tmp_path: Path) -> None:
    pricing.add_client_error("get_products", "UnrecognizedClientException", "bad token")
    # EC2 goes to the closed port of tests/conftest.py.
    with pytest.raises(GpufleetError, match="nothing could be read from AWS") as caught:
        refresh.refresh([REGION], directory=tmp_path / "new")
    assert "AWS refused the credentials" in caught.value.got
    assert caught.value.exit_code == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("aws")
def test_a_catalog_that_breaks_an_invariant_is_not_kept(pricing: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    _answer_all(pricing)
    monkeypatch.setattr(
        invariants, "check", lambda _: [invariants.InvariantViolation(rule="a rule", place="here", value="0")]
    )
    with pytest.raises(GpufleetError, match=r"breaks 1 rule,.*\n.*here: 0 \(rule: a rule\)"):
        refresh.refresh([REGION])
    assert not snapshot.user_directory().exists()


TODAY = date(2026, 11, 21)


def offer_row(tables: Tables, name: str, region: str = "us-east-1") -> Offer | None:
    rows = [row for row in tables.offers if (row.instance.name, row.region) == (name, region)]
    assert len(rows) <= 1
    return rows[0] if rows else None


def price_of(name: str, on_demand: float) -> dict[str, InstancePrice]:
    return {name: InstancePrice(on_demand=on_demand, reserved_1yr=None)}


def test_a_type_new_to_a_region_gets_a_row(tables: Tables) -> None:
    answer = refresh.RegionAnswer(region="af-south-1", prices=price_of("p6-b300.48xlarge", 150))
    row = offer_row(refresh.merge(tables, answer, TODAY), "p6-b300.48xlarge", "af-south-1")
    assert row is not None and row.on_demand is not None
    assert (row.on_demand.usd_per_hour, row.on_demand.as_of) == (150, TODAY)


def test_a_type_gone_from_zones_and_price_list_goes(tables: Tables) -> None:
    assert offer_row(tables, "p3.2xlarge") is not None
    answer = refresh.RegionAnswer(
        region="us-east-1", zones={"g5.xlarge": ("use1-az1",)}, prices=price_of("g5.xlarge", 1)
    )
    merged = refresh.merge(tables, answer, TODAY)
    assert offer_row(merged, "p3.2xlarge") is None
    kept = offer_row(merged, "g5.xlarge")
    assert kept is not None and kept.zones is not None and kept.zones.ids == ("use1-az1",)


def test_an_old_spot_price_above_the_new_on_demand_price_is_dropped(tables: Tables) -> None:
    answer = refresh.RegionAnswer(region="us-east-1", prices=price_of("p5.48xlarge", 20))
    consistent, lines = refresh.drop_contradictions(refresh.merge(tables, answer, TODAY))
    assert lines[0].startswith("spot price of p5.48xlarge in us-east-1: 22.9825 USD per hour (SkyPilot catalog v9")
    row = offer_row(consistent, "p5.48xlarge")
    assert row is not None and row.spot is not None and len(lines) == 3
    assert [price.zone_id for price in (row.spot, *row.dearer_spot)] == ["use1-az6", "use1-az3", "use1-az2"]
    assert row.on_demand is not None and row.on_demand.usd_per_hour == 20


def test_a_spot_price_of_a_zone_that_offers_the_type_no_more_is_dropped(tables: Tables) -> None:
    live = refresh.RegionAnswer(
        region="us-east-1", spot={"p5.48xlarge": (ZonePrice(20.0, "use1-az1"), ZonePrice(21.0, "use1-az2"))}
    )
    moved = refresh.RegionAnswer(region="us-east-1", zones={"p5.48xlarge": ("use1-az2",)})
    merged = refresh.merge(refresh.merge(tables, live, TODAY), moved, TODAY)
    consistent, lines = refresh.drop_contradictions(merged)
    assert [line for line in lines if "is of zone use1-az1, which does not offer the type" in line]
    row = offer_row(consistent, "p5.48xlarge")
    assert row is not None and row.spot is not None
    assert (row.spot.zone_id, row.spot.usd_per_hour, row.dearer_spot) == ("use1-az2", 21.0, ())


@pytest.mark.usefixtures("aws")
def test_spot_prices_alone_are_read_for_the_types_in_play() -> None:
    before = load()
    result = refresh.refresh([REGION], spot_types={"p4d.24xlarge"})
    after = load()
    offer, was = after.offer("p4d.24xlarge", REGION), before.offer("p4d.24xlarge", REGION)
    assert offer is not None and was is not None and offer.spot is not None
    assert {price.source for price in offer.spot_by_zone} == {"spot-price-history"}
    assert len(offer.spot_by_zone) == len(offer.zone_ids) > 1
    assert replace(offer, spot=was.spot, dearer_spot=was.dearer_spot) == was
    assert after.offer("p5.48xlarge", REGION) == before.offer("p5.48xlarge", REGION)
    assert after.unit_prices == before.unit_prices and result.answers[0].failures == []
