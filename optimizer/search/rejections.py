"""Rejections: why an instance type has no plan."""

from __future__ import annotations

from typing import Any, Literal

Rejection = dict[str, Any]


Binding = Literal[
    "memory",
    "precision",
    "global_batch",
    "sharding",
    "region",
    "price",
    "budget",
    "deadline",
    "interruptions",
    "capacity-block",
]


def rejection(name: str, binding: Binding, reason: str, value: Any, limit: Any) -> Rejection:
    """Why a type has no plan: an entry of the answer's ``rejected``."""
    return {"instance_type": name, "reason": reason, "binding_constraint": binding, "value": value, "limit": limit}
