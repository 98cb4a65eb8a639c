"""The Price List Query API (Pricing GetProducts): on-demand and reserved instance prices, and unit prices, of a region.

https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/reading-service-price-list-file-for-query-api.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizer.catalog.model import UnitItem
from optimizer.catalog.sources import Skipped, UnusableRowError

if TYPE_CHECKING:
    from mypy_boto3_pricing import PricingClient

NAME = "on-demand and reserved prices"
ORIGIN = "AWS Price List API GetProducts"

# What an instance-hour is: Linux without licences, shared hardware, capacity in use. An answer is checked against these
# again: the API ignores a filter it does not know.
INSTANCE_ATTRIBUTES = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "preInstalledSw": "NA",
}
# One year, nothing upfront, not convertible: the reservation a training fleet is compared with.
RESERVED_TERM = {"LeaseContractLength": "1yr", "PurchaseOption": "No Upfront", "OfferingClass": "standard"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePrice:
    """Prices of one type, USD per instance-hour; reserved is None where AWS sells no one-year no-upfront term."""

    instance_type: str
    on_demand: float
    reserved_1yr: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnitQuery:
    """How the price list names a unit price: which products to ask for, and which of them it is.

    Filters are few on purpose: one that AWS does not pair with the product answers with nothing; the usage type tells
    the product. No ``units`` accepts any. ``per`` is how many of our units one of the list's is, so that usd / per is
    our price. ``one_for_all``: the list has a single product without a region.
    """

    service: str
    filters: Mapping[str, str]
    usage_type: str
    units: frozenset[str]
    per: float = 1.0
    one_for_all: bool = False


_EC2, _CLOUDWATCH = "AmazonEC2", "AmazonCloudWatch"
UNIT_QUERIES: dict[UnitItem, _UnitQuery] = {
    "gp3-storage": _UnitQuery(
        service=_EC2,
        filters={"productFamily": "Storage", "volumeApiName": "gp3"},
        usage_type=r"EBS:VolumeUsage\.gp3",
        units=frozenset({"GB-Mo"}),
    ),
    "gp3-iops": _UnitQuery(
        service=_EC2,
        filters={"productFamily": "System Operation", "volumeApiName": "gp3"},
        usage_type=r"EBS:VolumeP-IOPS\.gp3",
        units=frozenset({"IOPS-Mo"}),
    ),
    # The list prices a GiB/s, the pricing page a MiB/s.
    "gp3-throughput": _UnitQuery(
        service=_EC2,
        filters={"productFamily": "Provisioned Throughput", "volumeApiName": "gp3"},
        usage_type=r"EBS:VolumeP-Throughput\.gp3",
        units=frozenset({"GiBps-mo"}),
        per=1024,
    ),
    "s3-standard-storage": _UnitQuery(
        service="AmazonS3",
        filters={"productFamily": "Storage"},
        usage_type="TimedStorage-ByteHrs",
        units=frozenset({"GB-Mo"}),
    ),
    "vpc-endpoint": _UnitQuery(
        service="AmazonVPC",
        filters={"productFamily": "VpcEndpoint"},
        usage_type="VpcEndpoint-Hours",
        units=frozenset({"Hrs"}),
    ),
    "vpc-endpoint-data": _UnitQuery(
        service="AmazonVPC",
        filters={"productFamily": "VpcEndpoint"},
        usage_type="VpcEndpoint-Bytes",
        units=frozenset({"GB"}),
    ),
    "kms-key": _UnitQuery(
        service="awskms",
        filters={},
        usage_type="KMS-Keys",
        units=frozenset(),
    ),
    "kms-request": _UnitQuery(
        service="awskms",
        filters={},
        usage_type="KMS-Requests",
        units=frozenset({"Requests"}),
    ),
    "s3-write-request": _UnitQuery(
        service="AmazonS3",
        filters={"productFamily": "API Request"},
        usage_type="Requests-Tier1",
        units=frozenset({"Requests"}),
    ),
    "nat-gateway": _UnitQuery(
        service=_EC2,
        filters={"productFamily": "NAT Gateway"},
        usage_type="NatGateway-Hours",
        units=frozenset({"Hrs"}),
    ),
    "nat-gateway-data": _UnitQuery(
        service=_EC2,
        filters={"productFamily": "NAT Gateway"},
        usage_type="NatGateway-Bytes",
        units=frozenset({"GB"}),
    ),
    "public-ipv4": _UnitQuery(
        service="AmazonVPC",
        filters={},
        usage_type="PublicIPv4:InUseAddress",
        units=frozenset({"Hrs"}),
    ),
    "log-ingestion": _UnitQuery(
        service=_CLOUDWATCH,
        filters={"productFamily": "Data Payload"},
        usage_type="DataProcessing-Bytes",
        units=frozenset({"GB"}),
    ),
    "vended-log-ingestion": _UnitQuery(
        service=_CLOUDWATCH,
        filters={"productFamily": "Data Payload"},
        usage_type="VendedLog-Bytes",
        units=frozenset({"GB"}),
    ),
    "custom-metric": _UnitQuery(
        service=_CLOUDWATCH,
        filters={"productFamily": "Metric"},
        usage_type="CW:MetricMonitorUsage",
        units=frozenset({"Metrics"}),
    ),
    "metric-request": _UnitQuery(
        service=_CLOUDWATCH,
        filters={"productFamily": "API Request"},
        usage_type="CW:Requests",
        units=frozenset({"Requests"}),
    ),
    "alarm": _UnitQuery(
        service=_CLOUDWATCH,
        filters={"productFamily": "Alarm"},
        usage_type="CW:AlarmMonitorUsage",
        units=frozenset({"Alarms"}),
    ),
    "dashboard": _UnitQuery(
        service=_CLOUDWATCH,
        filters={"productFamily": "Dashboard"},
        usage_type="DashboardsUsageHour(?:-Basic)?",
        units=frozenset({"Dashboards"}),
        one_for_all=True,
    ),
    # The list says "Lambda-GB-Second"; Lambda's GB is 2^30 bytes.
    "lambda-request": _UnitQuery(
        service="AWSLambda",
        filters={"productFamily": "Serverless"},
        usage_type="Request-ARM",
        units=frozenset({"Requests"}),
    ),
    "lambda-compute": _UnitQuery(
        service="AWSLambda",
        filters={"productFamily": "Serverless"},
        usage_type="Lambda-GB-Second-ARM",
        units=frozenset({"Lambda-GB-Second", "Second"}),
    ),
    # Its first tier had another name.
    "sqs-request": _UnitQuery(
        service="AWSQueueService",
        filters={"productFamily": "API Request", "queueType": "Standard"},
        usage_type="Requests-(?:Tier1|RBP)",
        units=frozenset({"Requests"}),
    ),
    "eks-cluster": _UnitQuery(
        service="AmazonEKS",
        filters={"productFamily": "Compute"},
        usage_type="AmazonEKS-Hours:perCluster",
        units=frozenset({"Hours", "hours", "Hrs"}),
    ),
    "system-node": _UnitQuery(
        service=_EC2,
        filters={"instanceType": "t4g.small", **INSTANCE_ATTRIBUTES},
        usage_type=r"BoxUsage:t4g\.small",
        units=frozenset({"Hrs"}),
    ),
}


def fetch_instances(client: PricingClient, region: str, instance_type: str | None = None) -> list[str]:
    """Price-list documents of one Linux instance type in ``region``, or of every one.

    Not filtered by family: the list's family of a new GPU type cannot be known before AWS names it.
    """
    one = {"instanceType": instance_type} if instance_type else {}
    return _products(client, _EC2, {"regionCode": region, **one, **INSTANCE_ATTRIBUTES})


def fetch_unit(client: PricingClient, item: UnitItem, region: str) -> list[str]:
    """Price-list documents that may hold the price of ``item`` in ``region``."""
    query = UNIT_QUERIES[item]
    where = {} if query.one_for_all else {"regionCode": region}
    return _products(client, query.service, {**where, **query.filters})


def _products(client: PricingClient, service: str, filters: Mapping[str, str]) -> list[str]:
    pages = client.get_paginator("get_products").paginate(
        ServiceCode=service,
        FormatVersion="aws_v1",
        Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()],
    )
    return [document for page in pages for document in page["PriceList"]]


def parse_instances(
    documents: Iterable[str], region: str, types: Collection[str]
) -> tuple[dict[str, InstancePrice], list[Skipped]]:
    """Prices by type, of ``types`` only.

    Other types, systems, tenancies, capacity states, Capacity Blocks and other regions pass silently: they are no
    errors. A product that should have a price and has none that can be used is reported.

    Args:
        documents: price-list documents, JSON.
        region: the region asked for.
        types: the instance types of interest.
    """
    found: dict[str, InstancePrice] = {}
    skipped: list[Skipped] = []
    for number, document in enumerate(documents, start=1):
        place = f"{region}, document {number}"
        try:
            product = _load(document)
            attributes = product["product"]["attributes"]
            name = attributes.get("instanceType")
            if name not in types or not _is_instance_hour(attributes, region):
                continue
            place = f"{name} in {region}"
            price = _instance_price(name, product["terms"])
        except (UnusableRowError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error) if isinstance(error, UnusableRowError) else f"malformed document: {error!r}"
            skipped.append(Skipped(source=NAME, place=place, reason=reason))
            continue
        known = found.get(name)
        if known is not None and known != price:
            skipped.append(
                Skipped(source=NAME, place=place, reason=f"two prices, {known} and {price}: the higher one is kept")
            )
        if known is None or price.on_demand > known.on_demand:
            found[name] = price
    return found, skipped


def parse_unit(documents: Iterable[str], item: UnitItem, region: str) -> tuple[float | None, list[Skipped]]:
    """The price of one unit of ``item``, first tier (the dearest), USD; None where no document has it."""
    query = UNIT_QUERIES[item]
    pattern = re.compile(rf"(?:[A-Za-z0-9-]+-)?{query.usage_type}")
    prices: set[float] = set()
    skipped: list[Skipped] = []
    for number, document in enumerate(documents, start=1):
        try:
            product = _load(document)
            attributes = product["product"]["attributes"]
            elsewhere = attributes.get("regionCode") != region and not query.one_for_all
            if elsewhere or not pattern.fullmatch(attributes["usagetype"]):
                continue
            for term in product["terms"]["OnDemand"].values():
                prices.add(_first_tier(term, query.units) / query.per)
        except (UnusableRowError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error) if isinstance(error, UnusableRowError) else f"malformed document: {error!r}"
            skipped.append(Skipped(source=f"price of {item}", place=f"{region}, document {number}", reason=reason))
    return max(prices, default=None), skipped


def _load(document: str) -> dict[str, Any]:
    product = json.loads(document)
    if not isinstance(product, dict):
        raise UnusableRowError(f"a JSON {type(product).__name__}, not a product")
    return product


def _is_instance_hour(attributes: Mapping[str, str], region: str) -> bool:
    return (
        all(attributes.get(field) == value for field, value in INSTANCE_ATTRIBUTES.items())
        and attributes.get("regionCode") == region
        # A Capacity Block is listed at 0 USD: it is paid upfront, for a date.
        and attributes.get("marketoption", "OnDemand") == "OnDemand"
        and attributes.get("operation", "RunInstances") == "RunInstances"
    )


def _instance_price(name: str, terms: Mapping[str, Any]) -> InstancePrice:
    on_demand = max((_first_tier(term, {"Hrs"}) for term in terms.get("OnDemand", {}).values()), default=None)
    if on_demand is None:
        raise UnusableRowError("no on-demand term")
    return InstancePrice(
        instance_type=name, on_demand=on_demand, reserved_1yr=max(_reserved(terms.get("Reserved", {})), default=None)
    )


def _reserved(terms: Mapping[str, Any]) -> Iterator[float]:
    for term in terms.values():
        attributes = term.get("termAttributes", {})
        if all(attributes.get(field) == value for field, value in RESERVED_TERM.items()):
            yield _first_tier(term, {"Hrs"})


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
