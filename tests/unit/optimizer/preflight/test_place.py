"""Identity, region, hardware and zones: where the plan would run, and on what."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES

from optimizer.aws import clients
from optimizer.aws.errors import CHECK_CREDENTIALS
from optimizer.contract.errors import GpufleetError
from optimizer.preflight.account import identify
from optimizer.preflight.model import Account, Unknown
from optimizer.preflight.place import check_hardware, open_zones
from tests.plans import ON_DEMAND_P4D, SPOT_P4DE, merged, sample_plan
from tests.unit.optimizer.preflight.account import (
    ACCOUNT,
    ARN,
    CHECK,
    FakeAws,
    Refusal,
    aws,
    context,
    levels,
    only,
)

__all__ = ["aws"]

check_region, check_zones = CHECK["region"], CHECK["zones"]


def test_who_asks_is_known(aws: FakeAws) -> None:
    assert identify("us-east-1") == Account(id=ACCOUNT, arn=ARN)
    assert Account(id=ACCOUNT, arn="arn:aws-us-gov:sts::1:assumed-role/x/y").partition == "aws-us-gov"


def test_the_other_partition_has_its_own_home(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[str] = []
    sts = clients.sts

    def note(region: str) -> Any:
        regions.append(region)
        return sts(region)

    monkeypatch.setattr(clients, "sts", note)
    identify("us-gov-east-1")
    identify("eu-west-1")
    assert regions == ["us-gov-west-1", "us-east-1"]


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidClientTokenId", "SignatureDoesNotMatch"])
def test_credentials_that_aws_refuses_end_it(aws: FakeAws, code: str) -> None:
    aws.answers["GetCallerIdentity"] = Refusal(code, 403)
    with pytest.raises(GpufleetError, match=f"nothing was checked: AWS refused the credentials .{code}.") as caught:
        identify("us-east-1")
    assert caught.value.exit_code == 1 and caught.value.next_step == CHECK_CREDENTIALS


@pytest.mark.parametrize(
    ("status", "level"),
    [("opt-in-not-required", "ok"), ("opted-in", "ok"), ("not-opted-in", "error"), (None, "error")],
)
def test_the_region_is_enabled(aws: FakeAws, status: str | None, level: str) -> None:
    regions = [{"RegionName": "us-east-1", "OptInStatus": status}] if status else []
    aws.answers["DescribeRegions"] = {"Regions": regions}
    row = only(check_region(context()))
    assert (row.check, row.level) == ("region", level)
    if status == "not-opted-in":
        assert row.next_step == "aws account enable-region --region-name us-east-1"
    assert aws.asked("DescribeRegions")[0]["AllRegions"] is True


def test_every_difference_of_the_hardware_is_an_error_of_its_own(aws: FakeAws) -> None:
    plan = sample_plan(
        node={"vcpus": 192, "efa_cards": 8, "network_cards": 8, "gpu": "H100", "cpu_architecture": "arm64"}
    )
    rows = list(check_hardware(context(plan)))
    assert {row.level for row in rows} == {"error"}
    assert [row.text for row in rows] == [
        "p4d.24xlarge has A100 GPUs, the plan H100",
        "p4d.24xlarge has 96 vCPUs, the plan 192",
        "p4d.24xlarge has 4 network cards, the plan 8",
        "p4d.24xlarge has 4 EFA interfaces, the plan 8",
        "p4d.24xlarge has x86_64 CPU architecture, the plan arm64",
    ]
    assert (rows[1].value, rows[1].limit) == (96, 192)


def _p4d(**changes: Any) -> dict[str, Any]:
    info = deepcopy(INSTANCE_TYPES["p4d.24xlarge"])
    info.update(changes)
    return {"InstanceTypes": [info]}


def _cards(**first: Any) -> dict[str, Any]:
    network = deepcopy(INSTANCE_TYPES["p4d.24xlarge"]["NetworkInfo"])
    network["NetworkCards"][0] |= first
    return _p4d(NetworkInfo=network)


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ({"MaximumNetworkInterfaces": 1}, "p4d.24xlarge's network card 0 takes 1 interfaces, the plan attaches 2"),
        ({"InterfaceTypes": ["interface"]}, "p4d.24xlarge's network card 0 takes no efa-only interface"),
    ],
)
def test_a_card_that_cannot_have_the_plans_interfaces_is_an_error(
    aws: FakeAws, first: dict[str, Any], text: str
) -> None:
    aws.answers["DescribeInstanceTypes"] = _cards(**first)
    row = only(check_hardware(context()))
    assert (row.level, row.text) == ("error", text)


def test_a_type_that_is_not_sold_so_is_an_error(aws: FakeAws) -> None:
    aws.answers["DescribeInstanceTypes"] = _p4d(SupportedUsageClasses=["on-demand"])
    row = only(check_hardware(context()))
    assert row.level == "error" and "is sold as on-demand, and the plan buys spot" in row.text
    for option in ("on-demand", "reserved"):  # a reservation is of on-demand instances
        plan = sample_plan(purchase={"option": option, "on_demand_base": 0})
        assert only(check_hardware(context(plan))).level == "ok"


def test_a_gang_needs_a_type_for_cluster_placement_groups(aws: FakeAws) -> None:
    aws.answers["DescribeInstanceTypes"] = _p4d(PlacementGroupInfo={"SupportedStrategies": ["spread"]})
    assert only(check_hardware(context())).level == "error"
    assert only(check_hardware(context(gang=False))).level == "ok"


def test_a_type_the_region_lacks_is_an_error(aws: FakeAws) -> None:
    aws.answers["DescribeInstanceTypes"] = {"InstanceTypes": []}
    row = only(check_hardware(context()))
    assert (row.level, row.text) == ("error", "us-east-1 has no p4d.24xlarge")


def test_hardware_nobody_can_read_is_unknown(aws: FakeAws) -> None:
    gpu = {"Count": 8, "Manufacturer": "NVIDIA", "Name": "Z999", "MemoryInfo": {"SizeInMiB": 1024}}
    aws.answers["DescribeInstanceTypes"] = _p4d(GpuInfo={"Gpus": [gpu]})
    row = only(check_hardware(context()))
    assert row.level == "unknown" and "'Z999'" in row.text
    aws.answers["DescribeInstanceTypes"] = _p4d(GpuInfo={})
    assert only(check_hardware(context())).level == "unknown"


def test_a_further_spot_type_may_have_more_vcpus_and_nothing_else(aws: FakeAws) -> None:
    def answer(params: dict[str, Any]) -> dict[str, Any]:
        (name,) = params["Filters"][0]["Values"]
        info = deepcopy(INSTANCE_TYPES["p4d.24xlarge"])
        info["InstanceType"] = name
        info["VCpuInfo"]["DefaultVCpus"] = {"p4d.12xlarge": 128, "p4d.6xlarge": 64}.get(name, 96)
        return {"InstanceTypes": [info]}

    aws.answers["DescribeInstanceTypes"] = answer
    plan = sample_plan(purchase={"spot_types": ["p4d.12xlarge", "p4d.6xlarge"]})
    assert levels(check_hardware(context(plan))) == [
        ("hardware of p4d.24xlarge", "ok"),
        ("hardware of p4d.12xlarge", "ok"),
        ("hardware of p4d.6xlarge", "error"),
    ]


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
        ("use1-az6", {"gang": False}, "warning", "use1-az2 does not offer p4d.24xlarge"),
        ("", {"gang": False}, "error", "no zone does"),
        ("use1-az2", {"open_zones": frozenset({"use1-az1"})}, "error", "no zone does"),
    ],
)
def test_zones_without_the_type(aws: FakeAws, offered: str, changes: dict[str, Any], level: str, says: str) -> None:
    _offers(aws, p4d_24xlarge=offered)
    row = only(check_zones(context(**changes)))
    assert row.level == level and says in row.text
    if level == "error":
        where = "config set gpufleet:zoneId use1-az4" if "az4" in offered else "gpufleet recommend --region"
        assert where in row.next_step and ("in one zone" in row.why) == changes.get("gang", True)


def test_a_further_spot_type_that_is_not_offered_is_a_warning(aws: FakeAws) -> None:
    _offers(aws, p4d_24xlarge="use1-az2")
    plan = sample_plan(purchase={"spot_types": ["p4de.24xlarge"]})
    assert levels(check_zones(context(plan))) == [
        ("zones of p4d.24xlarge", "ok"),
        ("zones of p4de.24xlarge", "warning"),
    ]


def test_alternates_are_checked_as_warnings(aws: FakeAws) -> None:
    plan = sample_plan(alternates=[ON_DEMAND_P4D, SPOT_P4DE | {"zone_id": "use1-az4"}])
    _offers(aws, p4d_24xlarge="use1-az2 use1-az6", p4de_24xlarge="use1-az6")
    rows = list(check_zones(context(plan)))
    assert [(row.check, row.level) for row in rows] == [
        ("zones of p4d.24xlarge", "ok"),
        ("alternate zones of p4d.24xlarge", "ok"),
        ("alternate zones of p4de.24xlarge", "warning"),
    ]
    assert (rows[-1].value, rows[-1].limit) == ("use1-az4", "use1-az6")
    assert levels(check_hardware(context(plan))) == [
        ("hardware of p4d.24xlarge", "ok"),
        ("hardware of p4de.24xlarge", "ok"),
    ]
    more = merged(SPOT_P4DE, {"node": {"vcpus": 192}})
    row = list(check_hardware(context(sample_plan(alternates=[more]))))[-1]
    assert (row.level, row.text) == ("warning", "p4de.24xlarge has 96 vCPUs, the plan 192")


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
