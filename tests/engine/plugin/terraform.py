"""terraform-provider-aws as a process: start, handshake, schema, and one method for each call used here.

The handshake is HashiCorp go-plugin's (https://github.com/hashicorp/go-plugin/blob/main/docs/internals.md): a magic
cookie in the environment, then one line ``1|5|unix|SOCKET|grpc|`` on standard output. Without a client certificate in
the environment the socket speaks plain gRPC.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import grpc
from inmanta_tfplugin import tfplugin5_pb2 as messages
from inmanta_tfplugin import tfplugin5_pb2_grpc as services

from tests.engine.plugin.planning import proposed_new_state
from tests.engine.plugin.schema import Block, block_from_message
from tests.engine.plugin.values import TerraformObject, decode, encode

# Terraform's own cookie, a check against starting the binary by hand and not a secret (internal/plugin/serve.go).
MAGIC_COOKIE = {"TF_PLUGIN_MAGIC_COOKIE": "d602bf8f470bc67ca7faa0386276bbdd4330efaf76d1a219cb4d6991ca9872b2"}
TERRAFORM_VERSION = "1.11.4"  # what the provider puts into its User-Agent
ERROR = 1  # tfplugin5 Diagnostic.Severity.ERROR
UNLIMITED_MESSAGES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class ProviderError(Exception):
    """The AWS provider refused or failed; the message is its own."""


class UnfinishedError(ProviderError):
    """A create or an update failed half-way: ``state`` is what the provider knows of the resource that now exists."""

    def __init__(self, message: str, state: State) -> None:
        super().__init__(message)
        self.state = state


@dataclass(frozen=True, kw_only=True)
class State:
    """A resource's Terraform state with the bytes the provider keeps beside it."""

    value: TerraformObject
    private: bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The provider's plan: the planned object, and the attributes whose change needs a new resource."""

    config: TerraformObject | None
    value: TerraformObject
    private: bytes
    requires_replace: frozenset[str]


def errors(diagnostics: Any) -> list[str]:
    """The errors among a response's diagnostics, as text."""
    return [f"{item.summary}: {item.detail}".removesuffix(": ") for item in diagnostics if item.severity == ERROR]


def raise_errors(diagnostics: Any) -> None:
    """Raise the errors among ``diagnostics``, if any.

    Raises:
        ProviderError: there are some.
    """
    messages = errors(diagnostics)
    if messages:
        raise ProviderError("; ".join(messages))


def _value(item: object) -> Any:
    return messages.DynamicValue(msgpack=encode(item))


def _object(value: Any) -> Any:
    return decode(value.msgpack) if value.msgpack else None


class TerraformProvider:
    """A running terraform-provider-aws; close it with ``close``.

    Args:
        binary: the provider's executable.
        log: gets the provider's standard error.
    """

    def __init__(self, binary: Path, log: IO[bytes] | int = subprocess.DEVNULL) -> None:
        environment = {**os.environ, **MAGIC_COOKIE, "PLUGIN_PROTOCOL_VERSIONS": "5"}
        self._process = subprocess.Popen([binary], stdout=subprocess.PIPE, stderr=log, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        fields = line.split("|")
        if fields[:3] != ["1", "5", "unix"]:
            self.close()
            raise ProviderError(f"{binary} answered {line!r} and not with go-plugin's handshake for protocol 5")
        channel = grpc.insecure_channel(f"unix:{fields[3]}", options=UNLIMITED_MESSAGES)
        self._stub: Any = services.ProviderStub(channel)
        self._schema = self._stub.GetSchema(messages.GetProviderSchema.Request())
        raise_errors(self._schema.diagnostics)

    def close(self) -> None:
        """End the provider's process."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def resource_types(self) -> Any:
        """Terraform's names of the resource types; supports ``in``."""
        return self._schema.resource_schemas

    @property
    def data_source_types(self) -> Any:
        """Terraform's names of the data sources; supports ``in``."""
        return self._schema.data_source_schemas

    @cache  # noqa: B019  one provider lives as long as its process
    def resource_block(self, terraform_type: str) -> Block:
        """Schema of a resource type."""
        return block_from_message(self._schema.resource_schemas[terraform_type].block, terraform_type)

    @cache  # noqa: B019
    def data_source_block(self, terraform_type: str) -> Block:
        """Schema of a data source."""
        return block_from_message(self._schema.data_source_schemas[terraform_type].block, terraform_type)

    @cache  # noqa: B019
    def provider_block(self) -> Block:
        """Schema of the provider's own configuration."""
        return block_from_message(self._schema.provider.block, "provider")

    def configure(self, config: TerraformObject) -> None:
        """Validate the provider's configuration and apply it."""
        prepared = self._stub.PrepareProviderConfig(messages.PrepareProviderConfig.Request(config=_value(config)))
        raise_errors(prepared.diagnostics)
        request = messages.Configure.Request(terraform_version=TERRAFORM_VERSION, config=prepared.prepared_config)
        raise_errors(self._stub.Configure(request).diagnostics)

    def validate(self, terraform_type: str, config: TerraformObject) -> list[str]:
        """Problems of a resource's configuration, by the provider's validation."""
        request = messages.ValidateResourceTypeConfig.Request(type_name=terraform_type, config=_value(config))
        return errors(self._stub.ValidateResourceTypeConfig(request).diagnostics)

    def read_data(self, terraform_type: str, config: TerraformObject) -> TerraformObject:
        """Validate and read a data source."""
        checked = self._stub.ValidateDataSourceConfig(
            messages.ValidateDataSourceConfig.Request(type_name=terraform_type, config=_value(config))
        )
        raise_errors(checked.diagnostics)
        request = messages.ReadDataSource.Request(type_name=terraform_type, config=_value(config))
        response = self._stub.ReadDataSource(request)
        raise_errors(response.diagnostics)
        state = _object(response.state)
        assert isinstance(state, dict)
        return state

    def plan(self, terraform_type: str, config: TerraformObject | None, prior: State | None) -> Plan:
        """Plan a create (``prior`` None), an update or the resource's end (``config`` None)."""
        block = self.resource_block(terraform_type)
        before = prior.value if prior else None
        proposed = None if config is None else proposed_new_state(block, config, before)
        response = self._stub.PlanResourceChange(
            messages.PlanResourceChange.Request(
                type_name=terraform_type,
                prior_state=_value(before),
                proposed_new_state=_value(proposed),
                config=_value(config),
                prior_private=prior.private if prior else b"",
            )
        )
        raise_errors(response.diagnostics)
        return Plan(
            config=config,
            value=_object(response.planned_state),
            private=response.planned_private,
            requires_replace=frozenset(
                path.steps[0].attribute_name for path in response.requires_replace if path.steps
            ),
        )

    def apply(self, terraform_type: str, plan: Plan, prior: State | None) -> State:
        """Carry out a plan.

        Raises:
            UnfinishedError: it failed half-way, and the resource exists.
            ProviderError: it failed.
        """
        response = self._stub.ApplyResourceChange(
            messages.ApplyResourceChange.Request(
                type_name=terraform_type,
                prior_state=_value(prior.value if prior else None),
                planned_state=_value(plan.value),
                config=_value(plan.config),
                planned_private=plan.private,
            )
        )
        state = State(value=_object(response.new_state), private=response.private)
        problems = errors(response.diagnostics)
        if problems and (state.value or {}).get("id"):
            raise UnfinishedError("; ".join(problems), state)
        raise_errors(response.diagnostics)
        return state

    def delete(self, terraform_type: str, prior: State) -> None:
        """Destroy a resource."""
        plan = self.plan(terraform_type, None, prior)
        self.apply(terraform_type, replace(plan, private=plan.private or prior.private), prior)

    def read(self, terraform_type: str, state: State) -> State | None:
        """The resource as it is now; None where it is gone."""
        request = messages.ReadResource.Request(
            type_name=terraform_type, current_state=_value(state.value), private=state.private
        )
        response = self._stub.ReadResource(request)
        raise_errors(response.diagnostics)
        value = _object(response.new_state)
        return None if value is None else State(value=value, private=response.private)

    def import_state(self, terraform_type: str, resource_id: str) -> State:
        """A first state for an existing resource; ``read`` fills it."""
        request = messages.ImportResourceState.Request(type_name=terraform_type, id=resource_id)
        response = self._stub.ImportResourceState(request)
        raise_errors(response.diagnostics)
        imported = response.imported_resources[0]
        return State(value=_object(imported.state), private=imported.private)
