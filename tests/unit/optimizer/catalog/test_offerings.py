from __future__ import annotations

from optimizer.catalog.sources import offerings


def test_zones_are_sorted_once_each_and_local_zones_left_out() -> None:
    answer = [
        {"InstanceType": "g5.xlarge", "Location": "usw2-az2"},
        {"InstanceType": "g5.xlarge", "Location": "usw2-az1"},
        {"InstanceType": "g5.xlarge", "Location": "usw2-az1"},
        {"InstanceType": "g5.xlarge", "Location": "usw2-lax1-az1"},
        {"InstanceType": "g4dn.xlarge", "Location": "usw2-lax1-az1"},
    ]
    assert offerings.parse(answer) == {"g5.xlarge": ("usw2-az1", "usw2-az2")}
