from __future__ import annotations

import pytest

from optimizer.catalog.sources import offerings


@pytest.mark.parametrize(
    ("region", "prefix"),
    [
        ("us-east-1", "use1"),
        ("us-west-2", "usw2"),
        ("eu-central-2", "euc2"),
        ("ap-northeast-3", "apne3"),
        ("ap-southeast-5", "apse5"),
        ("ap-south-1", "aps1"),
        ("af-south-1", "afs1"),
        ("il-central-1", "ilc1"),
        ("us-gov-west-1", "usgw1"),
    ],
)
def test_zone_ids_begin_with_the_regions_short_form(region: str, prefix: str) -> None:
    assert offerings.zone_prefix(region) == prefix


def test_zones_are_sorted_once_each_and_local_zones_left_out() -> None:
    answer = [
        {"InstanceType": "g5.xlarge", "Location": "usw2-az2"},
        {"InstanceType": "g5.xlarge", "Location": "usw2-az1"},
        {"InstanceType": "g5.xlarge", "Location": "usw2-az1"},
        {"InstanceType": "g5.xlarge", "Location": "usw2-lax1-az1"},
        {"InstanceType": "g4dn.xlarge", "Location": "usw2-lax1-az1"},
        {"InstanceType": "p5.48xlarge", "Location": "use1-az1"},
    ]
    assert offerings.parse(answer, "us-west-2") == {"g5.xlarge": ("usw2-az1", "usw2-az2")}
