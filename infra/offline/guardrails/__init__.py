"""Guardrails: rules that the resources of every stack keep. A new rule is a function and an entry of ``RULES``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.offline.guardrails.data import checkpoints_are_protected, encrypted_at_rest, keys_rotate, no_secrets
from infra.offline.guardrails.declared import Declared, Rule
from infra.offline.guardrails.exposure import metadata_needs_a_token, nothing_is_public
from infra.offline.guardrails.permissions import no_wildcards, only_tls, principals_are_narrow
from infra.offline.guardrails.tags import tagged
from infra.offline.preview import Resource

RULES: tuple[Rule, ...] = (
    encrypted_at_rest,
    metadata_needs_a_token,
    nothing_is_public,
    no_wildcards,
    principals_are_narrow,
    only_tls,
    tagged,
    checkpoints_are_protected,
    keys_rotate,
    no_secrets,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A resource, by type and logical name, that breaks a rule."""

    rule: str
    resource: str
    breach: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.resource}: {self.breach}"


def violations(resources: Sequence[Resource]) -> list[Violation]:
    """Every violation among ``infra.offline.preview.resources``."""
    declared = Declared(resources=[resource for resource in resources if resource.type.startswith("aws:")])
    return [
        Violation(rule=rule.__name__, resource=f"{resource.kind} {resource.name}", breach=breach)
        for rule in RULES
        for resource, breach in rule(declared)
    ]
