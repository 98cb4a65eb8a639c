"""Quotas less what is in use, reservations and Capacity Blocks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from optimizer.aws import quotas
from optimizer.commands.preflight.capacity import check_instance_quotas
from optimizer.commands.preflight.model import Check, Finding
from optimizer.commands.preflight.reservation import check_reservation
from optimizer.contract.plan import FleetPlan
from tests.plans import sample_plan
from tests.unit.optimizer.commands.preflight.account import (
    DENIED_EC2,
    END,
    NOW,
    RESERVATION,
    START,
    FakeAws,
    Refusal,
    aws,
    capacity_block,
    context,
    instance,
    levels,
    only,
    quota_answer,
    reservation,
)

__all__ = ["aws"]

ON_DEMAND, SPOT, SPOT_P5 = "L-417A185B", "L-7212CCBC", "L-C4BD4855"
RUNNING_P = "quota Running On-Demand P instances"
SPOT_P4 = "quota All P4, P3 and P2 Spot Instance Requests"


def bought(option: str, **changes: Any) -> FleetPlan:
    times = {"capacity_block": {"start": START.isoformat(), "end": END.isoformat()}}
    block = times if option == "capacity-block" else {}
    return sample_plan(purchase={"option": option, "on_demand_base": 0, **block, **changes})


def by_check(rows: Any) -> dict[str, Finding]:
    return {row.check: row for row in rows}


@pytest.mark.parametrize(
    ("name", "on_demand", "spot"),
    [
        ("p3.2xlarge", ON_DEMAND, SPOT),
        ("p5en.48xlarge", ON_DEMAND, SPOT_P5),
        ("p6-b200.48xlarge", ON_DEMAND, None),
        ("gr6.4xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("vt1.3xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("inf2.xlarge", None, None),
    ],
)
def test_which_quota_counts_a_type(name: str, on_demand: str | None, spot: str | None) -> None:
    matches = (quotas.on_demand(name), quotas.spot(name))
    assert tuple(quota and quota.code for quota in matches) == (on_demand, spot)


def test_on_demand_and_spot_are_counted_apart(aws: FakeAws) -> None:
    aws.answers["DescribeInstances"] = [
        {"Reservations": [{"Instances": [instance(), instance("g5.xlarge")]}]},
        {"Reservations": [{"Instances": [instance(InstanceLifecycle="spot"), instance("m5.large")]}]},
        {"Reservations": [{"Instances": [instance(InstanceLifecycle="capacity-block")]}]},
    ]
    rows = by_check(check_instance_quotas(context()))
    assert (rows[RUNNING_P].level, rows[RUNNING_P].text) == (
        "ok",
        "96 vCPUs needed for an on-demand base of 1 x p4d.24xlarge, 288 free: quota 384 (L-417A185B), 96 in use",
    )
    assert (rows[SPOT_P4].level, rows[SPOT_P4].value, rows[SPOT_P4].limit) == ("ok", 96, 96)
    assert aws.asked("DescribeInstances")[0]["Filters"][0]["Values"] == ["pending", "running"]


def test_too_small_a_quota_says_how_to_ask_for_more(aws: FakeAws) -> None:
    aws.answers["GetServiceQuota"] = quota_answer({SPOT: 95.0})
    aws.answers["DescribeInstances"] = {"Reservations": [{"Instances": [instance(InstanceLifecycle="spot")]}]}
    row = by_check(check_instance_quotas(context()))[SPOT_P4]
    assert (row.level, row.value, row.limit) == ("error", 96, 0)
    assert row.next_step == (
        "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2 "
        "--quota-code L-7212CCBC --desired-value 192"
    )


def test_nodes_of_the_stack_itself_are_what_the_plan_asks_for(aws: FakeAws) -> None:
    own: dict[str, Any] = {"Tags": [{"Key": "gpufleet:stack", "Value": "dev"}]}
    other: dict[str, Any] = {"Tags": [{"Key": "gpufleet:stack", "Value": "prod"}]}
    aws.answers["DescribeInstances"] = {
        "Reservations": [{"Instances": [instance(**own), instance(**other), instance(InstanceLifecycle="spot", **own)]}]
    }
    rows = by_check(check_instance_quotas(context()))
    assert "96 in use" in rows[RUNNING_P].text and "0 in use" in rows[SPOT_P4].text
    assert "192 in use" in by_check(check_instance_quotas(context(stack="")))[RUNNING_P].text


def test_unused_reservations_count_as_if_they_were_used(aws: FakeAws) -> None:
    aws.answers["DescribeCapacityReservations"] = {
        "CapacityReservations": [
            reservation(AvailableInstanceCount=1),
            reservation(State="scheduled", TotalInstanceCount=1, AvailableInstanceCount=0),
            reservation(OwnerId="999999999999"),
            reservation(ReservationType="capacity-block"),
            reservation(InstanceType="g5.xlarge"),
            reservation(Tags=[{"Key": "gpufleet:stack", "Value": "dev"}]),
        ]
    }
    row = by_check(check_instance_quotas(context()))[RUNNING_P]
    assert "192 in use" in row.text


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (bought("on-demand"), [(RUNNING_P, "192 vCPUs needed for 2 x p4d.24xlarge")]),
        (bought("reserved"), [(RUNNING_P, "192 vCPUs needed for 2 x p4d.24xlarge")]),
        (bought("reserved", capacity_reservation_id=RESERVATION), []),
        (
            bought("reserved", capacity_reservation_id=RESERVATION, on_demand_top_up=1),
            [(RUNNING_P, "96 vCPUs needed for 1 x p4d.24xlarge on demand beside the reservation")],
        ),
        (bought("spot"), [(SPOT_P4, "192 vCPUs needed for 2 x p4d.24xlarge on spot")]),
    ],
)
def test_what_each_option_takes(aws: FakeAws, plan: FleetPlan, expected: list[tuple[str, str]]) -> None:
    rows = list(check_instance_quotas(context(plan)))
    assert [(row.check, row.text.partition(",")[0]) for row in rows] == expected


def test_falling_back_needs_all_nodes_on_demand_and_is_a_warning(aws: FakeAws) -> None:
    aws.answers["GetServiceQuota"] = quota_answer({ON_DEMAND: 100.0})
    rows = list(check_instance_quotas(context(sample_plan(purchase={"fallback": "on-demand"}))))
    assert levels(rows) == [(RUNNING_P, "ok"), (RUNNING_P, "warning"), (SPOT_P4, "ok")]
    assert rows[1].text.startswith("192 vCPUs needed for falling back to 2 x p4d.24xlarge on demand, 100 free")


def test_a_spot_quota_that_aws_does_not_name_is_unknown(aws: FakeAws) -> None:
    plan = sample_plan(instance_type="p6-b200.48xlarge")
    row = next(check_instance_quotas(context(plan)))
    assert (row.check, row.level) == ("quota of spot p6-b200.48xlarge", "unknown")


def test_a_quota_at_its_default_is_asked_for_as_such(aws: FakeAws) -> None:
    aws.answers["GetServiceQuota"] = quota_answer({ON_DEMAND: Refusal("NoSuchResourceException")})
    aws.answers["GetAWSDefaultServiceQuota"] = quota_answer({ON_DEMAND: 0.0})
    row = by_check(check_instance_quotas(context()))[RUNNING_P]
    assert row.level == "error" and "0 free: quota 0" in row.text


def test_without_the_usage_only_a_quota_below_the_need_is_an_error(aws: FakeAws) -> None:
    aws.answers["DescribeInstances"] = DENIED_EC2
    rows = by_check(check_instance_quotas(context()))
    row = rows[RUNNING_P]
    assert row.level == "unknown" and "of a quota of 384 (L-417A185B); not permitted" in row.text
    assert row.next_step == "allow ec2:DescribeInstances (gpufleet stack policy preflight)"
    aws.answers["GetServiceQuota"] = quota_answer({ON_DEMAND: 95.0})
    row = by_check(check_instance_quotas(context()))[RUNNING_P]
    assert (row.level, row.value, row.limit) == ("error", 96, 95) and row.text.endswith("unknown in use")


def reserved(aws: FakeAws, **changes: Any) -> list[Finding]:
    aws.answers["DescribeCapacityReservations"] = {"CapacityReservations": [reservation(**changes)]}
    return list(check_reservation(context(bought("reserved", capacity_reservation_id=RESERVATION))))


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"InstanceType": "p5.48xlarge"}, "error", "its type is p5.48xlarge, and the plan's p4d.24xlarge"),
        ({"InstancePlatform": "Windows"}, "error", "its platform is Windows"),
        ({"Tenancy": "dedicated"}, "error", "its tenancy is dedicated"),
        ({"PlacementGroupArn": "arn:aws:ec2:::x"}, "error", "its placement group is arn:aws:ec2:::x"),
        ({"State": "expired", "AvailableInstanceCount": 2}, "error", "its state is expired"),
        ({"State": "scheduled"}, "error", "its state is scheduled"),
        ({"AvailabilityZoneId": "use1-az6"}, "error", "its zone is use1-az6, and the plan's use1-az2"),
        ({"ReservationType": "capacity-block"}, "error", "its option is capacity-block"),
        ({"TotalInstanceCount": 1, "AvailableInstanceCount": 1}, "error", "it is for 1 instance, and the plan runs 2"),
        ({"AvailableInstanceCount": 0}, "warning", "0 of its 2 instances are free"),
        ({"EndDate": NOW + timedelta(hours=4)}, "error", "it leaves 4.0 h until 2026-11-21 16:00 UTC"),
        ({"EndDate": NOW + timedelta(hours=5)}, "warning", "5.2 h at the 95th percentile"),
        ({"EndDate": NOW - timedelta(hours=1)}, "error", "it leaves 0.0 h"),
    ],
)
def test_everything_wrong_with_a_reservation_is_said(
    aws: FakeAws, changes: dict[str, Any], level: str, says: str
) -> None:
    row = only(reserved(aws, **changes))
    assert row.level == level and says in row.text and row.next_step


def test_what_cannot_be_read_hides_nothing_that_was(aws: FakeAws) -> None:
    """The judgement of the dates fails on a garbled answer; that of the type stays."""
    answer = reservation(InstanceType="p5.48xlarge", EndDate=NOW + timedelta(hours=1))
    del answer["AvailableInstanceCount"]
    aws.answers["DescribeCapacityReservations"] = {"CapacityReservations": [answer]}
    given = context(bought("reserved", capacity_reservation_id=RESERVATION))
    rows = list(Check("reservation", check_reservation)(given))
    assert levels(rows) == [(f"reservation {RESERVATION}", "error"), ("reservation", "unknown")]
    assert "KeyError('AvailableInstanceCount')" in rows[1].text


def test_a_taken_reservation_is_an_error_where_no_stack_can_have_taken_it(aws: FakeAws) -> None:
    aws.answers["DescribeCapacityReservations"] = {"CapacityReservations": [reservation(AvailableInstanceCount=0)]}
    plan = bought("reserved", capacity_reservation_id=RESERVATION)
    assert only(check_reservation(context(plan, stack=""))).level == "error"


@pytest.mark.parametrize(
    ("free", "total", "level", "says"),
    [
        (1, 1, "ok", "1 of 1 p4d.24xlarge free"),
        (0, 1, "error", "0 of its 1 instances are free, and the plan runs 1 in it"),
        (0, 0, "error", "it is for 0 instances, and the plan runs 1 in it"),
    ],
)
def test_a_topped_up_reservation_needs_room_for_its_own_nodes_only(
    aws: FakeAws, free: int, total: int, level: str, says: str
) -> None:
    held = reservation(AvailableInstanceCount=free, TotalInstanceCount=total)
    aws.answers["DescribeCapacityReservations"] = {"CapacityReservations": [held]}
    plan = bought("reserved", capacity_reservation_id=RESERVATION, on_demand_top_up=1)
    row = only(check_reservation(context(plan, stack="")))
    assert row.level == level and says in row.text
    assert level == "ok" or "more nodes would be rented than the plan pays for" in row.why


@pytest.mark.parametrize("code", ["InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed"])
def test_a_reservation_that_is_not_there(aws: FakeAws, code: str) -> None:
    aws.answers["DescribeCapacityReservations"] = Refusal(code)
    row = only(check_reservation(context(bought("reserved", capacity_reservation_id=RESERVATION))))
    assert row.level == "error" and row.value == RESERVATION


def test_a_reservation_that_the_stack_makes_and_a_spot_plan_are_not_looked_at(aws: FakeAws) -> None:
    assert not list(check_reservation(context(bought("reserved")))) and not list(check_reservation(context()))


def block(aws: FakeAws, hours: float = 24, **changes: Any) -> list[Finding]:
    end = START + timedelta(hours=hours)
    answer = capacity_block(**{"EndDate": end, **changes})
    aws.answers["DescribeCapacityReservations"] = {"CapacityReservations": [answer]}
    times = {"start": START.isoformat(), "end": end.isoformat()}
    plan = bought("capacity-block", capacity_reservation_id=RESERVATION, capacity_block=times)
    return list(check_reservation(context(plan)))


def test_a_block_that_is_yet_to_start_has_all_its_instances(aws: FakeAws) -> None:
    row = only(block(aws))
    assert (row.level, row.value) == ("ok", 2)
    assert row.text == "scheduled, 2 of 2 p4d.24xlarge free in use1-az2, until 2026-11-23 12:00 UTC"


def test_a_block_ends_its_instances_half_an_hour_early_and_saving_takes_nine_minutes(aws: FakeAws) -> None:
    assert only(block(aws, hours=5.86)).level == "ok"
    row = only(block(aws, hours=5.84))
    assert (row.level, row.value, row.limit) == ("warning", 5.2, 5.2)
    assert "begins to save 9 minutes before that" in row.why
    assert only(block(aws, hours=5.1)).level == "error"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(({"State": state}, state) for state in ("payment-failed", "payment-pending", "expired", "cancelled")),
        ({"EndDate": START + timedelta(hours=48)}, "the plan has 2026-11-22 12:00 UTC to 2026-11-23 12:00 UTC"),
        (
            {"ReservationType": "default", "State": "active", "AvailableInstanceCount": 2},
            "its option is reserved, and the plan's capacity-block",
        ),
    ],
)
def test_a_block_that_does_not_fit_is_an_error(aws: FakeAws, changes: dict[str, Any], says: str) -> None:
    row = only(block(aws, **changes))
    assert row.level == "error" and says in row.text
