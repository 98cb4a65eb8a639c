from __future__ import annotations

import re
from typing import Any

import pytest

from infra.settings import ConfigError
from tests.infra.deployed import LINKED, LONE_NODE, LUSTRE, MOUNTED, deploy, on_demand


def test_a_lone_node_stays_in_the_file_systems_zone() -> None:
    alone = {**LONE_NODE, **on_demand()}
    assert len(deploy(alone).one("Group")["vpcZoneIdentifiers"]) > 1
    assert len(deploy({**alone, **LUSTRE}, LINKED).one("Group")["vpcZoneIdentifiers"]) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LINKED, "gpufleet:data": ""}, "gpufleet:data is not set: it would be paid for and empty"),
        ({**LINKED, "gpufleet:data": "/mnt/nvme/tokens"}, "gpufleet:data is /mnt/nvme/tokens"),
        ({**LINKED, "gpufleet:amiName": ""}, "may have no Lustre client for its kernel"),
    ],
)
def test_a_stack_whose_nodes_would_not_reach_the_data_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        deploy(LUSTRE, config)


def test_an_existing_file_system_is_mounted_and_let_in_by_both_groups() -> None:
    stack = deploy({}, MOUNTED)
    assert "GPUFLEET_LUSTRE=fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com@tcp:/abcdefgh" in stack.user_data
    assert "GPUFLEET_TRAIN_DATA=/mnt/lustre/tokens" in stack.user_data
    assert not stack.all("LustreFileSystem")
    (nodes,) = stack.one("LaunchTemplate")["networkInterfaces"][0]["securityGroups"]
    pair = {nodes, "sg-0123456789abcdef0"}
    for kind in ("SecurityGroupIngressRule", "SecurityGroupEgressRule"):
        rules = [one.inputs for one in stack.all(kind)]
        between = [one for one in rules if {one["securityGroupId"], one.get("referencedSecurityGroupId")} == pair]
        assert {(one["securityGroupId"], one["fromPort"], one["toPort"]) for one in between} == {
            (group, *ports) for group in pair for ports in ((988, 988), (1018, 1023))
        }
        assert {one["ipProtocol"] for one in between} == {"tcp"}


def test_another_file_system_is_another_run() -> None:
    other = {**MOUNTED, "gpufleet:fileSystem": MOUNTED["gpufleet:fileSystem"].replace("abcdefgh", "hgfedcba")}
    runs = {re.findall(r"GPUFLEET_RUN=\S+", deploy({}, config).user_data)[0] for config in (MOUNTED, other)}
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({}, {"gpufleet:data": ""}, "gpufleet:data is not set"),
        ({}, {"gpufleet:data": "s3://corpus/tokens"}, "gpufleet:data is s3://corpus/tokens"),
        ({}, {"gpufleet:data": "/mnt/lustre-2"}, "gpufleet:data is /mnt/lustre-2"),
        ({}, {"gpufleet:amiName": ""}, "may have no Lustre client for its kernel"),
        ({}, {"gpufleet:vpcId": "", "gpufleet:subnetIds": "[]"}, "a VPC of the stack's own does not reach it"),
        (LUSTRE, {}, "the plan has a file system of its own"),
        ({}, {"gpufleet:fileSystem": '{"address": "fs-1", "securityGroup": "sg-1"}'}, "gpufleet:fileSystem.address"),
    ],
)
def test_an_existing_file_system_that_nodes_would_not_reach_is_refused(
    changes: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        deploy(changes, {**MOUNTED, **config})
