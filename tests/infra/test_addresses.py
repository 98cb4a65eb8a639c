from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.addresses import AWS_RESERVED, subnet_ranges


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
        share = vpc.num_addresses // (1 << (zones - 1).bit_length())
        assert share - AWS_RESERVED < needed or share < 16
        assert str(vpc) in str(error)
        return
    assert len(found) == zones
    assert len({subnet.prefixlen for subnet in found}) == 1
    assert all(subnet.subnet_of(vpc) and 16 <= subnet.prefixlen <= 28 for subnet in found)
    assert all(subnet.num_addresses - AWS_RESERVED >= needed for subnet in found)
    assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])


def test_one_zone_gets_the_whole_range() -> None:
    vpc = ipaddress.IPv4Network("10.42.0.0/16")
    assert subnet_ranges(vpc, 1, 100) == [vpc]


def test_the_refusal_says_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/27 split over 2 zones leaves 11 addresses.*12 are needed"):
        subnet_ranges(ipaddress.IPv4Network("10.0.0.0/27"), 2, 12)
