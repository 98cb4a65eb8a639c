"""Values between Pulumi (JSON-like properties) and Terraform (msgpack objects with every attribute present).

A value not known before apply is Pulumi's sentinel text on one side and a msgpack extension on the other
(https://github.com/hashicorp/terraform/blob/main/docs/plugin-protocol/object-wire-format.md, "Schema.Attribute
Mapping Rules for MessagePack").
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from tests.engine.plugin.naming import property_name
from tests.engine.plugin.schema import Block, CtyType, Nesting, is_collection

PULUMI_UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""Pulumi's wire text for a value that is not known yet (sdk/go/common/resource/plugin/rpc.go, UnknownStringValue)."""

UNKNOWN = msgpack.ExtType(0, b"\x00")
"""Terraform's unknown value without refinements."""

SIGNATURE = "4dabf18193072939515e22adb298388d"
ASSET, ARCHIVE = "c44067f5952c0a294b673a41bacd8c17", "0def7320c3a5731c473e5ecbe6d01bc7"
"""The key and its values that mark an object on Pulumi's wire as an asset or archive (sdk/go/common/resource/sig)."""

TerraformObject = dict[str, Any]


class UnsupportedValueError(ValueError):
    """A value that does not fit the type Terraform's schema gives it."""


def is_unknown(value: object) -> bool:
    """True for Terraform's unknown value, with or without refinements."""
    return isinstance(value, msgpack.ExtType)


def encode(value: object) -> bytes:
    """msgpack bytes of a Terraform value."""
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    return packed


def decode(data: bytes) -> Any:
    """Terraform value from msgpack bytes; unknowns stay ``msgpack.ExtType``."""
    return msgpack.unpackb(data, strict_map_key=False)


def coerce(value: Any, cty_type: CtyType, where: str) -> Any:
    """A Pulumi property as the Terraform type ``cty_type``, with Terraform's own conversions between primitives.

    Raises:
        UnsupportedValueError: no such conversion; ``where`` names the argument.
    """
    if value is None:
        return None
    if value == PULUMI_UNKNOWN:
        return UNKNOWN
    if isinstance(value, dict) and value.get(SIGNATURE) in (ASSET, ARCHIVE):
        return asset_path(value)
    if isinstance(cty_type, str):
        return _coerce_primitive(value, cty_type, where)
    kind, inner = cty_type
    if kind in ("list", "set"):
        items = value if isinstance(value, list) else [value]  # the bridge shows a list of at most one as the item
        return [coerce(item, inner, f"{where}[{index}]") for index, item in enumerate(items)]
    if kind == "map" and isinstance(value, dict):
        return {key: coerce(item, inner, f"{where}.{key}") for key, item in value.items()}
    if kind == "object" and isinstance(value, dict):
        names = {_object_property(name, item_type): name for name, item_type in inner.items()}
        unknown_names = [key for key in value if key not in names]
        if unknown_names:
            raise UnsupportedValueError(f"{where}: no argument {', '.join(unknown_names)}")
        given = {names[key]: item for key, item in value.items()}
        return {name: coerce(given.get(name), item_type, f"{where}.{name}") for name, item_type in inner.items()}
    raise UnsupportedValueError(f"{where}: {value!r} is not a {json.dumps(cty_type)}")


def asset_path(asset: Mapping[str, Any]) -> str:
    """Path of an asset's or archive's content, named by its digest: Terraform then sees a change as a changed path.

    An archive of assets becomes a zip file, as in Pulumi's bridge.
    """
    path = Path(tempfile.gettempdir()) / f"pulumi-asset-{asset['hash']}"
    if not path.exists():
        if "assets" in asset:
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in sorted(asset["assets"].items()):
                    archive.write(content["path"], name) if "path" in content else archive.writestr(
                        name, content["text"]
                    )
        else:
            shutil.copyfile(asset["path"], path)
    return str(path)


def _object_property(name: str, cty_type: CtyType) -> str:
    return property_name(name, many=is_collection(cty_type))


def _coerce_primitive(value: Any, cty_type: str, where: str) -> str | int | float | bool:
    if cty_type == "string":
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return str(int(value)) if value == int(value) else str(value)
    elif cty_type == "bool":
        if isinstance(value, bool):
            return value
        if value in ("true", "false"):
            return bool(value == "true")
    elif cty_type == "number" and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            pass
        else:
            return int(number) if number.is_integer() else number
    raise UnsupportedValueError(f"{where}: {value!r} is not a {cty_type}")


def to_terraform(block: Block, properties: Mapping[str, Any], where: str, problems: list[str]) -> TerraformObject:
    """Pulumi properties as a whole Terraform object: every attribute present, absent ones null.

    Args:
        block: schema of the resource or nested block.
        properties: by Pulumi's names.
        where: what to call the object in ``problems``.
        problems: gets a line for each property that does not exist or does not fit its type.
    """
    given: TerraformObject = {}
    for key, value in properties.items():
        name = block.terraform_names.get(key)
        if name is None:
            problems.append(f"{where}: no argument {key}; there are {', '.join(sorted(block.terraform_names))}")
        elif name in block.attributes:
            try:
                given[name] = coerce(value, block.attributes[name].type, f"{where}.{name}")
            except UnsupportedValueError as error:
                problems.append(str(error))
        elif value == PULUMI_UNKNOWN:
            given[name] = UNKNOWN
        elif value is not None:
            nested = block.blocks[name]
            items = value if isinstance(value, list) else [value]
            objects = [
                UNKNOWN if item == PULUMI_UNKNOWN else to_terraform(nested.block, item, f"{where}.{name}", problems)
                for item in items
                if item is not None
            ]
            given[name] = objects if nested.repeated else next(iter(objects), None)
    whole: TerraformObject = dict.fromkeys(block.attributes)
    whole.update({name: [] if nested.repeated else None for name, nested in block.blocks.items()})
    return whole | given


def from_terraform(block: Block, state: TerraformObject) -> dict[str, Any]:
    """Pulumi properties of a Terraform object; what is null is left out."""
    properties: dict[str, Any] = {}
    for name, value in state.items():
        if value is None:
            continue
        if name in block.attributes:
            attribute = block.attributes[name]
            plain = _plain(value, attribute.type)
            if attribute.flat and isinstance(plain, list):
                plain = plain[0] if plain else None
            if plain is not None:
                properties[attribute.pulumi_name] = plain
            continue
        nested = block.blocks[name]
        if is_unknown(value):
            properties[nested.pulumi_name] = PULUMI_UNKNOWN
            continue
        items = [
            PULUMI_UNKNOWN if is_unknown(item) else from_terraform(nested.block, item)
            for item in (value if nested.repeated else [value])
        ]
        if not nested.flat:
            properties[nested.pulumi_name] = items
        elif items:
            properties[nested.pulumi_name] = items[0]
    return properties


def _plain(value: Any, cty_type: CtyType) -> Any:
    """An attribute's value for Pulumi; the names inside an object become Pulumi's, the keys of a map stay."""
    if is_unknown(value):
        return PULUMI_UNKNOWN
    if value is None or isinstance(cty_type, str):
        return value
    kind, inner = cty_type
    if kind in ("list", "set"):
        return [_plain(item, inner) for item in value]
    if kind == "map":
        return {key: _plain(item, inner) for key, item in value.items()}
    return {
        _object_property(name, item_type): _plain(value[name], item_type)
        for name, item_type in inner.items()
        if value.get(name) is not None
    }


def comparable(block: Block, state: TerraformObject | None) -> dict[str, Any]:
    """``state`` by Terraform's names in a form that compares as Terraform does.

    Sets lose their order, lists keep it; null is like absent and like empty.
    """
    result: dict[str, Any] = {}
    for name, value in (state or {}).items():
        if name in block.attributes:
            form = _comparable_attribute(value, block.attributes[name].type)
        elif is_unknown(value) or value is None:
            form = None if value is None else PULUMI_UNKNOWN
        else:
            nested = block.blocks[name]
            if nested.repeated:
                forms = [PULUMI_UNKNOWN if is_unknown(item) else comparable(nested.block, item) for item in value]
                form = sorted(forms, key=_canonical) if nested.nesting is Nesting.SET else forms
            else:
                form = comparable(nested.block, value)
        if form not in (None, [], {}):
            result[name] = form
    return result


def _comparable_attribute(value: Any, cty_type: CtyType) -> Any:
    if is_unknown(value):
        return PULUMI_UNKNOWN
    if value is None or isinstance(cty_type, str):
        return value
    kind, inner = cty_type
    if kind in ("list", "set"):
        forms = [_comparable_attribute(item, inner) for item in value]
        return sorted(forms, key=_canonical) if kind == "set" else forms
    items = {key: _comparable_attribute(item, inner if kind == "map" else inner[key]) for key, item in value.items()}
    return {key: item for key, item in items.items() if item is not None}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
