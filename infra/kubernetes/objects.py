"""Parts that several Kubernetes objects have in common, as plain data."""

from __future__ import annotations

from typing import Any

from infra.kubernetes.constants import GPU_TAINT

Manifest = dict[str, Any]
MANAGED_BY = {"app.kubernetes.io/managed-by": "gpufleet"}


def build_object(
    api: str, kind: str, name: str, namespace: str = "", *, labels: dict[str, str] | None = None
) -> Manifest:
    """An object's head: API version, kind and metadata."""
    metadata: Manifest = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    metadata["labels"] = MANAGED_BY | (labels or {})
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def gpu_toleration() -> Manifest:
    """Toleration of the GPU nodes' taint."""
    key, _, effect = GPU_TAINT
    return {"key": key, "operator": "Exists", "effect": effect}
