"""Difference between the resources of a plan and those of a stack or another plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.offline.exported import Export, ExportError, flat, is_export, read_export
from infra.offline.preview import Resource
from infra.offline.resource_types import TYPES
from optimizer.commands.stack_file import read_stack_file
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan, PlanError, read_plan

Kind = Literal["added", "changed", "replaced", "removed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """The other side of the comparison and its file; an export holds neither plan nor configuration."""

    origin: str
    plan: FleetPlan | None
    config: Mapping[str, str] | None = None
    export: Export | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One resource that differs, and the names of the arguments whose values differ."""

    kind: Kind
    type: str
    name: str
    arguments: tuple[str, ...] = ()


def read_before(path: Path, *, stack: str) -> Before:
    """Read the file of ``--against``: a plan, recommend's output, a stack's configuration, or a stack's export.

    Raises:
        InvalidInputError: it is none of these.
    """
    if path.suffix in (".yaml", ".yml"):
        file = read_stack_file(path, stack=stack)
        return Before(origin=str(path), plan=file.plan, config=file.config_texts)
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text)
        if is_export(data):
            return Before(origin=str(path), plan=None, export=read_export(data))
        return Before(origin=str(path), plan=read_plan(text, origin=str(path)))
    except (OSError, UnicodeDecodeError, ValueError, PlanError, ExportError) as error:
        raise InvalidInputError(
            f"--against {path} cannot be used: {error}",
            limit="a plan, recommend's JSON, a Pulumi.NAME.yaml, or the JSON of `pulumi stack export`",
        ) from error


def changes(before: Sequence[Resource], after: Sequence[Resource]) -> list[Change]:
    """Return the resources that differ, without components, in the order of ``after``, removed ones last."""
    removed = {(resource.type, resource.name): resource for resource in before if resource.parent}
    result = []
    for resource in after:
        if not resource.parent:
            continue
        old = removed.pop((resource.type, resource.name), None)
        if old is None:
            result.append(Change(kind="added", type=resource.type, name=resource.name))
            continue
        differing = {key for key, _ in set(flat(old.inputs)) ^ set(flat(resource.inputs))}
        if differing:
            row = TYPES.get(resource.kind)
            kind: Kind = "replaced" if row and differing & set(row.replacing.split()) else "changed"
            arguments = tuple(sorted(differing))
            result.append(Change(kind=kind, type=resource.type, name=resource.name, arguments=arguments))
    return result + [Change(kind="removed", type=old.type, name=old.name) for old in removed.values()]
