"""Azure's price API: parser, pages and retries against a real HTTP server with answers of the documented shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from optimizer.clouds.cloud import PricesUnreadableError, RegionPrice
from optimizer.clouds.offers import load_offers
from optimizer.clouds.providers import azure
from optimizer.clouds.providers.azure import CLOUD, fetch, parse
from optimizer.clouds.refresh import refresh_cloud
from optimizer.clouds.tables import refreshed_directory, refreshed_file, type_names
from optimizer.contract.errors import GpufleetError
from tests.unit.optimizer.commands.conftest import Gpufleet, gpufleet

__all__ = ["gpufleet"]  # a fixture

ND = "Standard_ND96isr_H100_v5"
NOW = datetime(2026, 11, 21, tzinfo=UTC)
# Answer of a test's server: (status, headers, body) for a path with its query.
Answer = tuple[int, dict[str, str], Any]


def item(**changes: Any) -> dict[str, Any]:
    """One price, with the fields of the API's documentation."""
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": 98.32,
        "unitPrice": 98.32,
        "armRegionName": "eastus",
        "location": "US East",
        "effectiveStartDate": "2023-08-01T00:00:00Z",
        "meterId": "0f0c2d6e-3b0c-5f52-8b1a-3f0f8c3a7a55",
        "meterName": "ND96isr H100 v5",
        "productId": "DZH318Z08NVR",
        "skuId": "DZH318Z08NVR/0001",
        "productName": "Virtual Machines NDsr H100 v5 Series",
        "skuName": "Standard_ND96isr_H100_v5",
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": ND,
    } | changes


def test_on_demand_and_spot_of_linux_by_region() -> None:
    items = [
        item(),
        item(retailPrice=30.1, meterName="ND96isr H100 v5 Spot", skuName=f"{ND} Spot"),
        item(armRegionName="westeurope", retailPrice=127.8),
    ]
    assert parse(items, ND, NOW) == (
        {"eastus": RegionPrice(on_demand=98.32, spot=30.1), "westeurope": RegionPrice(on_demand=127.8, spot=None)},
        [],
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"productName": "Virtual Machines NDsr H100 v5 Series Windows"},
        {"productName": "NDsr H100 v5 Series Cloud Services"},
        {"skuName": f"{ND} Low Priority"},
        {"type": "DevTestConsumption"},
        {"type": "Reservation"},
        {"armSkuName": "Standard_ND96is_H100_v5"},
        {"effectiveStartDate": "2026-12-01T00:00:00Z"},
    ],
)
def test_other_products_and_prices_not_yet_in_force_are_left_out(changes: dict[str, Any]) -> None:
    prices, skipped = parse([item(**changes, retailPrice=1.0), item()], ND, NOW)
    assert (prices["eastus"].on_demand, skipped) == (98.32, [])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"retailPrice": 0}, "0.0 USD per 1 Hour is not a price"),
        ({"retailPrice": -1}, "-1.0 USD"),
        ({"retailPrice": float("nan")}, "nan USD"),
        ({"currencyCode": "EUR"}, "98.32 EUR"),
        ({"unitOfMeasure": "1/Month"}, "per 1/Month"),
        ({"armRegionName": ""}, "no region"),
        ({"effectiveStartDate": "soon"}, "soon"),
        ({"retailPrice": None}, "NoneType"),
    ],
)
def test_an_unusable_price_is_skipped_with_its_reason(changes: dict[str, Any], says: str) -> None:
    prices, (skipped,) = parse([item(**changes)], ND, NOW)
    assert prices == {} and says in str(skipped) and f"{ND}, item 1" in str(skipped)


def test_the_newest_price_in_force_counts_and_a_primary_meter_before_others() -> None:
    old = item(retailPrice=120.0, effectiveStartDate="2022-01-01T00:00:00Z")
    secondary = item(retailPrice=1.0, effectiveStartDate="2025-01-01T00:00:00Z", isPrimaryMeterRegion=False)
    for items in ([old, item(), secondary], [secondary, item(), old]):
        prices, _ = parse(items, ND, NOW)
        assert prices["eastus"].on_demand == 98.32


def test_spot_above_on_demand_is_left_out() -> None:
    spot = item(retailPrice=99.0, skuName=f"{ND} Spot")
    prices, (skipped,) = parse([item(), spot], ND, NOW)
    assert prices["eastus"] == RegionPrice(on_demand=98.32, spot=None)
    assert "spot 99.0 USD per hour is above on-demand 98.32" in str(skipped)


class Server:
    """A price API on this machine; ``answers`` decides, ``seen`` records the queries."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.answer: Callable[[str], Answer] = lambda _: (200, {}, {"Items": []})
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.seen.append(self.path)
                status, headers, body = server.answer(self.path)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api/retail/prices"


@pytest.fixture
def api() -> Iterator[Server]:
    server = Server()
    thread = Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(azure, "BACKOFF_S", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def wanted(path: str) -> str:
    """The type a query asks for."""
    (text,) = parse_qs(urlsplit(path).query)["$filter"]
    return text.split("armSkuName eq ")[1].strip("'")


def test_fetch_follows_every_page(api: Server) -> None:
    def answer(path: str) -> Answer:
        if "$skip=100" in path:
            return 200, {}, {"Items": [item(armRegionName="westus")], "NextPageLink": None, "Count": 1}
        return 200, {}, {"Items": [item()], "NextPageLink": f"{api.url}?$skip=100", "Count": 100}

    api.answer = answer
    assert [found["armRegionName"] for found in fetch(ND, api.url)] == ["eastus", "westus"]
    (query,) = [parse_qs(urlsplit(path).query) for path in api.seen[:1]]
    assert query["currencyCode"] == ["USD"]
    assert query["$filter"] == [
        f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armSkuName eq '{ND}'"
    ]


def test_fetch_waits_out_throttling_and_server_faults(api: Server) -> None:
    def answer(_: str) -> Answer:
        if len(api.seen) == 1:
            return 429, {"Retry-After": "0"}, {"error": "slow down"}
        return (503, {}, b"") if len(api.seen) == 2 else (200, {}, {"Items": [item()], "NextPageLink": ""})

    api.answer = answer
    assert len(list(fetch(ND, api.url))) == 1
    assert len(api.seen) == 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, {}, b""), "did not answer: too many 500 error responses"),
        ((404, {}, b""), "HTTP status 404"),
        ((200, {}, b"<html>please sign in</html>"), "127.0.0.1"),
        ((200, {}, {"Prices": []}), "something other than a page of prices"),
        ((200, {}, []), "something other than a page of prices"),
        ((200, {}, {"Items": [], "NextPageLink": "http://example.com/x"}), "another host than 127.0.0.1"),
    ],
)
def test_fetch_says_what_came_instead_of_prices(api: Server, answer: Answer, says: str) -> None:
    api.answer = lambda _: answer
    with pytest.raises(PricesUnreadableError, match=says):
        list(fetch(ND, api.url))


def test_fetch_ends_where_pages_do_not(api: Server) -> None:
    api.answer = lambda _: (200, {}, {"Items": [], "NextPageLink": api.url})
    with pytest.raises(PricesUnreadableError, match="more than 50 pages"):
        list(fetch(ND, api.url))


def test_refresh_replaces_what_was_read_and_keeps_the_rest(api: Server) -> None:
    spot = item(retailPrice=20.0, skuName=f"{ND} Spot")
    api.answer = lambda path: (200, {}, {"Items": [item(retailPrice=60.5), spot] if wanted(path) == ND else []})
    before = {(o.offer.instance.name, o.offer.region): o.offer for o in load_offers(["azure"]).offers}
    result = refresh_cloud(CLOUD, api.url)
    assert result.regions == {ND: 1}
    assert len(result.failures) == len(type_names("azure")) - 1
    assert "the API answered with no usable price; the last good data stays" in str(result.failures[0])
    after = {(o.offer.instance.name, o.offer.region): o.offer for o in load_offers(["azure"]).offers}
    assert {key: offer for key, offer in after.items() if key[0] != ND} == {
        key: offer for key, offer in before.items() if key[0] != ND
    }
    (fresh,) = [offer for (name, _), offer in after.items() if name == ND]
    assert fresh.region == "eastus" and fresh.on_demand is not None and fresh.spot is not None
    assert (fresh.on_demand.usd_per_hour, fresh.spot.usd_per_hour) == (60.5, 20.0)
    assert (fresh.on_demand.source, fresh.on_demand.as_of) == ("Azure Retail Prices API", datetime.now(UTC).date())


def test_refresh_asks_no_more_of_an_api_that_went_down(api: Server) -> None:
    first = type_names("azure")[0]
    api.answer = lambda path: (
        (200, {}, {"Items": [item(armSkuName=first)]}) if wanted(path) == first else (400, {}, b"")
    )
    result = refresh_cloud(CLOUD, api.url)
    assert result.regions == {first: 1} and len(api.seen) == 2
    assert {str(failure).split(": ")[1] for failure in result.failures} == {
        f"127.0.0.1:{api.http.server_port} answered with HTTP status 400; the last good data stays"
    }


def test_refresh_that_reads_nothing_changes_nothing(api: Server) -> None:
    api.answer = lambda _: (403, {}, b"")
    with pytest.raises(GpufleetError, match="nothing could be read from Azure") as raised:
        refresh_cloud(CLOUD, api.url)
    assert raised.value.exit_code == 1 and "the last good prices stay in use" in str(raised.value)
    assert not refreshed_directory().exists()


def test_refresh_that_breaks_a_rule_is_not_kept(api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"eastus": RegionPrice(on_demand=5.0, spot=9.0)}
    monkeypatch.setattr(azure, "parse", lambda *_: (broken, []))
    with pytest.raises(GpufleetError, match="spot is at most on-demand"):
        refresh_cloud(CLOUD, api.url)
    assert not refreshed_directory().exists()


def test_the_command_refreshes_and_offers_then_show_the_prices(api: Server, gpufleet: Gpufleet) -> None:
    api.answer = lambda path: (200, {}, {"Items": [item(armSkuName=wanted(path), retailPrice=7.25)]})
    code, out, err = gpufleet("catalog", "refresh", "--cloud", "azure", "--endpoint", api.url, "--format", "json")
    assert code == 0
    assert {"instance_type": ND, "regions": 1} in json.loads(out)
    assert f"{ND}: 1 region\n" in err and f"written to {refreshed_file('azure')}" in err
    code, out, _ = gpufleet("offers", "--cloud", "azure", "--type", ND, "--format", "json")
    (row,) = json.loads(out)
    assert code == 0 and row["on_demand_usd_per_hour"] == 7.25
    assert row["as_of"] == datetime.now(UTC).date().isoformat()


def test_the_command_without_the_api_ends_with_status_1(api: Server, gpufleet: Gpufleet) -> None:
    api.answer = lambda _: (404, {}, b"")
    code, out, err = gpufleet("catalog", "refresh", "--cloud", "azure", "--endpoint", api.url)
    assert (code, out) == (1, "") and "next: the last good prices stay in use" in err
