from __future__ import annotations

import json

import pytest

from optimizer.catalog.model import UNIT_ITEMS
from optimizer.catalog.sources import price_list
from optimizer.catalog.sources.price_list import InstancePrice
from tests.unit.optimizer.catalog.price_documents import instance_document, unit_document

REGION = "us-east-1"
TYPES = {"p5.48xlarge", "p4d.24xlarge"}
STANDARD = ("1yr", "No Upfront", "standard")


def test_reads_on_demand_and_the_one_reserved_term_that_counts() -> None:
    document = instance_document(
        "p4d.24xlarge",
        on_demand="21.9576420000",
        reserved={
            STANDARD: "13.9210940000",
            ("1yr", "No Upfront", "convertible"): "15.9",
            ("3yr", "No Upfront", "standard"): "8.5",
            ("1yr", "All Upfront", "standard"): "0",
        },
    )
    found, skipped = price_list.parse_instances([document], REGION, TYPES)
    assert skipped == []
    assert found == {
        "p4d.24xlarge": InstancePrice(instance_type="p4d.24xlarge", on_demand=21.957642, reserved_1yr=13.921094)
    }


def test_a_type_without_a_reserved_term_has_none() -> None:
    found, _ = price_list.parse_instances([instance_document()], REGION, TYPES)
    assert found["p5.48xlarge"].reserved_1yr is None


@pytest.mark.parametrize(
    "other",
    [
        {"operatingSystem": "Windows", "preInstalledSw": "NA"},
        {"operatingSystem": "RHEL"},
        {"tenancy": "Dedicated"},
        {"tenancy": "Host"},
        {"capacitystatus": "UnusedCapacityReservation"},
        {"capacitystatus": "AllocatedCapacityReservation"},
        {"preInstalledSw": "SQL Ent"},
        {"marketoption": "CapacityBlock"},
        {"operation": "RunInstances:0102"},
        {"regionCode": "us-west-2"},
        {"instanceType": "m5.large"},
    ],
)
def test_products_of_another_kind_pass_silently(other: dict[str, str]) -> None:
    weird = instance_document(on_demand="0.0100000000", attributes=other)
    found, skipped = price_list.parse_instances([weird, instance_document()], REGION, TYPES)
    assert (found["p5.48xlarge"].on_demand, skipped) == (55.04, [])


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (instance_document(on_demand="0.0000000000"), "above 0 USD, got 0.0"),
        (instance_document(on_demand="-1"), "above 0 USD, got -1.0"),
        (instance_document(on_demand="nan"), "above 0 USD, got nan"),
        (instance_document(on_demand="a lot"), "malformed document"),
        (instance_document(unit="Quantity"), "priced per 'Quantity'"),
        ("{not json", "malformed document"),
        ("[]", "a JSON list, not a product"),
        ("{}", "malformed document"),
        (
            json.dumps({"product": {"attributes": json.loads(instance_document())["product"]["attributes"]}}),
            "malformed",
        ),
        (json.dumps({**json.loads(instance_document()), "terms": {}}), "no on-demand term"),
    ],
)
def test_a_product_without_a_usable_price_is_reported_and_the_others_kept(document: str, reason: str) -> None:
    good = instance_document("p4d.24xlarge", on_demand="21.95")
    found, skipped = price_list.parse_instances([document, good], REGION, TYPES)
    assert set(found) == {"p4d.24xlarge"}
    assert len(skipped) == 1 and reason in skipped[0].reason


def test_of_two_prices_the_higher_is_kept_and_reported() -> None:
    documents = [instance_document(on_demand="55.04"), instance_document(on_demand="60.00"), instance_document()]
    found, skipped = price_list.parse_instances(documents, REGION, TYPES)
    assert found["p5.48xlarge"].on_demand == 60
    assert all("two prices" in line.reason for line in skipped) and skipped


def test_the_same_price_twice_is_no_news() -> None:
    assert price_list.parse_instances([instance_document()] * 2, REGION, TYPES)[1] == []


@pytest.mark.parametrize(
    ("item", "documents", "usd"),
    [
        ("gp3-storage", [unit_document("EBS:VolumeUsage.gp3", "GB-Mo", ("0", "Inf", "0.0800000000"))], 0.08),
        ("gp3-iops", [unit_document("EBS:VolumeP-IOPS.gp3", "IOPS-Mo", ("0", "Inf", "0.005"))], 0.005),
        ("gp3-throughput", [unit_document("EBS:VolumeP-Throughput.gp3", "GiBps-mo", ("0", "Inf", "40.96"))], 0.04),
        (
            "s3-standard-storage",
            [
                unit_document("TimedStorage-ByteHrs", "GB-Mo", ("51200", "512000", "0.022"), ("0", "51200", "0.023")),
                unit_document("TimedStorage-SIA-ByteHrs", "GB-Mo", ("0", "Inf", "0.0125")),
            ],
            0.023,
        ),
        (
            "vpc-endpoint",
            [
                unit_document("USE1-VpcEndpoint-Hours", "Hrs", ("0", "Inf", "0.01")),
                unit_document("USE1-VpcEndpoint-GWLBE-Hours", "Hrs", ("0", "Inf", "0.0125")),
            ],
            0.01,
        ),
        (
            "vpc-endpoint-data",
            [unit_document("USE1-VpcEndpoint-Bytes", "GB", ("0", "1048576", "0.01"), ("1048576", "Inf", "0.006"))],
            0.01,
        ),
        ("kms-key", [unit_document("us-east-1-KMS-Keys", "Keys", ("0", "Inf", "1.0000000000"))], 1),
        (
            "kms-request",
            [
                unit_document("us-east-1-KMS-Requests", "Requests", ("0", "Inf", "0.0000030000")),
                unit_document("us-east-1-KMS-Requests-Asymmetric", "Requests", ("0", "Inf", "0.0000150000")),
            ],
            0.000003,
        ),
        (
            "s3-write-request",
            [
                unit_document("Requests-Tier1", "Requests", ("0", "Inf", "0.0000050000")),
                unit_document("Requests-SIA-Tier1", "Requests", ("0", "Inf", "0.0000100000")),
            ],
            0.000005,
        ),
        (
            "nat-gateway",
            [
                unit_document("NatGateway-Hours", "Hrs", ("0", "Inf", "0.0450000000")),
                unit_document("USE1-RegionalNatGateway-Hours", "Hrs", ("0", "Inf", "0.0900000000")),
            ],
            0.045,
        ),
        ("nat-gateway-data", [unit_document("NatGateway-Bytes", "GB", ("0", "Inf", "0.0450000000"))], 0.045),
        (
            "public-ipv4",
            [
                unit_document("USE1-PublicIPv4:InUseAddress", "Hrs", ("0", "Inf", "0.0050000000")),
                unit_document("USE1-PublicIPv4:IdleAddress", "Hrs", ("0", "Inf", "0.0060000000")),
            ],
            0.005,
        ),
        (
            "log-ingestion",
            [
                unit_document("USE1-DataProcessing-Bytes", "GB", ("0", "Inf", "0.5000000000")),
                unit_document("USE1-DataProcessingIA-Bytes", "GB", ("0", "Inf", "0.2500000000")),
            ],
            0.5,
        ),
        (
            "vended-log-ingestion",
            [
                unit_document("USE1-VendedLog-Bytes", "GB", ("0", "10240", "0.5000000000"), ("10240", "Inf", "0.25")),
                unit_document("USE1-VendedLog-Bytes-WAFLogs", "GB", ("0", "Inf", "0.6000000000")),
            ],
            0.5,
        ),
        (
            "custom-metric",
            [unit_document("CW:MetricMonitorUsage", "Metrics", ("0", "10000", "0.3"), ("10000", "250000", "0.1"))],
            0.3,
        ),
        (
            "metric-request",
            [
                unit_document("CW:Requests", "Requests", ("0", "Inf", "0.0000100000")),
                unit_document("CW:GMD-Metrics", "Metrics", ("0", "Inf", "0.0000200000")),
            ],
            0.00001,
        ),
        (
            "alarm",
            [
                unit_document("CW:AlarmMonitorUsage", "Alarms", ("0", "Inf", "0.1000000000")),
                unit_document("CW:HighResAlarmMonitorUsage", "Alarms", ("0", "Inf", "0.3000000000")),
            ],
            0.1,
        ),
        ("dashboard", [unit_document("DashboardsUsageHour", "Dashboards", ("0", "Inf", "3.0"), region="")], 3),
        (
            "lambda-request",
            [
                unit_document("USE1-Request-ARM", "Requests", ("0", "Inf", "0.0000002000")),
                unit_document("USE1-Request", "Requests", ("0", "Inf", "0.0000003000")),
            ],
            0.0000002,
        ),
        (
            "lambda-compute",
            [
                unit_document("USE1-Lambda-GB-Second-ARM", "Lambda-GB-Second", ("0", "7500000000", "0.0000133334")),
                unit_document("USE1-Lambda-GB-Second", "Lambda-GB-Second", ("0", "Inf", "0.0000166667")),
            ],
            0.0000133334,
        ),
        (
            "sqs-request",
            [
                unit_document("Requests-Tier1", "Requests", ("0", "100000000000", "0.0000004000")),
                unit_document("Requests-FIFO-Tier1", "Requests", ("0", "Inf", "0.0000005000")),
            ],
            0.0000004,
        ),
        (
            "eks-cluster",
            [
                unit_document("USE1-AmazonEKS-Hours:perCluster", "hours", ("0", "Inf", "0.1000000000")),
                unit_document("USE1-AmazonEKS-Hours:extendedSupport", "hours", ("0", "Inf", "0.5000000000")),
            ],
            0.1,
        ),
        (
            "system-node",
            [
                unit_document("BoxUsage:t4g.small", "Hrs", ("0", "Inf", "0.0168000000")),
                unit_document("UnusedBox:t4g.small", "Hrs", ("0", "Inf", "0.0200000000")),
            ],
            0.0168,
        ),
    ],
)
def test_unit_prices_are_of_the_first_tier_in_our_units(item: str, documents: list[str], usd: float) -> None:
    found, skipped = price_list.parse_unit(documents, item, REGION)  # type: ignore[arg-type]
    assert found == pytest.approx(usd)
    assert skipped == []


def test_every_unit_price_has_a_query() -> None:
    assert set(price_list.UNIT_QUERIES) == set(UNIT_ITEMS)


def test_a_unit_price_in_another_unit_or_region_is_none() -> None:
    other_region = unit_document("EBS:VolumeUsage.gp3", "GB-Mo", ("0", "Inf", "0.08"), region="eu-west-1")
    assert price_list.parse_unit([other_region], "gp3-storage", REGION) == (None, [])
    other_unit = unit_document("EBS:VolumeUsage.gp3", "GB-Hr", ("0", "Inf", "0.08"))
    found, skipped = price_list.parse_unit([other_unit], "gp3-storage", REGION)
    assert found is None and "priced per 'GB-Hr'" in skipped[0].reason
