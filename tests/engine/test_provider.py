"""The Pulumi side of the plugin, with a stand-in for the AWS provider that plans what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from pulumi.runtime.proto import provider_pb2, status_pb2

from tests.engine.plugin.planning import proposed_new_state
from tests.engine.plugin.provider import (
    DEFAULTS,
    HIDDEN_STATE,
    AwsProvider,
    name_argument,
    pack_state,
    physical_name,
    unpack_state,
)
from tests.engine.plugin.schema import Block
from tests.engine.plugin.terraform import Plan, ProviderError, State, TerraformProvider, UnfinishedError
from tests.engine.plugin.values import to_terraform
from tests.engine.schemas import NODE, attribute, block

URN = "urn:pulumi:dev::gpufleet::aws:ec2/node:Node::worker"


class StandIn:
    """Plans what is proposed; a changed subnet needs a new node."""

    resource_types = ("aws_node",)

    def resource_block(self, terraform_type: str) -> Block:
        return NODE

    def validate(self, terraform_type: str, config: dict[str, Any]) -> list[str]:
        return ["count: must not be negative"] if (config["count"] or 0) < 0 else []

    def plan(self, terraform_type: str, config: dict[str, Any], prior: State | None) -> Plan:
        value = proposed_new_state(NODE, config, prior.value if prior else None)
        return Plan(config=config, value=value, private=b"", requires_replace=frozenset({"subnet_id"}))


class RefusedError(Exception):
    """The engine's answer."""


class Context:
    """Context of a gRPC call."""

    def __init__(self) -> None:
        self.metadata: dict[str, bytes] = {}

    def set_trailing_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.metadata.update(metadata)

    def abort(self, code: object, message: str) -> None:
        raise RefusedError(message)


provider = AwsProvider(cast(TerraformProvider, StandIn()), "7.0.0")


def struct(properties: Mapping[str, Any]) -> Struct:
    message = Struct()
    message.update(dict(properties))
    return message


def check(news: dict[str, Any], olds: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    request = provider_pb2.CheckRequest(urn=URN, news=struct(news), olds=struct(olds or {}))
    response = provider.Check(request, cast(Any, Context()))
    return dict(MessageToDict(response.inputs)), [failure.reason for failure in response.failures]


def diff(old: dict[str, Any], new: dict[str, Any], ignore: tuple[str, ...] = ()) -> provider_pb2.DiffResponse:
    state = State(value=to_terraform(NODE, old, "node", []), private=b"")
    olds = struct({HIDDEN_STATE: pack_state(state)})
    request = provider_pb2.DiffRequest(urn=URN, olds=olds, news=struct(new), ignoreChanges=ignore)
    return provider.Diff(request, cast(Any, Context()))


def test_check_names_a_resource_once() -> None:
    inputs, failures = check({"count": 1})
    assert failures == []
    assert inputs["name"].startswith("worker-")
    assert inputs[DEFAULTS] == ["name"]
    again, _ = check({"count": 1}, inputs)
    assert again["name"] == inputs["name"]


def test_check_keeps_a_given_name() -> None:
    inputs, _ = check({"name": "mine"})
    assert inputs == {"name": "mine"}


def test_check_tells_what_the_plugin_and_the_provider_find() -> None:
    _, failures = check({"count": -1, "unicorn": 1})
    assert [failure.split(";")[0] for failure in failures] == [
        "aws_node: no argument unicorn",
        "aws_node: count: must not be negative",
    ]


def test_no_difference_is_none() -> None:
    response = diff({"name": "a", "subnetIds": ["x", "y"]}, {"name": "a", "subnetIds": ["y", "x"]})
    assert response.changes == provider_pb2.DiffResponse.DIFF_NONE


def test_a_difference_is_named_and_updates_in_place() -> None:
    response = diff({"name": "a", "count": 1}, {"name": "a", "count": 2})
    assert list(response.diffs) == ["count"]
    assert list(response.replaces) == []
    assert response.deleteBeforeReplace is False


@pytest.mark.parametrize(
    ("name", "old_first"),
    [({"name": "a"}, True), ({"name": "a", DEFAULTS: ["name"]}, False), ({"name": "b"}, False), ({}, False)],
    ids=["fixed", "made up", "changed", "none"],
)
def test_a_replaced_resource_goes_first_where_its_name_is_fixed(name: dict[str, Any], old_first: bool) -> None:
    response = diff({"name": "a", "subnetIds": ["x"]}, {"subnetIds": ["y"], **name})
    assert list(response.replaces) == ["subnetIds"]
    assert response.deleteBeforeReplace is old_first


def test_an_ignored_difference_is_none() -> None:
    assert list(diff({"count": 1}, {"count": 2}, ("count",)).diffs) == []


def test_an_ignored_difference_inside_a_block_hides_no_other() -> None:
    old = {"disks": [{"deviceName": "a", "volumeSize": 1}]}
    ignored = ("disks.volumeSize",)
    assert list(diff(old, {"disks": [{"deviceName": "a", "volumeSize": 2}]}, ignored).diffs) == []
    assert list(diff(old, {"disks": [{"deviceName": "b", "volumeSize": 2}]}, ignored).diffs) == ["disks"]


def test_a_defect_of_the_plugin_reaches_the_engine() -> None:
    request = provider_pb2.DiffRequest(urn=URN.replace("node:Node", "unicorn:Unicorn"))
    with pytest.raises(RefusedError, match="aws:ec2/unicorn:Unicorn"):
        provider.Diff(request, cast(Any, Context()))


def test_an_error_of_the_aws_provider_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Plan:
        raise ProviderError("quota exceeded")

    monkeypatch.setattr(StandIn, "plan", refuse)
    with pytest.raises(RefusedError, match=r"^quota exceeded$"):
        provider.Create(provider_pb2.CreateRequest(urn=URN, properties=struct({})), cast(Any, Context()))


def test_a_half_made_resource_is_told_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, name: str, plan: Plan, prior: State | None) -> State:
        state = State(value=to_terraform(NODE, {"id": "n-1", "name": "a"}, "node", []), private=b"")
        raise UnfinishedError("no permission to set count", state)

    monkeypatch.setattr(StandIn, "apply", fail, raising=False)
    context = Context()
    with pytest.raises(RefusedError, match=r"^no permission to set count$"):
        provider.Create(provider_pb2.CreateRequest(urn=URN, properties=struct({"name": "a"})), cast(Any, context))
    told = provider_pb2.ErrorResourceInitFailed()
    status = status_pb2.Status.FromString(context.metadata["grpc-status-details-bin"])
    assert status.details[0].Unpack(told)
    assert (told.id, list(told.reasons)) == ("n-1", ["no permission to set count"])
    assert MessageToDict(told.inputs) == {"name": "a"}
    assert unpack_state(dict(MessageToDict(told.properties))).value["name"] == "a"


def test_a_preview_of_a_create_shows_what_is_planned() -> None:
    request = provider_pb2.CreateRequest(urn=URN, properties=struct({"name": "a"}), preview=True)
    response = provider.Create(request, cast(Any, Context()))
    assert response.id == ""
    assert MessageToDict(response.properties)["name"] == "a"


def test_terraforms_state_survives_in_the_hidden_output() -> None:
    state = State(value={"id": "a", "count": 1, "tags": None}, private=b"\x00\xff")
    assert unpack_state({HIDDEN_STATE: pack_state(state)}) == state


BUCKET = block(attribute("bucket", "string"), attribute("bucket_prefix", "string"))
NAMED = block(attribute("name", "string"), attribute("name_prefix", "string"))
COMPUTED = block(attribute("name", "string", optional=False, computed=True))


@pytest.mark.parametrize(
    ("terraform", "schema", "properties", "argument"),
    [
        ("aws_sqs_queue", NAMED, {}, "name"),
        ("aws_sqs_queue", NAMED, {"name": "a"}, None),
        ("aws_sqs_queue", NAMED, {"namePrefix": "a"}, None),
        ("aws_s3_bucket", BUCKET, {}, "bucket"),
        ("aws_s3_bucket", BUCKET, {"bucketPrefix": "a"}, None),
        ("aws_vpc", BUCKET, {}, None),
        ("aws_x", COMPUTED, {}, None),
    ],
)
def test_what_is_named(terraform: str, schema: Block, properties: dict[str, Any], argument: str | None) -> None:
    assert name_argument(terraform, schema, properties) == argument


def test_names_keep_to_aws_rules() -> None:
    urn = URN.replace("worker", "Worker")
    assert physical_name("aws_sqs_queue", urn).startswith("Worker-")
    assert physical_name("aws_s3_bucket", urn).startswith("worker-")
    assert physical_name("aws_kms_alias", urn).startswith("alias/Worker-")
