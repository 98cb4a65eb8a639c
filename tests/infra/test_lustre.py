from __future__ import annotations

from typing import Any

import pytest

from infra.settings import WITH_LUSTRE_CLIENT, ConfigError
from tests.infra.deployed import LINKED, LONE_NODE, LUSTRE, deploy, on_demand


def test_a_lone_node_stays_in_the_file_systems_zone() -> None:
    alone = {**LONE_NODE, **on_demand()}
    assert len(deploy(alone).one("Group")["vpcZoneIdentifiers"]) > 1
    assert len(deploy({**alone, **LUSTRE}, LINKED).one("Group")["vpcZoneIdentifiers"]) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LINKED, "gpufleet:data": ""}, "gpufleet:data is not set: it would be paid for and empty"),
        ({**LINKED, "gpufleet:data": "/mnt/nvme/tokens"}, "gpufleet:data is /mnt/nvme/tokens"),
        ({**LINKED, "gpufleet:amiName": ""}, "amiName is not set: .* may have no Lustre client for its kernel"),
        ({**LINKED, "gpufleet:amiName": WITH_LUSTRE_CLIENT}, "with an EFA plugin that hangs"),
    ],
)
def test_a_stack_whose_nodes_would_not_reach_the_data_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        deploy(LUSTRE, config)
