"""Cost Explorer answered by botocore's Stubber, which checks each request against AWS's own model of it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from optimizer.aws import clients
from optimizer.aws.billing import Billed
from optimizer.commands.costs import StackBill, compare
from optimizer.contract.plan import PolicyOutlook, Spread
from tests.plans import sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import DeployedStack, ago

TODAY = datetime.now(UTC).date()
YESTERDAY, TOMORROW = TODAY - timedelta(days=1), TODAY + timedelta(days=1)
EC2, OTHER, S3 = "Amazon Elastic Compute Cloud - Compute", "EC2 - Other", "Amazon Simple Storage Service"


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    client = boto3.client("ce", region_name="us-east-1")
    with Stubber(client) as stubber:
        monkeypatch.setattr(clients, "cost_explorer", lambda: client)
        yield stubber


def day(when: Any, *groups: tuple[str, str, str], estimated: bool = False) -> dict[str, Any]:
    return {
        "TimePeriod": {"Start": when.isoformat(), "End": (when + timedelta(days=1)).isoformat()},
        "Groups": [
            {"Keys": [service, usage], "Metrics": {"UnblendedCost": {"Amount": usd, "Unit": "USD"}}}
            for service, usage, usd in groups
        ],
        "Estimated": estimated,
        "Total": {},
    }


def answer(explorer: Stubber, *days: dict[str, Any], token: str | None = None, filter_: Any = ANY, **more: Any) -> None:
    request = {
        "TimePeriod": ANY,
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "GroupBy": [{"Type": "DIMENSION", "Key": "SERVICE"}, {"Type": "DIMENSION", "Key": "USAGE_TYPE"}],
        "Filter": filter_,
        **more,
    }
    response = {"ResultsByTime": list(days), **({"NextPageToken": token} if token else {})}
    explorer.add_response("get_cost_and_usage", response, request)


def test_billed_costs_stand_beside_the_plan_and_the_meter(
    deployed: DeployedStack, gpufleet: Gpufleet, explorer: Stubber
) -> None:
    deployed.write_state(run_started_at=ago(days=2))
    own = {"Tags": {"Key": "gpufleet:stack", "Values": [deployed.names.stack], "MatchOptions": ["EQUALS"]}}
    counted = {"Not": {"Dimensions": {"Key": "RECORD_TYPE", "Values": ["Credit", "Refund", "Tax"]}}}
    period = {"Start": (TODAY - timedelta(days=2)).isoformat(), "End": TOMORROW.isoformat()}
    answer(
        explorer,
        day(YESTERDAY, (EC2, "USE1-SpotUsage:p4d.24xlarge", "30.5"), (OTHER, "USE1-EBS:VolumeUsage.gp3", "1.25")),
        token="more",
        filter_={"And": [own, counted]},
        TimePeriod=period,
    )
    answer(
        explorer,
        day(
            TODAY,
            (EC2, "BoxUsage:p4d.24xlarge", "10"),
            (S3, "TimedStorage-ByteHrs", "0.5"),
            ("Amazon Virtual Private Cloud", "USE1-VpcEndpoint-Hours", "0.36"),
            ("AWS Lambda", "USE1-Lambda-GB-Second-ARM", "0.01"),
            ("Amazon Bedrock", "Tokens", "0.02"),
            ("AWS Lambda", "Request-ARM", "0"),
            estimated=True,
        ),
        NextPageToken="more",
    )
    code, out, err = gpufleet("costs", *deployed.arguments, "--format", "json")
    assert code == 0
    document = json.loads(out)
    parts = {row["part"]: row for row in document["parts"]}
    billed = {part: row["billed_usd"] for part, row in parts.items()}
    assert billed == {
        "compute": 40.5,
        "volumes": 1.25,
        "storage": 0.5,
        "transfer": 0.36,
        "head_node": 0.01,
        "other": 0.02,
        "total": 42.64,
    }
    assert (parts["compute"]["plan_usd"], parts["total"]["plan_usd"], parts["total"]["meter_usd"]) == (95, 100, 44)
    assert document["newest_day"] == TODAY.isoformat()
    assert [line["estimated"] for line in document["days"]] == [False, False, True, True, True, True, True]
    assert "nothing is billed" not in err
    explorer.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("service", "usage_type", "part"),
    [
        (S3, "USE1-EUW1-AWS-Out-Bytes", "transfer"),
        (EC2, "USE1-DataTransfer-Regional-Bytes", "transfer"),
        ("Amazon FSx", "USE1-Storage.SSD.125", "storage"),
    ],
)
def test_traffic_and_file_systems_are_in_the_parts_that_plans_have_them_in(
    service: str, usage_type: str, part: str
) -> None:
    assert Billed(day=TODAY, service=service, usage_type=usage_type, usd=1.0, estimated=False).part == part


def test_the_table_says_how_old_the_bill_is(deployed: DeployedStack, gpufleet: Gpufleet, explorer: Stubber) -> None:
    deployed.write_state()
    answer(explorer, day(YESTERDAY, (EC2, "BoxUsage:p4d.24xlarge", "10")), day(TODAY))
    code, out, _ = gpufleet("costs", *deployed.arguments)
    assert code == 0
    assert f"Newest billed day: {YESTERDAY}; today is {TODAY}" in out
    assert "44.00 USD of a ceiling of 3,000.00, 22.50 USD an hour" in out
    explorer.assert_no_pending_responses()


def test_csv_has_a_row_a_day_and_usage_type(deployed: DeployedStack, gpufleet: Gpufleet, explorer: Stubber) -> None:
    deployed.write_state()
    answer(explorer, day(YESTERDAY, (EC2, "BoxUsage:p4d.24xlarge", "10")))
    _, out, _ = gpufleet("costs", *deployed.arguments, "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert list(row) == ["day", "part", "service", "usage_type", "usd", "estimated"]
    assert (row["day"], row["part"], row["usd"]) == (YESTERDAY.isoformat(), "compute", "10.0")


def test_when_cost_explorer_does_not_answer_the_meter_does(
    deployed: DeployedStack, gpufleet: Gpufleet, explorer: Stubber
) -> None:
    deployed.write_state()
    explorer.add_client_error("get_cost_and_usage", "AccessDeniedException", "ce:GetCostAndUsage")
    code, out, err = gpufleet("costs", *deployed.arguments)
    assert code == 0 and "44.00" in out
    assert "Cost Explorer cannot be read: the credentials may not do this (AccessDeniedException)" in err


def test_when_nothing_answers_it_ends_with_1(deployed: DeployedStack, gpufleet: Gpufleet, explorer: Stubber) -> None:
    explorer.add_client_error("get_cost_and_usage", "ThrottlingException", "slow down")
    code, out, err = gpufleet("costs", *deployed.arguments)
    assert (code, out) == (1, "") and "Cost Explorer cannot be read" in err


def test_since_begins_where_it_says_within_what_cost_explorer_keeps(
    deployed: DeployedStack, gpufleet: Gpufleet, explorer: Stubber
) -> None:
    deployed.write_state()
    for since, start in (("2020-01-01", TODAY - timedelta(days=395)), (YESTERDAY.isoformat(), YESTERDAY)):
        answer(explorer, TimePeriod={"Start": start.isoformat(), "End": TOMORROW.isoformat()})
        code, _, err = gpufleet("costs", *deployed.arguments, "--since", since)
        assert code == 0 and f"nothing is billed with the tag gpufleet:stack since {start}" in err
        assert "update-cost-allocation-tags-status" in err
    explorer.assert_no_pending_responses()


def test_an_adaptive_stack_is_compared_with_what_its_policy_costs() -> None:
    plan = sample_plan()
    hours, usd = Spread(expected=2 * plan.hours.expected, p50=8.0, p95=20.0), Spread(expected=52.0, p50=50.0, p95=97.0)
    outlook = PolicyOutlook(policy="adaptive", hours=hours, cost_usd=usd, expected_usd={"adaptive": 52.0}, source="")
    own = plan.model_copy(update={"spot_policy": outlook})
    bill = StackBill(start=YESTERDAY, end=TODAY)
    *parts, total = compare(own, bill)
    assert total["plan_usd"] == 52.0 == pytest.approx(sum(part["plan_usd"] for part in parts))
    planned = {part["part"]: part["plan_usd"] for part in parts}
    assert planned["volumes"] == pytest.approx(2 * plan.cost_usd.breakdown.volumes, abs=0.01)
    assert compare(plan, bill)[-1]["plan_usd"] == plan.cost_usd.expected
