"""``Rejection``: why an instance type has no plan, with the constraint that binds, its value and the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Binding = Literal[
    "memory",
    "data",
    "precision",
    "image",
    "global_batch",
    "sharding",
    "region",
    "price",
    "budget",
    "deadline",
    "interruptions",
    "capacity-block",
]


@dataclass(frozen=True)
class Rejection:
    """One entry of the answer's ``rejected``; ``value`` is the type's nearest to ``limit``, each a number or text."""

    instance_type: str
    reason: str
    binding_constraint: Binding
    value: Any
    limit: Any
