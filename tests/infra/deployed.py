"""A stack declared under Pulumi's mocks, and ways to look at it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.preview import Resource, resources
from tests.plans import sample_plan

ALARM = {"gpufleet:alarmEmail": "ops@example.com"}
EXISTING_VPC = {"gpufleet:vpcId": "vpc-0123456789abcdef0", "gpufleet:subnetIds": '["subnet-0123456789abcdef0"]'}

# One plan a purchase option, and the shapes of network interfaces there are.
NODES: dict[str, dict[str, Any]] = {
    "p5.48xlarge": {"gpu": "H100", "gpu_memory_gib": 80, "network_cards": 32, "efa_cards": 32},
    "p6-b300.48xlarge": {"gpu": "B300", "gpu_memory_gib": 268, "network_cards": 17, "efa_cards": 16},
    "g6.xlarge-like": {"gpu": "L4", "gpu_memory_gib": 22, "network_cards": 1, "efa_cards": 0},
}


def on_demand(**changes: Any) -> dict[str, Any]:
    """Changes that make the sample plan on-demand."""
    return {"purchase": {"option": "on-demand", "on_demand_base": 0}, **changes}


def reserved(reservation: str | None = None) -> dict[str, Any]:
    """Changes that make the sample plan run in a reservation, a new one by default."""
    return {"purchase": {"option": "reserved", "on_demand_base": 0, "capacity_reservation_id": reservation}}


LONE_NODE = {"node_count": 1, "parallelism": {"data": 8, "grad_accum": 4}}


@dataclass(frozen=True)
class Deployed:
    """Every resource of one declared stack."""

    found: list[Resource]

    def all(self, kind: str) -> list[Resource]:
        """Resources of one type, like "LaunchTemplate"."""
        return [resource for resource in self.found if resource.type.rpartition(":")[2] == kind]

    def one(self, kind: str, ending: str = "") -> dict[str, Any]:
        """Arguments of the only resource of a type whose name has an ending."""
        (resource,) = [resource for resource in self.all(kind) if resource.name.endswith(ending)]
        return dict(resource.inputs)

    def policy(self, kind: str, ending: str = "") -> dict[str, dict[str, Any]]:
        """Statements of a resource's policy by Sid."""
        document = json.loads(self.one(kind, ending)["policy"])
        return {statement["Sid"]: statement for statement in document["Statement"]}

    @property
    def user_data(self) -> str:
        """The launch template's user data, decoded."""
        return base64.b64decode(self.one("LaunchTemplate")["userData"]).decode()


def deploy(changes: Mapping[str, Any] | None = None, config: Mapping[str, str] | None = None) -> Deployed:
    """Declare the sample plan (two spot p4d.24xlarge, one on demand) with changes and further configuration."""
    return Deployed(resources(sample_plan(**(changes or {})), stack="dev", config=config))
