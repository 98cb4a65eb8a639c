"""The Price List Query API (Pricing GetProducts): instance prices, on demand and reserved, and unit prices of a region.

https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/reading-service-price-list-file-for-query-api.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from optimizer.aws.paging import pages
from optimizer.catalog.sources import Skipped, UnusableRowError

if TYPE_CHECKING:
    from mypy_boto3_pricing import PricingClient

NAME = "on-demand and reserved prices"
ORIGIN = "AWS Price List API GetProducts"

# An instance-hour: Linux without licences, shared hardware, capacity in use. Answers are checked against these again:
# the API ignores an unknown filter.
INSTANCE_ATTRIBUTES = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "preInstalledSw": "NA",
}
RESERVED_TERM = {"LeaseContractLength": "1yr", "PurchaseOption": "No Upfront", "OfferingClass": "standard"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePrice:
    """Prices of one type, USD per instance-hour; reserved is one year, nothing upfront, not convertible."""

    on_demand: float
    reserved_1yr: float | None


class _UnitQuery(NamedTuple):
    """A unit price's products in the price list; ``usage_type`` is a pattern without the region's prefix.

    ``filters`` are few on purpose: the API answers with nothing to a filter that AWS does not pair with the product.
    Empty ``units`` accept any; ``per`` is our units in one of the list's.
    """

    service: str
    usage_type: str
    units: frozenset[str]
    filters: Mapping[str, str]
    per: float


def _query(service: str, usage_type: str, units: str, family: str = "", per: float = 1, **filters: str) -> _UnitQuery:
    """A query; ``units`` between blanks, ``family`` the filter productFamily."""
    filters = ({"productFamily": family} if family else {}) | filters
    return _UnitQuery(service, usage_type, frozenset(units.split()), filters, per)


_EC2 = "AmazonEC2"
_CLOUDWATCH = "AmazonCloudWatch"
UNIT_QUERIES: dict[str, _UnitQuery] = {
    "gp3-storage": _query(_EC2, r"EBS:VolumeUsage\.gp3", "GB-Mo", "Storage", volumeApiName="gp3"),
    "gp3-iops": _query(_EC2, r"EBS:VolumeP-IOPS\.gp3", "IOPS-Mo", "System Operation", volumeApiName="gp3"),
    # The list prices a GiB/s, the pricing page a MiB/s.
    "gp3-throughput": _query(
        _EC2, r"EBS:VolumeP-Throughput\.gp3", "GiBps-mo", "Provisioned Throughput", 1024, volumeApiName="gp3"
    ),
    "s3-standard-storage": _query("AmazonS3", "TimedStorage-ByteHrs", "GB-Mo", "Storage"),
    # PERSISTENT_1 has other throughputs, so the usage type names the product. Read in public code, 2026-11-23.
    "lustre-storage": _query("AmazonFSx", r"Storage\.SSD\.125", "GB-Mo", "Storage", fileSystemType="Lustre"),
    "vpc-endpoint": _query("AmazonVPC", "VpcEndpoint-Hours", "Hrs", "VpcEndpoint"),
    "vpc-endpoint-data": _query("AmazonVPC", "VpcEndpoint-Bytes", "GB", "VpcEndpoint"),
    "kms-key": _query("awskms", "KMS-Keys", ""),
    "kms-request": _query("awskms", "KMS-Requests", "Requests"),
    "s3-write-request": _query("AmazonS3", "Requests-Tier1", "Requests", "API Request"),
    "s3-read-request": _query("AmazonS3", "Requests-Tier2", "Requests", "API Request"),
    "nat-gateway": _query(_EC2, "NatGateway-Hours", "Hrs", "NAT Gateway"),
    "nat-gateway-data": _query(_EC2, "NatGateway-Bytes", "GB", "NAT Gateway"),
    "public-ipv4": _query("AmazonVPC", "PublicIPv4:InUseAddress", "Hrs"),
    "log-ingestion": _query(_CLOUDWATCH, "DataProcessing-Bytes", "GB", "Data Payload"),
    "custom-metric": _query(_CLOUDWATCH, "CW:MetricMonitorUsage", "Metrics", "Metric"),
    "metric-request": _query(_CLOUDWATCH, "CW:Requests", "Requests", "API Request"),
    "alarm": _query(_CLOUDWATCH, "CW:AlarmMonitorUsage", "Alarms", "Alarm"),
    "lambda-request": _query("AWSLambda", "Request-ARM", "Requests", "Serverless"),
    # The list says "Lambda-GB-Second"; Lambda's GB is 2^30 bytes.
    "lambda-compute": _query("AWSLambda", "Lambda-GB-Second-ARM", "Lambda-GB-Second Second", "Serverless"),
    # The first tier had another name.
    "sqs-request": _query("AWSQueueService", "Requests-(?:Tier1|RBP)", "Requests", "API Request", queueType="Standard"),
}


def fetch_instances(client: PricingClient, region: str, instance_type: str | None = None) -> list[str]:
    """Documents of one Linux type in ``region``, or of all: the list's name of a new family is unknown."""
    one = {"instanceType": instance_type} if instance_type else {}
    return _products(client, _EC2, {"regionCode": region, **one, **INSTANCE_ATTRIBUTES})


def fetch_unit(client: PricingClient, item: str, region: str) -> list[str]:
    """Price-list documents that may hold the price of ``item`` in ``region``."""
    query = UNIT_QUERIES[item]
    return _products(client, query.service, {"regionCode": region, **query.filters})


def _products(client: PricingClient, service: str, filters: Mapping[str, str]) -> list[str]:
    terms = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()]
    asked = {"ServiceCode": service, "FormatVersion": "aws_v1", "Filters": terms}
    return list(pages(client, "get_products", "PriceList", **asked))


def parse_instances(
    documents: Iterable[str], region: str, types: Collection[str]
) -> tuple[dict[str, InstancePrice], list[Skipped]]:
    """Prices of ``types``, and products without a usable price; all other products pass silently."""
    prices: dict[str, InstancePrice] = {}
    skipped: list[Skipped] = []
    for number, document in enumerate(documents, start=1):
        place = f"{region}, document {number}"
        try:
            product, attributes = _load(document)
            name = attributes.get("instanceType", "")
            if name not in types or not _is_instance_hour(attributes, region):
                continue
            place = f"{name} in {region}"
            price = _instance_price(product["terms"])
        except (UnusableRowError, KeyError, TypeError, ValueError, AttributeError) as error:
            skipped.append(Skipped(source=NAME, place=place, reason=_reason(error)))
            continue
        known = prices.get(name)
        if known is not None and known != price:
            skipped.append(
                Skipped(source=NAME, place=place, reason=f"two prices, {known} and {price}: the higher one is kept")
            )
        if known is None or price.on_demand > known.on_demand:
            prices[name] = price
    return prices, skipped


def parse_unit(documents: Iterable[str], item: str, region: str) -> tuple[float | None, list[Skipped]]:
    """Return the price of one unit of ``item``, USD, in the first (dearest) tier, or None; and unusable documents."""
    query = UNIT_QUERIES[item]
    pattern = re.compile(rf"(?:[A-Za-z0-9-]+-)?{query.usage_type}")
    prices: set[float] = set()
    skipped: list[Skipped] = []
    for number, document in enumerate(documents, start=1):
        try:
            product, attributes = _load(document)
            if attributes.get("regionCode") != region or not pattern.fullmatch(attributes["usagetype"]):
                continue
            for term in product["terms"]["OnDemand"].values():
                prices.add(_first_tier(term, query.units) / query.per)
        except (UnusableRowError, KeyError, TypeError, ValueError, AttributeError) as error:
            place = f"{region}, document {number}"
            skipped.append(Skipped(source=f"price of {item}", place=place, reason=_reason(error)))
    return max(prices, default=None), skipped


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UnusableRowError) else f"malformed document: {error!r}"


def _load(document: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a document with its product's attributes."""
    product = json.loads(document)
    if not isinstance(product, dict):
        raise UnusableRowError(f"a JSON {type(product).__name__}, not a product")
    return product, product["product"]["attributes"]


def _is_instance_hour(attributes: Mapping[str, str], region: str) -> bool:
    return (
        INSTANCE_ATTRIBUTES.items() <= attributes.items()
        and attributes.get("regionCode") == region
        # A Capacity Block is listed at 0 USD: it is paid upfront, for a date.
        and attributes.get("marketoption", "OnDemand") == "OnDemand"
        and attributes.get("operation", "RunInstances") == "RunInstances"
    )


def _instance_price(terms: Mapping[str, Any]) -> InstancePrice:
    on_demand = max((_first_tier(term, {"Hrs"}) for term in terms.get("OnDemand", {}).values()), default=None)
    if on_demand is None:
        raise UnusableRowError("no on-demand term")
    reserved = (
        _first_tier(term, {"Hrs"})
        for term in terms.get("Reserved", {}).values()
        if RESERVED_TERM.items() <= term.get("termAttributes", {}).items()
    )
    return InstancePrice(on_demand=on_demand, reserved_1yr=max(reserved, default=None))


def _first_tier(term: Mapping[str, Any], units: Collection[str]) -> float:
    """USD per unit of a term's first tier."""
    dimensions = [
        dimension for dimension in term["priceDimensions"].values() if float(dimension.get("beginRange", "0") or 0) == 0
    ]
    if len(dimensions) != 1:
        raise UnusableRowError(f"{len(dimensions)} price dimensions begin at 0")
    unit, usd = dimensions[0]["unit"], float(dimensions[0]["pricePerUnit"]["USD"])
    if units and unit not in units:
        raise UnusableRowError(f"priced per {unit!r}, not per {' or '.join(sorted(units))}")
    if not 0 < usd < float("inf"):
        raise UnusableRowError(f"a price is above 0 USD, got {usd}")
    return usd
