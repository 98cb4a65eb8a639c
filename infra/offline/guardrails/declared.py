"""The resources that a rule looks at, and their policies' statements."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.naming import PROJECT, slug
from infra.offline.preview import Resource

Statement = Mapping[str, Any]
# Resources that break a rule, each with its problem in words.
Breaches = Iterator[tuple[Resource, str]]
Rule = Callable[["Declared"], Breaches]

_POLICY_KINDS = {"RolePolicy": "role", "Policy": "role", "Key": "key", "VpcEndpoint": "endpoint"}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The AWS resources of a stack."""

    resources: Sequence[Resource]

    def all(self, *kinds: str) -> list[Resource]:
        """Resources of these types, like "LaunchTemplate"."""
        return [resource for resource in self.resources if resource.kind in kinds]

    @property
    def name_pattern(self) -> re.Pattern[str]:
        """Pattern that an ARN of this stack contains."""
        stacks = {(key.inputs.get("tags") or {}).get(f"{PROJECT}:stack") for key in self.all("Key")}
        slugs = sorted(re.escape(slug(stack)) for stack in stacks if stack)
        # No "*" or letter may follow: "gpufleet-dev*" also names other stacks. Without a stack nothing matches.
        return re.compile(rf"{PROJECT}[-/](?:{'|'.join(slugs) or '(?!)'})(?![a-z0-9*])")

    def referring(self, kind: str, argument: str, owner: Resource) -> list[Mapping[str, Any]]:
        """Arguments of a type's resources that name ``owner`` by its stand-in identifier or ARN."""
        ends = (f"{owner.name}-id", f":{owner.name}")
        return [resource.inputs for resource in self.all(kind) if str(resource.inputs.get(argument)).endswith(ends)]

    def statements(self) -> Iterator[tuple[Resource, str, Statement]]:
        """Every statement with its resource and the kind of policy: role, trust, key, endpoint or resource."""
        for resource in self.resources:
            documents = [
                (_POLICY_KINDS.get(resource.kind, "resource"), resource.inputs.get("policy")),
                ("trust", resource.inputs.get("assumeRolePolicy")),
                *(("role", policy.get("policy")) for policy in resource.inputs.get("inlinePolicies") or []),
            ]
            for kind, text in documents:
                if text:
                    for statement in as_list(json.loads(text)["Statement"]):
                        yield resource, kind, statement


def as_list(value: Any) -> list[Any]:
    """A policy's element (absent, one value or a list) as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
