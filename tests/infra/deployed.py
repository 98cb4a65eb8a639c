"""A stack declared under Pulumi's mocks, and its variants."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from infra.offline.preview import Resource, resources
from infra.settings import WITH_LUSTRE_CLIENT
from tests.plans import SPOT_P4D, sample_plan

ALARM = {"gpufleet:alarmEmail": "ops@example.com"}
EXISTING_VPC = {"gpufleet:vpcId": "vpc-0123456789abcdef0", "gpufleet:subnetIds": '["subnet-0123456789abcdef0"]'}
# Image of the training's container.
REGISTRY = "111122223333.dkr.ecr.us-east-1.amazonaws.com"
CONTAINER = f"{REGISTRY}/team/train@sha256:{'7' * 64}"


def on_demand(**changes: Any) -> dict[str, Any]:
    """Changes that make the sample plan on-demand."""
    return {"purchase": {"option": "on-demand", "on_demand_base": 0}, **changes}


def reserved(reservation: str | None = None) -> dict[str, Any]:
    """Changes that make the sample plan run in a reservation, a new one by default."""
    purchase = {"option": "reserved", "on_demand_base": 0, "capacity_reservation_id": reservation}
    return {"purchase": purchase, **({"zone_ids": ["use1-az6"]} if reservation else {})}


def topped_up(reservation: str = "cr-0123456789abcdef0") -> dict[str, Any]:
    """Changes that make one node of the sample plan run in a reservation, and rent the other on demand."""
    price = {**SPOT_P4D["prices"][0], "item": "owned reservation p4d.24xlarge us-east-1", "usd": 0.5}
    changes = reserved(reservation)
    return {
        **changes,
        "purchase": changes["purchase"] | {"on_demand_top_up": 1},
        "prices": [price, SPOT_P4D["prices"][1]],
    }


# In the far future; the drain is due at 08:25, as the sample plan's terminate hook waits 5 minutes.
BLOCK = {"start": "2099-06-01T09:00:00Z", "end": "2099-06-02T09:00:00Z"}


def capacity_block(**block: str) -> dict[str, Any]:
    """Changes that make the sample plan run in a Capacity Block, ``BLOCK`` by default."""
    purchase = {"option": "capacity-block", "on_demand_base": 0, "capacity_reservation_id": "cr-0123456789abcdef0"}
    price = {**SPOT_P4D["prices"][0], "item": "capacity block p4d.24xlarge us-east-1", "usd": 11.8}
    return {"purchase": {**purchase, "capacity_block": BLOCK | block}, "zone_ids": ["use1-az6"], "prices": [price]}


def block_row(count: int) -> dict[str, Any]:
    """Changes that make the sample plan run in blocks of a day in a row, and then on demand."""
    changes = capacity_block(zone_id="use1-az6")
    days = [f"2099-06-{day:02}T09:00:00Z" for day in range(2, count + 2)]
    following = [
        {"start": start, "end": end, "zone_id": "use1-az1", "capacity_reservation_id": f"cr-0123456789abcdef{number}"}
        for number, (start, end) in enumerate(pairwise(days), start=1)
    ]
    changes["purchase"] |= {"next_blocks": following, "fallback": "on-demand"}
    prices = [*changes["prices"], SPOT_P4D["prices"][1]]
    return {**changes, "prices": prices, "zone_ids": ["use1-az1", "use1-az6"]}


FULL = {**ALARM, "gpufleet:nat": "true"}
LONE_NODE = {"node_count": 1, "parallelism": {"data": 8, "grad_accum": 4}}
# Workers train alone, so each holds the whole model.
WORKERS: dict[str, Any] = {**on_demand(), "parallelism": {"sharding": "ddp"}}


def workers(**keys: Any) -> dict[str, str]:
    """Configuration of a group of workers, with keys like scaling={"minNodes": 1}."""
    return {"gpufleet:mode": "workers"} | {f"gpufleet:{key}": _text(value) for key, value in keys.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Deployed:
    """Every resource of one declared stack."""

    resources: list[Resource]

    def all(self, kind: str) -> list[Resource]:
        """Resources of one type, like "LaunchTemplate"."""
        return [resource for resource in self.resources if resource.kind == kind]

    def one(self, kind: str, ending: str = "") -> dict[str, Any]:
        """Arguments of the only resource of a type whose name has an ending; not that of a union's first group, 2."""
        found = [resource for resource in self.all(kind) if resource.name.endswith(ending)]
        (resource,) = [resource for resource in found if len(found) == 1 or not resource.name.endswith("-2")]
        return dict(resource.inputs)

    def policy(self, kind: str, ending: str = "") -> dict[str, dict[str, Any]]:
        """Statements of a resource's policy by Sid."""
        document = json.loads(self.one(kind, ending)["policy"])
        return {statement["Sid"]: statement for statement in document["Statement"]}

    @property
    def user_data(self) -> str:
        """The launch template's user data, decoded."""
        return base64.b64decode(self.one("LaunchTemplate", "dev-node")["userData"]).decode()


def deploy(changes: Mapping[str, Any] | None = None, config: Mapping[str, str] | None = None) -> Deployed:
    """Do ``deploy_anew`` once: tests that declare the same stack share one run, which takes a second."""
    return _deployed(json.dumps(changes or {}, sort_keys=True), json.dumps(config or {}, sort_keys=True))


@functools.cache
def _deployed(changes: str, config: str) -> Deployed:
    return deploy_anew(json.loads(changes), json.loads(config))


def deploy_anew(changes: Mapping[str, Any] | None = None, config: Mapping[str, str] | None = None) -> Deployed:
    """Declare the sample plan (two spot p4d.24xlarge, one on demand) with changes and further configuration."""
    return Deployed(resources(sample_plan(**(changes or {})), stack="dev", config=config))


# A plan that reads its data from a file system, and its configuration.
LUSTRE = {"lustre": {"storage_gib": 2400, "data_gib": 2000.0, "usd": 16.0}}
# A release to come: the known one has an EFA plugin with which gangs hang.
NEXT_WITH_LUSTRE_CLIENT = WITH_LUSTRE_CLIENT.replace("20260815", "20261231")
LINKED = {"gpufleet:data": "s3://corpus/tokens", "gpufleet:amiName": NEXT_WITH_LUSTRE_CLIENT}
# Plan and configuration of each shape of stack, which together declare every type of resource.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "spot": ({}, ALARM),
    "on-demand": (on_demand(), ALARM),
    "reserved": ({**reserved(), **LUSTRE}, {**ALARM, **LINKED, "gpufleet:baseWeights": "s3://corpus/base"}),
    "existing reservation": (reserved("cr-0123456789abcdef0"), ALARM),
    "capacity block": (capacity_block(), ALARM),
    "lone node": (LONE_NODE, {"gpufleet:isolateTraining": "false"}),
    "nat": ({}, {**FULL, "gpufleet:image": CONTAINER}),
    "existing vpc": ({}, EXISTING_VPC),
    "force destroy": ({}, {"gpufleet:forceDestroy": "true"}),
    "workers": (WORKERS, {**workers(scaling={"minNodes": 1, "gpuUtilizationPercent": 60}), **ALARM}),
}


def variant(name: str) -> list[Resource]:
    """Resources of one of ``VARIANTS``."""
    return deploy(*VARIANTS[name]).resources


_POLICY_KINDS = {"RolePolicy": "role", "Key": "key", "VpcEndpoint": "endpoint"}


def statements(resources: Sequence[Resource]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every policy statement with the kind of its policy: role, trust, key, endpoint or resource."""
    for resource in resources:
        own = _POLICY_KINDS.get(resource.kind, "resource")
        for kind, text in ((own, resource.inputs.get("policy")), ("trust", resource.inputs.get("assumeRolePolicy"))):
            yield from ((kind, statement) for statement in (json.loads(text)["Statement"] if text else ()))


def as_list(value: Any) -> list[Any]:
    """A policy's element (one value or a list) as a list."""
    return value if isinstance(value, list) else [value]
