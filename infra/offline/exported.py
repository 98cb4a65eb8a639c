"""Reader of ``pulumi stack export``: the resources of a deployed stack, and the answers of AWS."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infra.offline.preview import PLACEHOLDER_ACCOUNT, Known, Resource, by_outer_component

# Pulumi marks secrets, assets and archives inside JSON with this key:
# https://github.com/pulumi/pulumi/blob/master/sdk/go/common/resource/sig/sig.go
SIGNATURE = "4dabf18193072939515e22adb298388d"
# Names of the inputs that are a provider's own defaults.
DEFAULTS = "__defaults"
_HIDDEN = object()


class ExportError(ValueError):
    """The text is no stack export."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A deployed stack; ``region`` is that of the first ARN, or empty."""

    stack: str
    region: str
    resources: tuple[Resource, ...]
    known: Known


def is_export(data: Any) -> bool:
    """Tell an export from other parsed JSON."""
    return isinstance(data, dict) and isinstance(data.get("deployment"), dict)


def read_export(data: Mapping[str, Any]) -> Export:
    """Read a parsed export.

    Raises:
        ExportError: a resource in it is not what Pulumi writes.
    """
    try:
        entries = [
            entry
            for entry in data["deployment"].get("resources", [])
            if not (entry["type"].startswith("pulumi:") or entry.get("delete"))
        ]
        stacks = {entry["urn"].split("::")[0].removeprefix("urn:pulumi:") for entry in entries}
        resources = tuple(_resource(entry) for entry in entries)
        attributes = {
            (resource.type, resource.name): _declared(entry.get("outputs", {}))
            | ({"id": entry["id"]} if "id" in entry else {})
            for resource, entry in zip(resources, entries, strict=True)
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ExportError(f"a resource in it is not what Pulumi writes: {error!r}") from error
    if not entries:
        raise ExportError("it holds no resource: nothing is deployed")
    arns = [str(known["arn"]).split(":") for known in attributes.values() if str(known.get("arn", "")).count(":") >= 5]
    images = [str(resource.inputs["imageId"]) for resource in resources if "imageId" in resource.inputs]
    return Export(
        stack=", ".join(sorted(stacks)),
        region=next((arn[3] for arn in arns if arn[3]), ""),
        resources=tuple(by_outer_component(resources)),
        known=Known(
            account=next((arn[4] for arn in arns if arn[4].isdigit()), PLACEHOLDER_ACCOUNT),
            # A subnet's name ends with its zone's id.
            zones={
                "-".join(resource.name.split("-")[-2:]): str(resource.inputs["availabilityZone"])
                for resource in resources
                if resource.kind == "Subnet"
            },
            image=images[0] if images else Known().image,
            attributes=attributes,
        ),
    )


def _resource(entry: Mapping[str, Any]) -> Resource:
    parent = entry.get("parent", "")
    return Resource(
        type=entry["type"],
        name=entry["urn"].rpartition("::")[2],
        parent="" if "pulumi:pulumi:Stack::" in parent else parent.rpartition("::")[2],
        inputs=_declared(entry.get("inputs", {})),
        protected=bool(entry.get("protect")),
        physical_id=str(entry.get("id", "")),
    )


def _declared(value: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that the program declared, without the provider's defaults, secrets, assets and archives."""
    defaults = set(value.get(DEFAULTS, ()))
    kept = ((key, _plain(item)) for key, item in value.items() if key != DEFAULTS and key not in defaults)
    return {key: item for key, item in kept if item is not _HIDDEN}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _HIDDEN if SIGNATURE in value else _declared(value)
    if isinstance(value, list):
        return [item for item in map(_plain, value) if item is not _HIDDEN]
    return value


def flat(inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each input with its value as text that compares: 2 equals 2.0, and JSON equals the same JSON in other words."""
    for key, value in inputs.items():
        if isinstance(value, str) and value[:1] in ("{", "["):
            with suppress(ValueError):
                value = json.loads(value)
        yield key, json.dumps(_normal(value), sort_keys=True, default=str)


def _normal(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    if isinstance(value, bool) or value in ("true", "false"):
        return str(value).lower()
    if isinstance(value, int | float):
        return float(value)
    return value
