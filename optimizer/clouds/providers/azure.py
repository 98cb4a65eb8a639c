"""Azure: prices from the Azure Retail Prices API, which anybody may read without an account.

https://learn.microsoft.com/en-us/rest/api/cost-management/retail-prices/azure-retail-prices
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from optimizer.catalog.sources import Skipped, UnusableRowError
from optimizer.clouds.cloud import Cloud, PriceApi, PricesUnreadableError, RegionPrice

if TYPE_CHECKING:
    import urllib3

# The API throttles (429) and names the wait in Retry-After, which urllib3 obeys; waits of 1, 2, 4, 8 s otherwise.
RETRIES = 5
BACKOFF_S = 1.0
TIMEOUT_S = 30.0
# A page has 100 prices (1,000 in later versions of the API), and one type has about three meters in each of 60 regions.
MAX_PAGES = 50


def fetch(instance_type: str, endpoint: str) -> Iterator[dict[str, Any]]:
    """Every pay-as-you-go price item of one type; PricesUnreadableError without an answer, or one without prices."""
    from urllib.parse import urlencode, urlsplit  # here: commands that read no prices must not wait for it

    import urllib3

    query = f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armSkuName eq '{instance_type}'"
    url: str | None = f"{endpoint}?{urlencode({'currencyCode': 'USD', '$filter': query})}"
    host = urlsplit(endpoint).hostname
    retries = urllib3.Retry(
        total=RETRIES,
        connect=2,
        backoff_factor=BACKOFF_S,
        status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods={"GET"},
    )
    with urllib3.PoolManager(retries=retries, timeout=TIMEOUT_S) as http:
        for _ in range(MAX_PAGES):
            if url is None:
                return
            page = _read_page(http, url)
            yield from page["Items"]
            url = page.get("NextPageLink") or None
            if url is not None and urlsplit(url).hostname != host:
                raise PricesUnreadableError(f"the next page is on another host than {host}: {url}")
    raise PricesUnreadableError(f"{instance_type} has more than {MAX_PAGES} pages of prices")


def _read_page(http: urllib3.PoolManager, url: str) -> dict[str, Any]:
    from urllib.parse import urlsplit

    import urllib3

    host = urlsplit(url).netloc
    try:
        answer = http.request("GET", url)
        page = json.loads(answer.data) if answer.status == 200 else None
    except urllib3.exceptions.MaxRetryError as error:
        raise PricesUnreadableError(f"{host} did not answer: {error.reason}") from error
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        raise PricesUnreadableError(f"{host}: {error}") from error
    if page is None:
        raise PricesUnreadableError(f"{host} answered with HTTP status {answer.status}")
    if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
        raise PricesUnreadableError(f"{host} answered with something other than a page of prices")
    return page


def parse(
    items: Iterable[dict[str, Any]], instance_type: str, now: datetime
) -> tuple[dict[str, RegionPrice], list[Skipped]]:
    """Linux on-demand and spot prices of ``instance_type`` by region, and unusable items.

    Among several prices of one meter, the newest in force at ``now`` (UTC) counts, a primary meter before others.
    """
    best: dict[tuple[str, str], tuple[tuple[bool, datetime], float]] = {}
    skipped = []
    for number, item in enumerate(items, start=1):
        try:
            price = _parse_item(item, instance_type, now)
        except (UnusableRowError, AttributeError, KeyError, TypeError, ValueError) as error:
            skipped.append(Skipped(source="Azure prices", place=f"{instance_type}, item {number}", reason=str(error)))
            continue
        if price is not None:
            key, rank, usd = price
            if key not in best or rank > best[key][0]:
                best[key] = (rank, usd)
    by_region: dict[str, dict[str, float]] = defaultdict(dict)
    for (region, kind), (_, usd) in best.items():
        by_region[region][kind] = usd
    prices = {}
    for region, usd_by_kind in sorted(by_region.items()):
        on_demand, spot = usd_by_kind.get("on_demand"), usd_by_kind.get("spot")
        if spot is not None and (on_demand is None or spot > on_demand):
            reason = f"spot {spot} USD per hour is above on-demand {on_demand}"
            skipped.append(Skipped(source="Azure prices", place=f"{instance_type} in {region}", reason=reason))
            spot = None
        if on_demand is not None:
            prices[region] = RegionPrice(on_demand=on_demand, spot=spot)
    return prices, skipped


def _parse_item(
    item: dict[str, Any], instance_type: str, now: datetime
) -> tuple[tuple[str, str], tuple[bool, datetime], float] | None:
    """(region, kind), rank and price of one item; None for other products and prices not yet in force."""
    if item["armSkuName"] != instance_type or item["type"] != "Consumption":
        return None
    names = f"{item['skuName']} {item['meterName']}"
    # Windows has its license in the price; "Low Priority" is the older spot of scale sets; Cloud Services is another
    # product on the same machines.
    if "Windows" in item["productName"] or "Cloud Services" in item["productName"] or "Low Priority" in names:
        return None
    since = datetime.fromisoformat(item["effectiveStartDate"].replace("Z", "+00:00"))
    if since > now:
        return None
    usd = float(item["retailPrice"])
    if item["currencyCode"] != "USD" or item["unitOfMeasure"] != "1 Hour" or not 0 < usd < float("inf"):
        raise UnusableRowError(f"{usd} {item['currencyCode']} per {item['unitOfMeasure']} is not a price of an hour")
    region = item["armRegionName"]
    if not region or not isinstance(region, str):
        raise UnusableRowError("no region")
    rank = (bool(item.get("isPrimaryMeterRegion", True)), since)
    return (region, "spot" if "Spot" in names else "on_demand"), rank, usd


def _read_prices(instance_type: str, endpoint: str) -> tuple[dict[str, RegionPrice], list[Skipped]]:
    return parse(fetch(instance_type, endpoint), instance_type, datetime.now(UTC))


CLOUD = Cloud(
    name="azure",
    title="Azure",
    place=1,
    price_api=PriceApi(
        name="Azure Retail Prices API", endpoint="https://prices.azure.com/api/retail/prices", read=_read_prices
    ),
)
