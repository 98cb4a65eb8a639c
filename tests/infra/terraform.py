"""The declared resources as Terraform, for scanners that read it.

Stand-in identifiers become Terraform references, which scanners follow, as from a bucket to its policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.offline.preview import Resource
from tests.engine.plugin.naming import terraform_type
from tests.engine.plugin.schema import Block
from tests.engine.plugin.terraform import TerraformProvider
from tests.engine.plugin.values import to_terraform

# Ends of types that share the name of a type that others refer to: a bucket's settings, a role's policy and profile.
NEVER_REFERRED = (
    "_policy",
    "_configuration",
    "_controls",
    "_block",
    "_versioning",
    "_alias",
    "_subscription",
    "_profile",
    "_association",
    "_route",
    "_target",
    "_template",
)


def terraform(resources: Sequence[Resource], provider: TerraformProvider) -> str:
    """A Terraform configuration, one block a resource, in the names of the provider's schema.

    Raises:
        ValueError: an argument that the provider does not know.
    """
    kinds = {
        resource.type: terraform_type(resource.type, provider.resource_types)
        for resource in resources
        if resource.type.startswith("aws:")
    }
    references = _references(resources, kinds)
    lines: list[str] = []
    for resource in resources:
        if resource.type not in kinds:
            continue
        kind = kinds[resource.type]
        block = provider.resource_block(kind)
        problems: list[str] = []
        arguments = to_terraform(block, resource.inputs, kind, problems)
        if problems:
            raise ValueError(f"{resource.name}: {'; '.join(problems)}")
        # A resource does not refer to itself.
        others = {value: text for value, text in references.items() if not text.startswith(f"{kind}.{resource.name}.")}
        lines += [f'resource "{kind}" "{resource.name}" {{', *_body(block, arguments, others, "  "), "}", ""]
    return "\n".join(lines)


def _references(resources: Sequence[Resource], kinds: Mapping[str, str]) -> dict[str, str]:
    """Terraform's reference for each stand-in identifier and ARN (``infra.offline.preview.Answers``)."""
    references = {}
    for resource in resources:
        kind = kinds.get(resource.type, "")
        if not kind or kind.endswith(NEVER_REFERRED):
            continue
        service = resource.type.split(":")[1].split("/")[0]
        references[f"{resource.name}-id"] = f"{kind}.{resource.name}.id"
        references[f"arn:aws:{service}:::{resource.name}"] = f"{kind}.{resource.name}.arn"
        if kind == "aws_iam_role":
            references[resource.inputs.get("name") or resource.name] = f"{kind}.{resource.name}.name"
    return references


def _body(block: Block, values: Mapping[str, Any], references: Mapping[str, str], indent: str) -> Iterator[str]:
    for name, value in values.items():
        if value in (None, [], {}):
            continue
        if name in block.attributes:
            yield f"{indent}{name} = {_expression(value, references)}"
            continue
        nested = block.blocks[name]
        for item in value if nested.repeated else [value]:
            yield f"{indent}{name} {{"
            yield from _body(nested.block, item, references, indent + "  ")
            yield f"{indent}}}"


def _expression(value: Any, references: Mapping[str, str]) -> str:
    if isinstance(value, str):
        # "${" begins a template in Terraform's texts.
        return references.get(value) or json.dumps(value).replace("${", "$${")
    if isinstance(value, list):
        return "[" + ", ".join(_expression(item, references) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{json.dumps(key)} = {_expression(item, references)}" for key, item in value.items())
        return "{ " + ", ".join(items) + " }"
    return json.dumps(value)
