"""Price-list documents as Pricing GetProducts answers them."""

from __future__ import annotations

import json
from typing import Any

# Item, its price in our units, and products of the list: usage type, unit, USD of the first tier.
_UNIT_PRODUCTS = """
gp3-storage 0.08 EBS:VolumeUsage.gp3 GB-Mo 0.08
gp3-iops 0.005 EBS:VolumeP-IOPS.gp3 IOPS-Mo 0.005
gp3-throughput 0.04 EBS:VolumeP-Throughput.gp3 GiBps-mo 40.96
s3-standard-storage 0.023 TimedStorage-ByteHrs GB-Mo 0.023 TimedStorage-SIA-ByteHrs GB-Mo 0.0125
lustre-storage 0.145 Storage.SSD.125 GB-Mo 0.145
vpc-endpoint 0.01 USE1-VpcEndpoint-Hours Hrs 0.01 USE1-VpcEndpoint-GWLBE-Hours Hrs 0.0125
vpc-endpoint-data 0.01 USE1-VpcEndpoint-Bytes GB 0.01
kms-key 1 us-east-1-KMS-Keys Keys 1
kms-request 3e-06 us-east-1-KMS-Requests Requests 0.000003 us-east-1-KMS-Requests-Asymmetric Requests 0.000015
s3-write-request 5e-06 Requests-Tier1 Requests 0.000005 Requests-SIA-Tier1 Requests 0.00001
s3-read-request 4e-07 Requests-Tier2 Requests 0.0000004 Requests-SIA-Tier2 Requests 0.000001
nat-gateway 0.045 NatGateway-Hours Hrs 0.045 USE1-RegionalNatGateway-Hours Hrs 0.09
nat-gateway-data 0.045 NatGateway-Bytes GB 0.045
public-ipv4 0.005 USE1-PublicIPv4:InUseAddress Hrs 0.005 USE1-PublicIPv4:IdleAddress Hrs 0.006
log-ingestion 0.5 USE1-DataProcessing-Bytes GB 0.5 USE1-DataProcessingIA-Bytes GB 0.25
custom-metric 0.3 CW:MetricMonitorUsage Metrics 0.3
metric-request 1e-05 CW:Requests Requests 0.00001 CW:GMD-Metrics Metrics 0.00002
alarm 0.1 CW:AlarmMonitorUsage Alarms 0.1 CW:HighResAlarmMonitorUsage Alarms 0.3
lambda-request 2e-07 USE1-Request-ARM Requests 0.0000002 USE1-Request Requests 0.0000003
lambda-compute 1.33334e-05 USE1-Lambda-GB-Second-ARM Lambda-GB-Second 0.0000133334 \
USE1-Lambda-GB-Second Lambda-GB-Second 0.0000166667
sqs-request 4e-07 Requests-Tier1 Requests 0.0000004 Requests-FIFO-Tier1 Requests 0.0000005
"""


def _parse_products(line: str) -> tuple[float, list[tuple[str, str, str]]]:
    usd, *products = line.split()
    return float(usd), list(zip(products[::3], products[1::3], products[2::3], strict=True))


UNIT_PRODUCTS: dict[Any, tuple[float, list[tuple[str, str, str]]]] = {
    item: _parse_products(rest)
    for item, rest in (line.split(" ", maxsplit=1) for line in _UNIT_PRODUCTS.strip().splitlines())
}


def instance_document(
    name: str = "p5.48xlarge",
    region: str = "us-east-1",
    *,
    on_demand: str = "55.0400000000",
    reserved: dict[tuple[str, str, str], str] | None = None,
    unit: str = "Hrs",
    attributes: dict[str, str] | None = None,
) -> str:
    """One EC2 product with its terms; ``reserved`` maps (lease, option, class) to USD per hour."""
    sku = f"SKU{abs(hash((name, region, on_demand))) % 10**8}"
    terms: dict[str, Any] = {
        "OnDemand": {
            f"{sku}.JRTCKXETXF": _term(sku, "JRTCKXETXF", {"6YS6EN2CT7": ("0", "Inf", unit, on_demand)}, {}),
        }
    }
    for number, ((lease, option, offering), usd) in enumerate((reserved or {}).items()):
        code = f"TERM{number}"
        upfront = {} if option == "No Upfront" else {"2TG2D8R56U": ("0", "0", "Quantity", "1000")}
        terms.setdefault("Reserved", {})[f"{sku}.{code}"] = _term(
            sku,
            code,
            upfront if upfront else {"6YS6EN2CT7": ("0", "Inf", unit, usd)},
            {"LeaseContractLength": lease, "PurchaseOption": option, "OfferingClass": offering},
        )
    return json.dumps(
        {
            "product": {
                "productFamily": "Compute Instance",
                "sku": sku,
                "attributes": {
                    "instanceType": name,
                    "regionCode": region,
                    "operatingSystem": "Linux",
                    "tenancy": "Shared",
                    "capacitystatus": "Used",
                    "preInstalledSw": "NA",
                    "operation": "RunInstances",
                    "marketoption": "OnDemand",
                    "licenseModel": "No License required",
                    "instanceFamily": "GPU instance",
                    "servicecode": "AmazonEC2",
                    **(attributes or {}),
                },
            },
            "serviceCode": "AmazonEC2",
            "terms": terms,
            "version": "20261118190733",
            "publicationDate": "2026-11-18T19:07:33Z",
        }
    )


def unit_document(
    usage_type: str, unit: str, *tiers: tuple[str, str, str], region: str = "us-east-1", service: str = "AmazonEC2"
) -> str:
    """One product that is no instance; a tier is (begin, end, USD)."""
    dimensions = {f"D{number}": (begin, end, unit, usd) for number, (begin, end, usd) in enumerate(tiers)}
    return json.dumps(
        {
            "product": {"sku": "SKU", "attributes": {"regionCode": region, "usagetype": usage_type}},
            "serviceCode": service,
            "terms": {"OnDemand": {"SKU.JRTCKXETXF": _term("SKU", "JRTCKXETXF", dimensions, {})}},
        }
    )


def _term(sku: str, code: str, dimensions: dict[str, tuple[str, str, str, str]], attributes: dict[str, str]) -> Any:
    return {
        "sku": sku,
        "offerTermCode": code,
        "effectiveDate": "2026-11-01T00:00:00Z",
        "termAttributes": attributes,
        "priceDimensions": {
            f"{sku}.{code}.{rate}": {
                "rateCode": f"{sku}.{code}.{rate}",
                "beginRange": begin,
                "endRange": end,
                "unit": unit,
                "pricePerUnit": {"USD": usd},
                "appliesTo": [],
                "description": f"${usd} per {unit}",
            }
            for rate, (begin, end, unit, usd) in dimensions.items()
        },
    }
