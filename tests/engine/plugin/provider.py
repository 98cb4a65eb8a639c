"""Pulumi's ResourceProvider service, answered by terraform-provider-aws.

Pulumi keeps a resource's inputs and outputs; Terraform needs its own state and the provider's private bytes, so both
travel in one hidden output. Secrets are not accepted, so the engine unwraps them before a call and wraps them again
after it.
"""
# ruff: noqa: N802  the methods are named by Pulumi's gRPC service

from __future__ import annotations

import base64
import functools
import json
import os
import secrets
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc, status_pb2

from tests.engine.plugin.naming import logical_name, terraform_type, type_token
from tests.engine.plugin.schema import Block
from tests.engine.plugin.terraform import Plan, ProviderError, State, TerraformProvider, UnfinishedError
from tests.engine.plugin.values import TerraformObject, comparable, from_terraform, to_terraform

HIDDEN_STATE = "__terraform"
DEFAULTS = "__defaults"  # as in Pulumi's bridge: the inputs that Check added and the program did not give
OF_THE_ENGINE = ("version", "pluginDownloadURL")  # provider inputs that are the engine's own

Properties = dict[str, Any]
Request = TypeVar("Request")
Response = TypeVar("Response")


def _dict(struct: Struct) -> Properties:
    return dict(MessageToDict(struct))


def _struct(properties: Properties) -> Struct:
    struct = Struct()
    struct.update(properties)
    return struct


def pack_state(state: State) -> str:
    """Terraform's state and private bytes as the text of the hidden output."""
    private = base64.b64encode(state.private).decode()
    return json.dumps({"state": state.value, "private": private}, sort_keys=True)


def unpack_state(outputs: Properties) -> State:
    """Reverse ``pack_state``, from a resource's outputs."""
    hidden = json.loads(outputs[HIDDEN_STATE])
    return State(value=hidden["state"], private=base64.b64decode(hidden["private"]))


def name_argument(terraform: str, block: Block, properties: Properties) -> str | None:
    """The Pulumi property that holds the physical name, where Pulumi must make one up; None where not.

    As SetAutonaming of Pulumi's bridge: a text argument ``name`` (``bucket`` for a bucket), unless it or its prefix
    form is given.
    """
    argument = "bucket" if terraform == "aws_s3_bucket" else "name"
    attribute = next((item for item in block.attributes.values() if item.pulumi_name == argument), None)
    if attribute is None or not attribute.settable or attribute.type != "string":
        return None
    if argument in properties or f"{argument}Prefix" in properties:
        return None
    return argument


def name_is_taken(terraform: str, block: Block, inputs: Properties, prior: State) -> bool:
    """True where a replacement has its predecessor's name, so that the predecessor must be deleted first.

    As nameRequiresDeleteBeforeReplace of Pulumi's bridge: only where Pulumi could have made the name up, and did not.
    What else two resources cannot share (a subnet's range) is for the program to say, with ``delete_before_replace``.
    """
    argument = name_argument(terraform, block, {})
    if argument is None or argument not in inputs or argument in inputs.get(DEFAULTS, ()):
        return False
    return bool(inputs[argument] == prior.value[block.terraform_names[argument]])


def physical_name(terraform: str, urn: str) -> str:
    """A new physical name from the program's name for the resource, as Pulumi makes them."""
    name = f"{logical_name(urn)}-{secrets.token_hex(4)[:7]}"
    if terraform == "aws_kms_alias":
        return f"alias/{name}"
    return name.lower() if terraform == "aws_s3_bucket" else name


class InitFailedError(Exception):
    """A resource that exists, but whose create or update failed half-way; the engine keeps it in its state."""

    def __init__(self, detail: provider_pb2.ErrorResourceInitFailed) -> None:
        super().__init__("; ".join(detail.reasons))
        self._detail = detail

    def status(self) -> status_pb2.Status:
        """Encode as a rich error of gRPC: https://grpc.io/docs/guides/error/#richer-error-model."""
        status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=str(self))
        status.details.add().Pack(self._detail)
        return status


def _reported(
    call: Callable[[Any, Request, grpc.ServicerContext], Response],
) -> Callable[[Any, Request, grpc.ServicerContext], Response]:
    """The call, with its exceptions told to the engine as the error of that resource."""

    @functools.wraps(call)
    def run(self: Any, request: Request, context: grpc.ServicerContext) -> Response:
        try:
            return call(self, request, context)
        except InitFailedError as error:
            context.set_trailing_metadata((("grpc-status-details-bin", error.status().SerializeToString()),))
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
        except ProviderError as error:
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
        except Exception:  # noqa: BLE001  the engine must hear of a defect here, and a thread's traceback is not seen
            context.abort(grpc.StatusCode.INTERNAL, f"tests/engine/plugin: {traceback.format_exc()}")
        raise AssertionError("abort raises")

    return run


class AwsProvider(provider_pb2_grpc.ResourceProviderServicer):
    """The service behind ``pulumi-resource-aws``."""

    def __init__(self, terraform: TerraformProvider, version: str) -> None:
        self._terraform = terraform
        self._version = version

    def Attach(self, request: Any, context: Any) -> Empty:
        """Serve an engine that did not start this process; nothing changes, as each engine configures it."""
        return Empty()

    def Handshake(self, request: Any, context: Any) -> provider_pb2.ProviderHandshakeResponse:
        """Say what this plugin takes: plain values only."""
        return provider_pb2.ProviderHandshakeResponse(
            accept_secrets=False, accept_resources=False, accept_outputs=False
        )

    def GetPluginInfo(self, request: Any, context: Any) -> plugin_pb2.PluginInfo:
        """Name the version the program asked for."""
        return plugin_pb2.PluginInfo(version=self._version)

    def Cancel(self, request: Any, context: Any) -> Empty:
        """Nothing to stop: a running call ends by itself."""
        return Empty()

    def CheckConfig(self, request: provider_pb2.CheckRequest, context: Any) -> provider_pb2.CheckResponse:
        """Take the provider's configuration as it is; Configure validates it."""
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, request: Any, context: Any) -> provider_pb2.DiffResponse:
        """Treat a changed configuration as a change in place."""
        return provider_pb2.DiffResponse(changes=provider_pb2.DiffResponse.DIFF_NONE)

    @_reported
    def Configure(
        self, request: provider_pb2.ConfigureRequest, context: grpc.ServicerContext
    ) -> provider_pb2.ConfigureResponse:
        """Configure the AWS provider; credentials and endpoint come from the environment."""
        given = {key: value for key, value in _dict(request.args).items() if key not in OF_THE_ENGINE}
        for key, value in given.items():
            if isinstance(value, str) and value[:1] in ("[", "{"):
                given[key] = json.loads(value)  # the engine sends nested configuration as JSON text
        # An emulated AWS has no bucket subdomains, no metadata service, and dummy credentials nobody can look up.
        # An error of the emulation is a defect, not an outage: the default of 25 retries would hide it for minutes.
        emulated = {
            "s3UsePathStyle": True,
            "skipMetadataApiCheck": "true",
            "skipCredentialsValidation": True,
            "maxRetries": 2,
        }
        problems: list[str] = []
        config = to_terraform(self._terraform.provider_block(), given | emulated, "provider aws", problems)
        if problems:
            raise ProviderError("; ".join(problems))
        self._terraform.configure(config)
        return provider_pb2.ConfigureResponse(
            acceptSecrets=False, acceptResources=False, acceptOutputs=False, supportsPreview=True
        )

    @_reported
    def Invoke(self, request: provider_pb2.InvokeRequest, context: grpc.ServicerContext) -> provider_pb2.InvokeResponse:
        """Read a data source."""
        name = terraform_type(request.tok, self._terraform.data_source_types)
        block = self._terraform.data_source_block(name)
        problems: list[str] = []
        config = to_terraform(block, _dict(request.args), name, problems)
        if problems:
            raise ProviderError("; ".join(problems))
        result = from_terraform(block, self._terraform.read_data(name, config))
        response = provider_pb2.InvokeResponse()
        getattr(response, "return").CopyFrom(_struct(result))  # the field's name is a Python keyword
        return response

    @_reported
    def Check(self, request: provider_pb2.CheckRequest, context: grpc.ServicerContext) -> provider_pb2.CheckResponse:
        """Name the resource where needed and let the AWS provider validate its arguments."""
        name, block = self._resource(request.urn)
        inputs, before = _dict(request.news), _dict(request.olds)
        argument = name_argument(name, block, inputs)
        if argument is not None:
            inputs[argument] = before.get(argument) or physical_name(name, request.urn)
            inputs[DEFAULTS] = [argument]
        problems: list[str] = []
        config = to_terraform(block, _arguments(inputs), name, problems)
        problems += [f"{name}: {problem}" for problem in self._terraform.validate(name, config)]
        failures = [provider_pb2.CheckFailure(reason=problem) for problem in problems]
        return provider_pb2.CheckResponse(inputs=_struct(inputs), failures=failures)

    @_reported
    def Diff(self, request: provider_pb2.DiffRequest, context: grpc.ServicerContext) -> provider_pb2.DiffResponse:
        """Plan the AWS provider's changes, and whether they need a new resource."""
        name, block = self._resource(request.urn)
        inputs, prior = _dict(request.news), unpack_state(_dict(request.olds))
        plan = self._plan(name, inputs, prior, request.ignoreChanges)
        before, after = comparable(block, prior.value), comparable(block, plan.value)
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        replaces = changed & plan.requires_replace
        kinds = provider_pb2.PropertyDiff
        details = {
            _pulumi_name(block, key): kinds(kind=kinds.UPDATE_REPLACE if key in replaces else kinds.UPDATE)
            for key in changed
        }
        changes = provider_pb2.DiffResponse.DIFF_SOME if changed else provider_pb2.DiffResponse.DIFF_NONE
        return provider_pb2.DiffResponse(
            changes=changes,
            diffs=sorted(details),
            replaces=sorted(_pulumi_name(block, key) for key in replaces),
            detailedDiff=details,
            hasDetailedDiff=True,
            deleteBeforeReplace=bool(replaces) and name_is_taken(name, block, inputs, prior),
        )

    @_reported
    def Create(self, request: provider_pb2.CreateRequest, context: grpc.ServicerContext) -> provider_pb2.CreateResponse:
        """Create the resource; in a preview only plan it."""
        name, block = self._resource(request.urn)
        plan = self._plan(name, _dict(request.properties), None)
        if request.preview:
            return provider_pb2.CreateResponse(properties=_struct(from_terraform(block, plan.value)))
        try:
            state = self._terraform.apply(name, plan, None)
        except UnfinishedError as error:
            raise _unfinished(error, block, request.properties) from error
        return provider_pb2.CreateResponse(id=state.value["id"], properties=_outputs(block, state))

    @_reported
    def Update(self, request: provider_pb2.UpdateRequest, context: grpc.ServicerContext) -> provider_pb2.UpdateResponse:
        """Change the resource in place; in a preview only plan it."""
        name, block = self._resource(request.urn)
        prior = unpack_state(_dict(request.olds))
        plan = self._plan(name, _dict(request.news), prior, request.ignoreChanges)
        if request.preview:
            return provider_pb2.UpdateResponse(properties=_struct(from_terraform(block, plan.value)))
        try:
            state = self._terraform.apply(name, plan, prior)
        except UnfinishedError as error:
            raise _unfinished(error, block, request.news) from error
        return provider_pb2.UpdateResponse(properties=_outputs(block, state))

    @_reported
    def Read(self, request: provider_pb2.ReadRequest, context: grpc.ServicerContext) -> provider_pb2.ReadResponse:
        """The resource as AWS has it now; no id where it is gone."""
        name, block = self._resource(request.urn)
        outputs = _dict(request.properties)
        known = HIDDEN_STATE in outputs
        prior = unpack_state(outputs) if known else self._terraform.import_state(name, request.id)
        state = self._terraform.read(name, prior)
        if state is None:
            return provider_pb2.ReadResponse()
        # An imported resource has no inputs yet; its arguments are what it is.
        inputs = request.inputs if known else _struct(arguments_of(block, state))
        return provider_pb2.ReadResponse(id=state.value["id"], properties=_outputs(block, state), inputs=inputs)

    @_reported
    def Delete(self, request: provider_pb2.DeleteRequest, context: grpc.ServicerContext) -> Empty:
        """Destroy the resource."""
        name, _ = self._resource(request.urn)
        self._terraform.delete(name, unpack_state(_dict(request.properties)))
        return Empty()

    def _resource(self, urn: str) -> tuple[str, Block]:
        name = terraform_type(type_token(urn), self._terraform.resource_types)
        return name, self._terraform.resource_block(name)

    def _plan(self, name: str, inputs: Properties, prior: State | None, ignored: Iterable[str] = ()) -> Plan:
        """The provider's plan; an ignored property keeps its value in ``prior``, as with Terraform's ignore_changes."""
        block = self._terraform.resource_block(name)
        problems: list[str] = []
        config = to_terraform(block, _arguments(inputs), name, problems)
        assert not problems, f"Check let them through: {problems}"
        if prior is not None:
            for path in ignored:
                _keep(block, config, prior.value, path.split("."))
        return self._terraform.plan(name, config, prior)


def _unfinished(error: UnfinishedError, block: Block, inputs: Struct) -> InitFailedError:
    """Error for the engine: the resource exists, but its create or update failed half-way."""
    return InitFailedError(
        provider_pb2.ErrorResourceInitFailed(
            id=error.state.value["id"],
            properties=_outputs(block, error.state),
            inputs=inputs,
            reasons=[str(error)],
            # The state holds the intended values, whether set or not.
            refresh_before_update=True,
        )
    )


def _keep(block: Block, config: TerraformObject, prior: TerraformObject, path: list[str]) -> None:
    """Copy the value at a path of Pulumi's names from ``prior`` to ``config``."""
    key = block.terraform_names[path[0].split("[")[0]]
    if len(path) == 1 or key not in block.blocks:
        config[key] = prior[key]
        return
    for new, old in zip(config[key], prior[key], strict=False):
        _keep(block.blocks[key].block, new, old, path[1:])


def arguments_of(block: Block, state: State) -> Properties:
    """A resource's name, and its properties that a program can set and AWS does not choose."""
    given = {item.pulumi_name for item in block.attributes.values() if item.settable and not item.computed}
    given |= {"bucket", "name"} & {item.pulumi_name for item in block.attributes.values() if item.settable}
    return {key: value for key, value in from_terraform(block, state.value).items() if key in given and value != ""}


def _arguments(inputs: Properties) -> Properties:
    return {key: value for key, value in inputs.items() if not key.startswith("__")}


def _pulumi_name(block: Block, name: str) -> str:
    return (block.attributes.get(name) or block.blocks[name]).pulumi_name


def _outputs(block: Block, state: State) -> Struct:
    public: TerraformObject = from_terraform(block, state.value)
    return _struct({**public, HIDDEN_STATE: pack_state(state)})


def endpoint_is_local(url: str) -> bool:
    """True for a ``url`` on this machine; any other could be a real AWS account."""
    return url.startswith(("http://127.0.0.1:", "http://localhost:"))


def require_emulated_aws() -> None:
    """Refuse to run against anything but an emulated AWS on this machine.

    Raises:
        ProviderError: AWS_ENDPOINT_URL is not set or names another machine.
    """
    url = os.environ.get("AWS_ENDPOINT_URL", "")
    if not endpoint_is_local(url):
        raise ProviderError(f"AWS_ENDPOINT_URL is {url!r}; this plugin is for an emulated AWS at http://127.0.0.1:PORT")
