"""A Terraform resource's schema with Pulumi's names beside Terraform's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from tests.engine.plugin.naming import AT_MOST_ONE, RENAMED_PROPERTIES, property_name

CtyType = str | list[Any]
"""Terraform's type in cty's JSON form: ``"string"``, ``["list", "string"]``, ``["object", {"name": "string"}]``."""


class Nesting(Enum):
    """Number of a nested block's occurrences; the values are tfplugin5's Schema.NestedBlock.NestingMode."""

    SINGLE = 1
    LIST = 2
    SET = 3
    MAP = 4
    GROUP = 5


@dataclass(frozen=True, kw_only=True)
class Attribute:
    """One attribute: ``name`` is Terraform's, ``pulumi_name`` is Pulumi's.

    ``flat`` says that Pulumi shows the list's only item and not the list.
    """

    name: str
    pulumi_name: str
    type: CtyType
    required: bool = False
    optional: bool = False
    computed: bool = False
    flat: bool = False

    @property
    def settable(self) -> bool:
        """True where a program may set it."""
        return self.required or self.optional


@dataclass(frozen=True, kw_only=True)
class NestedBlock:
    """One kind of nested block; ``flat`` says that Pulumi shows it as one object and not as a list."""

    name: str
    pulumi_name: str
    block: Block
    nesting: Nesting
    flat: bool

    @property
    def repeated(self) -> bool:
        """True where Terraform's value is a list or set of objects."""
        return self.nesting in (Nesting.LIST, Nesting.SET)


@dataclass(frozen=True, kw_only=True)
class Block:
    """The attributes and nested blocks of a resource, or of a block inside it, by Terraform's name."""

    attributes: dict[str, Attribute]
    blocks: dict[str, NestedBlock]

    @cached_property
    def terraform_names(self) -> dict[str, str]:
        """Terraform's name of each Pulumi property."""
        items: list[Attribute | NestedBlock] = [*self.attributes.values(), *self.blocks.values()]
        return {item.pulumi_name: item.name for item in items}


def is_collection(cty_type: CtyType) -> bool:
    """True for types whose values are lists or sets."""
    return isinstance(cty_type, list) and cty_type[0] in ("list", "set")


def block_from_message(message: Any, path: str) -> Block:
    """``Block`` from a tfplugin5 Schema.Block message; ``path`` is the resource type and the blocks down to it."""
    attributes = {}
    for item in message.attributes:
        cty_type = json.loads(item.type)
        flat = f"{path}.{item.name}" in AT_MOST_ONE
        attributes[item.name] = Attribute(
            name=item.name,
            pulumi_name=_pulumi_name(path, item.name, many=is_collection(cty_type) and not flat),
            type=cty_type,
            flat=flat,
            required=item.required,
            optional=item.optional,
            computed=item.computed,
        )
    blocks = {}
    for item in message.block_types:
        inner_path = f"{path}.{item.type_name}"
        nesting = Nesting(item.nesting)
        if nesting is Nesting.MAP:
            raise NotImplementedError(f"{inner_path} is a map of blocks, which no AWS type has")
        flat = nesting in (Nesting.SINGLE, Nesting.GROUP) or item.max_items == 1 or inner_path in AT_MOST_ONE
        blocks[item.type_name] = NestedBlock(
            name=item.type_name,
            pulumi_name=_pulumi_name(path, item.type_name, many=not flat),
            block=block_from_message(item.block, inner_path),
            nesting=nesting,
            flat=flat,
        )
    return Block(attributes=attributes, blocks=blocks)


def _pulumi_name(path: str, name: str, *, many: bool) -> str:
    return RENAMED_PROPERTIES.get(f"{path}.{name}") or property_name(name, many=many)
