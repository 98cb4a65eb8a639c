"""Preview without an account or the Pulumi CLI: the real program, run against stand-in answers of AWS.

Every resource and argument comes from ``infra.__main__`` itself; only AWS's answers (account, zones, image,
identifiers) are made up.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi.runtime import mocks, rpc

from infra.offline.resource_types import describe
from optimizer.contract.plan import FleetPlan

PLACEHOLDER_ACCOUNT, PLACEHOLDER_IMAGE = "000000000000", "ami-00000000000000000"
PLACEHOLDERS = (
    f"account {PLACEHOLDER_ACCOUNT}, zone names, the AMI's id and every identifier are placeholders: only "
    "`pulumi preview` with an account knows them"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """One declared resource; a component has no parent, inputs and physical id."""

    type: str  # Pulumi's token, like "aws:ec2/launchTemplate:LaunchTemplate"
    name: str
    parent: str  # logical name of its component
    inputs: Mapping[str, Any]
    protected: bool
    physical_id: str = ""
    after: tuple[str, ...] = ()  # type and name of the resources that come before, like "ServiceLinkedRole dev-scaling"

    @property
    def kind(self) -> str:
        """The last part of its type: "LaunchTemplate"."""
        return self.type.rpartition(":")[2]

    @property
    def detail(self) -> str:
        """The arguments a reader looks for first, in words; a component has none."""
        return describe(self.kind, self.inputs) if self.inputs else ""


_STACK = "pulumi:pulumi:Stack"


class Answers(mocks.Mocks):
    """Stand-in for AWS: identifiers and look-ups that suit a plan."""

    def __init__(self, plan: FleetPlan) -> None:
        self._plan = plan

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        """A resource's identifier and attributes: its arguments and AWS's additions."""
        made_up: dict[str, Any] = {
            "arn": f"arn:aws:{args.typ.split(':')[1].split('/')[0]}:::{args.name}",
            "keyId": f"{args.name}-id",
            "url": f"https://sqs.{self._plan.region}.amazonaws.com/{PLACEHOLDER_ACCOUNT}/{args.name}",
            "latestVersion": 1,
            "prefixListId": "pl-00000000",
            "name": args.name,
        }
        return f"{args.name}-id", made_up | args.inputs

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """The answer to a look-up, and no failures."""
        return self._answer(args.token, args.args), []

    def _answer(self, token: str, given: dict[str, Any]) -> dict[str, Any]:
        plan = self._plan
        # Three zones stand for the region's where the catalog names none.
        zone_ids = plan.zone_ids or tuple(f"{plan.region.replace('-', '')}-az{number}" for number in (1, 2, 3))
        match token.split(":")[-1]:
            case "getCallerIdentity":
                return {"accountId": PLACEHOLDER_ACCOUNT}
            case "getPartition":
                return {"partition": "aws-us-gov" if plan.region.startswith("us-gov-") else "aws"}
            case "getAvailabilityZones":
                # An alternate or an endpoint may be in a zone that does not offer the plan's type.
                prefix = zone_ids[0].rpartition("-az")[0] + "-az"
                alternates = (alternate.zone_id for alternate in plan.alternates)
                others = [*alternates, *(f"{prefix}{number}" for number in (1, 2, 3))]
                zone_ids = tuple(dict.fromkeys((*zone_ids, *(zone for zone in others if zone.startswith(prefix)))))
                names = [f"{plan.region}{chr(97 + number)}" for number in range(len(zone_ids))]
                return {"names": names, "zoneIds": zone_ids}
            case "getVpcEndpointService":
                zones = self._answer("getAvailabilityZones", {})["names"]
                return {"serviceName": given["serviceName"], "availabilityZones": zones}
            case "getInstanceTypeOfferings":
                return {"locations": zone_ids}
            case "getSubnet":
                # The configured subnets are taken for right ones: of the VPC, in zones of the plan.
                config = pulumi.Config("gpufleet")
                number = config.require_object("subnetIds").index(given["id"]) % len(zone_ids)
                zone = {"availabilityZone": f"{plan.region}{chr(97 + number)}", "availabilityZoneId": zone_ids[number]}
                return {**given, "vpcId": config.get("vpcId"), **zone}
            case "getParameter":
                return {"value": PLACEHOLDER_IMAGE}
            case "getAmi":
                (filter_,) = given["filters"]
                (wanted,) = filter_["values"]
                by_id = filter_["name"] == "image-id"
                return {
                    "id": wanted if by_id else PLACEHOLDER_IMAGE,
                    "name": f"Deep Learning (Ubuntu 24.04) {wanted}" if by_id else wanted,
                    # Without owners it is the user's.
                    "imageOwnerAlias": (given.get("owners") or [""])[0],
                    "ownerId": PLACEHOLDER_ACCOUNT,
                    "architecture": plan.node.cpu_architecture,
                    "rootDeviceName": "/dev/sda1",
                    "blockDeviceMappings": [],
                }
        raise AssertionError(f"infra calls {token}, and the preview has no answer for it")


class Recorder(mocks.MockMonitor):
    """Pulumi's stand-in engine; it also records parents and protection, and closes the event loops it opens.

    Resources of a component within another (a place's of the fleet) count as the outer one's.
    """

    def __init__(self, answers: mocks.Mocks) -> None:
        super().__init__(answers)
        self.seen: list[Resource] = []
        self._outer: dict[str, str] = {}  # by the inner component

    def Invoke(self, request: Any) -> Any:  # noqa: N802 (gRPC's name)
        """Pass a look-up on."""
        return _in_own_loop(super().Invoke, request)

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 (gRPC's name)
        """Take a resource in and note it."""
        response = _in_own_loop(super().RegisterResource, request)
        parent_type, _, parent = request.parent.removeprefix("urn:pulumi:").rpartition("::")
        parent = "" if parent_type.endswith(_STACK) else parent
        if parent and request.type.startswith("gpufleet:"):
            self._outer[request.name] = parent
        elif request.type != _STACK:
            self.seen.append(
                Resource(
                    type=request.type,
                    name=request.name,
                    parent=self._outer.get(parent, parent),
                    inputs=_in_own_loop(rpc.deserialize_properties, request.object),
                    protected=request.protect,
                    physical_id=response.id,
                    after=tuple(sorted(map(_kind_and_name, request.dependencies))),
                )
            )
        return response


def _kind_and_name(urn: str) -> str:
    *_, types, name = urn.split("::")
    return f"{types.rpartition(':')[2]} {name}"


def _in_own_loop(call: Callable[[Any], Any], argument: Any) -> Any:
    # Pulumi opens an event loop in each worker thread, and leaves it open.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return call(argument)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def stand_in(
    plan: FleetPlan, *, stack: str, config: Mapping[str, str] | None = None, answers: Answers | None = None
) -> Recorder:
    """Put Pulumi's stand-in engine in place of a real one, with ``plan`` as the stack's configuration.

    ``config`` is further configuration, ``gpufleet:key`` to text (JSON for lists and objects).
    """
    answers = answers or Answers(plan)
    recorder = Recorder(answers)
    # Pulumi makes futures before it runs a loop. A thread has none by itself, from Python 3.14 on not even the first:
    # https://docs.python.org/3/library/asyncio-eventloop.html#asyncio.get_event_loop
    asyncio.set_event_loop(_loop())
    pulumi.runtime.set_mocks(answers, project="gpufleet", stack=stack, preview=False, monitor=recorder)
    pulumi.runtime.set_all_config({"gpufleet:plan": plan.to_json(), "aws:region": plan.region, **(config or {})})
    return recorder


def resources(
    plan: FleetPlan, *, stack: str, config: Mapping[str, str] | None = None, answers: Answers | None = None
) -> list[Resource]:
    """Every resource of ``stack`` for ``plan``: component by component, by name, a component before its children.

    Raises:
        infra.settings.ConfigError: the program refuses the plan or configuration.
    """
    from infra.__main__ import main

    recorder = stand_in(plan, stack=stack, config=config, answers=answers)
    run: Callable[[], None] = mocks.test(functools.partial(main, starts_nodes=False))  # type: ignore[no-untyped-call]
    run()
    # Resources register in no fixed order.
    return sorted(recorder.seen, key=lambda item: (item.parent or item.name, bool(item.parent), item.type, item.name))
