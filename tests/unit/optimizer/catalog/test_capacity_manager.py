"""EC2 Capacity Manager's counts, answered by botocore's Stubber, in the hazard that a plan has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from bootstrap.contract.capacity import PoolEvents
from optimizer.catalog import load
from optimizer.catalog.snapshot import keep_events
from optimizer.catalog.sources import capacity_manager
from optimizer.search.purchases import pool_hazard

NOW = datetime.now(UTC)
POOL = "us-east-1/use1-az1/p4d.24xlarge/spot"


def point(ago: int, used: float, interrupted: float, name: str = "p4d.24xlarge", zone: str = "use1-az1") -> Any:
    values = {capacity_manager.USAGE_HOURS: used, capacity_manager.INTERRUPTIONS: interrupted}
    return {
        "Dimension": {"ResourceRegion": "us-east-1", "AvailabilityZoneId": zone, "InstanceType": name},
        "Timestamp": NOW - timedelta(hours=ago),
        "MetricValues": [{"Metric": metric, "Value": value} for metric, value in values.items()],
    }


@pytest.mark.parametrize("status", ["enabled", "disabled"])
def test_only_an_account_that_enabled_it_has_data(status: str) -> None:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    with Stubber(client) as stubber:
        stubber.add_response("get_capacity_manager_attributes", {"CapacityManagerStatus": status})
        assert capacity_manager.is_enabled(client) == (status == "enabled")


def test_hours_and_interruptions_are_counted_by_pool_over_all_pages() -> None:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    first = [point(3, 4, 0), point(3, 8, 1, name="m5.large"), point(3, 0, 0, zone="use1-az2")]
    with Stubber(client) as stubber:
        stubber.add_response("get_capacity_manager_metric_data", {"MetricDataResults": first, "NextToken": "more"})
        second = [point(2, 3.5, 4), point(1, 0.5, 0)]
        stubber.add_response("get_capacity_manager_metric_data", {"MetricDataResults": second})
        points = capacity_manager.fetch(client, NOW)
    found = capacity_manager.parse(points, {"p4d.24xlarge"})
    first_at, last_at = NOW - timedelta(hours=3), NOW
    # Four nodes that go together are one reclaim of their gang.
    events = PoolEvents(first_at=first_at, last_at=last_at, asked=1, reclaimed=4, reclaims=1, node_hours=8.0, hours=2.5)
    assert found == {POOL: events}


def test_the_accounts_rate_takes_the_bands_place_as_it_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def hazard() -> Any:
        offer = load().offer("p4d.24xlarge", "us-east-1")
        assert offer is not None
        return pool_hazard(offer, "use1-az1")

    band = hazard()
    own = PoolEvents(first_at=NOW, last_at=NOW, asked=1, reclaims=10**6, node_hours=10**7, hours=10**7)
    keep_events("own", "", {POOL: own}, now=NOW)
    known = hazard()
    assert known.rate_per_node_hour == pytest.approx(0.1, rel=0.05) and known.wait_hours == band.wait_hours
    assert "Spot Advisor band" in known.source and "learned from EC2 Capacity Manager, " in known.source
    # Capacity Manager has counted a stack's reclaims already: of what the stack saw, only the waits are new.
    seen = PoolEvents(first_at=NOW, last_at=NOW, asked=1, reclaims=500, node_hours=9, hours=9, returns=9, empty_hours=2)
    keep_events("s3://stack", "dev", {POOL: seen}, now=NOW)
    both = hazard()
    assert both.rate_per_node_hour == pytest.approx(known.rate_per_node_hour)
    assert both.wait_hours < known.wait_hours and "EC2 Capacity Manager, stack dev" in both.source
    # Nodes that EC2 took back since Capacity Manager was last read count.
    more = PoolEvents(first_at=NOW, last_at=NOW, asked=1, reclaims=10**6, node_hours=10**6, hours=10**6)
    keep_events("s3://stack", "dev", {POOL: more}, now=NOW + timedelta(days=1))
    assert hazard().rate_per_node_hour > 1.5 * known.rate_per_node_hour
