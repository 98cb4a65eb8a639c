from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.addresses import AWS_RESERVED, service_ranges, subnet_ranges, zone_slot


@given(
    prefix=st.integers(16, 28), base=st.integers(0, 2**32 - 1), zones=st.integers(1, 20), needed=st.integers(1, 70_000)
)
def test_ranges_are_inside_apart_equal_and_large_enough_or_refused(
    prefix: int, base: int, zones: int, needed: int
) -> None:
    vpc = ipaddress.IPv4Network((base, prefix), strict=False)
    try:
        found = subnet_ranges(vpc, zones, needed)
    except ValueError as error:
        # Refused only where equal ranges of a power of two really cannot hold that many, or AWS's /28 is undercut.
        share = vpc.num_addresses // (1 << zones.bit_length())
        assert share - AWS_RESERVED < needed or share < 16
        assert str(vpc) in str(error)
        return
    assert len(found) == zones
    assert len({subnet.prefixlen for subnet in found}) == 1
    assert all(subnet.subnet_of(vpc) and 16 <= subnet.prefixlen <= 28 for subnet in found)
    assert all(subnet.num_addresses - AWS_RESERVED >= needed for subnet in found)
    assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])


def test_one_zone_gets_half_and_three_zones_a_quarter_each() -> None:
    vpc = ipaddress.IPv4Network("10.42.0.0/16")
    assert list(map(str, subnet_ranges(vpc, 1, 100))) == ["10.42.0.0/17"]
    assert list(map(str, subnet_ranges(vpc, 3, 100))) == ["10.42.0.0/18", "10.42.64.0/18", "10.42.128.0/18"]
    assert list(map(str, service_ranges(vpc, 3, 2))) == ["10.42.255.224/28", "10.42.255.240/28"]


@given(prefix=st.integers(16, 28), zones=st.integers(1, 20), count=st.integers(1, 5))
def test_service_ranges_are_apart_from_the_nodes_or_refused(prefix: int, zones: int, count: int) -> None:
    vpc = ipaddress.IPv4Network((0x0A2A0000, prefix))
    try:
        found = service_ranges(vpc, zones, count)
    except ValueError as error:
        share = vpc.num_addresses // (1 << zones.bit_length())
        assert share < 16 * count
        assert str(vpc) in str(error)
        return
    everything = found + subnet_ranges(vpc, zones, 1)
    assert len(found) == count
    assert all(each.subnet_of(vpc) for each in everything)
    assert not any(a.overlaps(b) for i, a in enumerate(everything) for b in everything[:i])


def test_the_refusal_says_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/26 split over 2 zones leaves 11 addresses.*12 are needed"):
        subnet_ranges(ipaddress.IPv4Network("10.0.0.0/26"), 2, 12)
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/26 split over 2 zones leaves 1 range of /28.*3 are needed"):
        service_ranges(ipaddress.IPv4Network("10.0.0.0/26"), 2, 3)


def test_a_zone_has_its_own_range_whatever_other_zones_there_are() -> None:
    assert [zone_slot(f"use1-az{number}") for number in (1, 2, 6)] == [0, 1, 5]
    for wrong in ("use1-az0", "use1-az8", "us-east-1a", ""):
        with pytest.raises(ValueError, match="expected an id like use1-az1"):
            zone_slot(wrong)
