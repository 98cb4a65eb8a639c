"""Facts of a deployed cluster that a plan's manifests need."""

from __future__ import annotations

import hashlib

from pydantic import BaseModel, ConfigDict

from infra.kubernetes.constants import STACK_LABEL
from infra.naming import slug
from optimizer.contract.plan import FleetPlan


class ClusterFacts(BaseModel):
    """The stack's output ``kubernetes``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: str
    environment: dict[str, str]
    bundle_key: str
    bundle_sha256: str
    registry: str
    plan_sha256: str

    @property
    def node_selector(self) -> dict[str, str]:
        """Label of the stack's GPU nodes."""
        return {STACK_LABEL: slug(self.environment["GPUFLEET_STACK"])}


def plan_digest(plan: FleetPlan) -> str:
    """SHA-256 of a plan, hexadecimal."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()
