"""Spot placement scores, which moto 5.2 does not have.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetSpotPlacementScores.html
"""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response

from tests.engine.moto_extension.teaching import teach

# Types below which a score "will always be low".
FEW_TYPES = 3
LOW, HIGH = 1, 9


def install() -> None:
    """Put the action into moto's EC2."""
    teach(EC2Response, get_spot_placement_scores)


def scores(backend: Any) -> dict[str, int]:
    """Scores of a region that a test sets, by zone id."""
    found: dict[str, int] = backend.__dict__.setdefault("spot_placement_scores", {})
    return found


def get_spot_placement_scores(self: EC2Response) -> ActionResult:
    """GetSpotPlacementScores of this region or its zones, at most ten, the best first."""
    request = self._get_params()
    backend, region = self.ec2_backend, self.ec2_backend.region_name
    usual = HIGH if len(request.get("InstanceTypes", [])) >= FEW_TYPES else LOW
    if region not in request.get("RegionNames", [region]):
        return ActionResult({"SpotPlacementScores": []})
    zones = [zone.zone_id for zone in backend.describe_availability_zones()]
    found = [
        {"Region": region, "AvailabilityZoneId": zone_id, "Score": scores(backend).get(zone_id, usual)}
        for zone_id in zones
    ]
    if str(request.get("SingleAvailabilityZone")).lower() != "true":
        found = [{"Region": region, "Score": max(score["Score"] for score in found)}]
    return ActionResult({"SpotPlacementScores": sorted(found, key=lambda score: -score["Score"])[:10]})
