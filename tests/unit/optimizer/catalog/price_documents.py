"""Price-list documents as Pricing GetProducts answers them."""

from __future__ import annotations

import json
from typing import Any


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
