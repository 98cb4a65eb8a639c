"""A small resource schema for tests of the plugin's logic, with every kind of attribute and block."""

from __future__ import annotations

from tests.engine.plugin.naming import property_name
from tests.engine.plugin.schema import Attribute, Block, CtyType, NestedBlock, Nesting, is_collection


def attribute(name: str, cty_type: CtyType, *, computed: bool = False, optional: bool = True) -> Attribute:
    """An attribute with the name Pulumi gives it."""
    return Attribute(
        name=name,
        pulumi_name=property_name(name, many=is_collection(cty_type)),
        type=cty_type,
        optional=optional,
        computed=computed,
    )


def nested(name: str, block: Block, nesting: Nesting, *, flat: bool) -> NestedBlock:
    """A nested block with the name Pulumi gives it."""
    return NestedBlock(
        name=name, pulumi_name=property_name(name, many=not flat), block=block, nesting=nesting, flat=flat
    )


def block(*items: Attribute | NestedBlock) -> Block:
    """A block of these attributes and nested blocks."""
    return Block(
        attributes={item.name: item for item in items if isinstance(item, Attribute)},
        blocks={item.name: item for item in items if isinstance(item, NestedBlock)},
    )


DISK = block(
    attribute("device_name", "string"),
    attribute("volume_size", "number", computed=True),
)
RULE = block(attribute("port", "number"), attribute("rule_id", "string", optional=False, computed=True))
NODE = block(
    attribute("id", "string", optional=False, computed=True),
    attribute("arn", "string", optional=False, computed=True),
    attribute("name", "string"),
    attribute("count", "number"),
    attribute("protected", "bool"),
    attribute("subnet_id", ["set", "string"]),
    attribute("command", ["list", "string"]),
    attribute("tags", ["map", "string"]),
    attribute("ingress", ["set", ["object", {"from_port": "number", "cidr_block": ["list", "string"]}]]),
    attribute("default_version", "number", computed=True),
    nested("metadata_options", block(attribute("http_tokens", "string")), Nesting.LIST, flat=True),
    nested("disk", DISK, Nesting.LIST, flat=False),
    nested("rule", RULE, Nesting.SET, flat=False),
    nested("timeouts", block(attribute("create", "string")), Nesting.SINGLE, flat=True),
)
