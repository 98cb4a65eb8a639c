from __future__ import annotations

from typing import Any

import pytest

from infra.settings import ConfigError
from tests.infra.deployed import EKS, LINKED, LONE_NODE, LUSTRE, deploy, on_demand, variant


def test_the_file_system_is_beside_the_nodes_and_shows_the_data() -> None:
    stack = deploy(LUSTRE, LINKED)
    system, link = stack.one("LustreFileSystem"), stack.one("DataRepositoryAssociation")
    assert (system["storageCapacity"], system["perUnitStorageThroughput"]) == (2400, 125)
    assert (system["deploymentType"], system["kmsKeyId"]) == ("PERSISTENT_2", "arn:aws:kms:::gpufleet-dev-key")
    assert [system["subnetIds"]] == stack.one("Group")["vpcZoneIdentifiers"]
    # The nodes' group has the rules that servers and clients need: all traffic among its members.
    nodes = stack.one("LaunchTemplate")["networkInterfaces"][0]["securityGroups"]
    assert system["securityGroupIds"] == nodes
    assert (link["dataRepositoryPath"], link["fileSystemPath"]) == ("s3://corpus/tokens/", "/")
    assert link["batchImportMetaDataOnCreate"] is True and "s3" not in link, "nothing is written to the bucket"
    assert "GPUFLEET_LUSTRE=" in stack.user_data and "@tcp:/" in stack.user_data
    assert "GPUFLEET_STAGING_LIMIT_S=1800" in stack.user_data, "time for FSx to list the objects"


def test_a_plan_without_one_declares_none() -> None:
    assert not {resource.kind for resource in variant("spot")} & {"LustreFileSystem", "DataRepositoryAssociation"}
    assert "GPUFLEET_LUSTRE=''" in deploy().user_data


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
        ({**LINKED, **EKS}, "gpufleet:platform eks mounts none in its pods"),
    ],
)
def test_a_stack_whose_nodes_would_not_reach_the_data_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        deploy(LUSTRE, config)
