"""Identity and zones: where the plan would run."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.commands.preflight.model import Account, Unknown
from optimizer.commands.preflight.place import open_zones
from optimizer.commands.preflight.run import identify
from optimizer.contract.errors import GpufleetError
from tests.unit.optimizer.commands.preflight.account import (
    ACCOUNT,
    ARN,
    CHECK,
    FakeAws,
    Refusal,
    aws,
    context,
    only,
)

__all__ = ["aws"]

check_zones = CHECK["zones"]


def test_who_asks_is_known(aws: FakeAws) -> None:
    assert identify("us-east-1") == Account(id=ACCOUNT, arn=ARN)


@pytest.mark.parametrize("code", ["ExpiredToken", "OptInRequired", "InvalidClientTokenId", "SignatureDoesNotMatch"])
def test_credentials_that_aws_refuses_end_it(aws: FakeAws, code: str) -> None:
    aws.answers["GetCallerIdentity"] = Refusal(code, 403)
    with pytest.raises(GpufleetError, match="nothing was checked in us-east-1: ") as caught:
        identify("us-east-1")
    assert caught.value.exit_code == 1 and "aws account enable-region --region-name us-east-1" in caught.value.next_step


def _offers(aws: FakeAws, **zones: str) -> None:
    aws.answers["DescribeInstanceTypeOfferings"] = [{"InstanceTypeOfferings": []}] + [
        {"InstanceTypeOfferings": [{"InstanceType": name.replace("_", "."), "Location": zone}]}
        for name, listed in zones.items()
        for zone in listed.split()
    ]


def test_a_gang_goes_to_the_plans_first_open_zone(aws: FakeAws) -> None:
    row = only(check_zones(context()))
    assert (row.level, row.text) == ("ok", "use1-az2 offers p4d.24xlarge; all nodes go there")
    row = only(check_zones(context(open_zones=frozenset({"use1-az6"}))))
    assert (row.level, row.value) == ("ok", "use1-az6")
    assert only(check_zones(context(zone_id="use1-az6"))).value == "use1-az6"


@pytest.mark.parametrize(
    ("offered", "changes", "level", "says"),
    [
        ("use1-az4 use1-az6", {}, "error", "use1-az2 does not offer p4d.24xlarge"),
        ("use1-az6", {"mode": "workers"}, "warning", "use1-az2 does not offer p4d.24xlarge"),
        ("", {"mode": "workers"}, "error", "no zone does"),
        ("use1-az2", {"open_zones": frozenset({"use1-az1"})}, "error", "no zone does"),
    ],
)
def test_zones_without_the_type(aws: FakeAws, offered: str, changes: dict[str, Any], level: str, says: str) -> None:
    _offers(aws, p4d_24xlarge=offered)
    row = only(check_zones(context(**changes)))
    assert row.level == level and says in row.text
    if level == "error":
        where = "config set gpufleet:zoneId use1-az4" if "az4" in offered else "gpufleet recommend --region"
        assert where in row.next_step and ("in one zone" in row.why) == ("mode" not in changes)


def test_the_nodes_go_to_the_zones_of_given_subnets(aws: FakeAws) -> None:
    given = context(vpc_id="vpc-1", subnet_ids=("subnet-1",), subnet_zones=("use1-az4",), zone_id="use1-az2")
    assert given.zone_ids == ("use1-az4",)
    assert only(check_zones(given)).level == "error"
    lost = context(vpc_id="vpc-1", subnet_ids=("subnet-1",), subnet_zones=Unknown(reason="denied"))
    assert lost.zone_ids == ()


def test_only_zones_in_use_and_no_local_ones_are_asked_for(aws: FakeAws) -> None:
    assert open_zones(context().ec2) == {"use1-az2", "use1-az4", "use1-az6"}
    assert aws.asked("DescribeAvailabilityZones")[0]["Filters"] == [
        {"Name": "state", "Values": ["available"]},
        {"Name": "opt-in-status", "Values": ["opt-in-not-required"]},
    ]
