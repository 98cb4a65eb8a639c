"""IPv4 arithmetic of the VPC, apart from the resources so that it is tested without an engine."""

from __future__ import annotations

import ipaddress

# Network, router, DNS, future use, broadcast: https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html
AWS_RESERVED = 5
_SMALLEST_PREFIX = 28


def subnet_ranges(vpc: ipaddress.IPv4Network, zones: int, addresses_per_zone: int) -> list[ipaddress.IPv4Network]:
    """Split ``vpc`` into ``zones`` equal ranges, as large as they can be.

    Args:
        vpc: range of the VPC, /16 to /28.
        zones: number of ranges, 1 or more.
        addresses_per_zone: addresses each must hold besides the five AWS keeps.

    Raises:
        ValueError: the ranges would be too small.
    """
    assert zones >= 1
    prefix = vpc.prefixlen + (zones - 1).bit_length()
    usable = 2 ** max(0, 32 - prefix) - AWS_RESERVED
    if prefix > _SMALLEST_PREFIX or usable < addresses_per_zone:
        raise ValueError(
            f"gpufleet:vpcCidr {vpc} split over {zones} zones leaves {max(0, usable)} addresses a zone "
            f"(/{prefix}), and {addresses_per_zone} are needed (nodes and endpoints; no subnet is smaller than "
            f"/{_SMALLEST_PREFIX}): set a larger range"
        )
    ranges = vpc.subnets(new_prefix=prefix)
    return [next(ranges) for _ in range(zones)]
