"""IPv4 arithmetic of the VPC, apart from the resources so that it is tested without an engine."""

from __future__ import annotations

import ipaddress

from bootstrap.contract.words import counted

# Network, router, DNS, future use, broadcast: https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html
AWS_RESERVED = 5
_SMALLEST_PREFIX = 28
# Zones of a region are numbered from 1 ("use1-az6"); no region has more than six so far.
ZONES = 7


def zone_slot(zone_id: str) -> int:
    """Index of a zone's range among ``ZONES`` ranges: 1 of "use1-az2".

    A fleet that moves makes subnets in the new zone before it leaves the old one, so each zone has its own range:
    https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html

    Raises:
        ValueError: not a zone id, or a number above ``ZONES``.
    """
    number = zone_id.rpartition("-az")[2]
    if not (number.isdecimal() and 1 <= int(number) <= ZONES):
        raise ValueError(f"zone {zone_id}: expected an id like use1-az1, numbered up to {ZONES}")
    return int(number) - 1


def subnet_ranges(vpc: ipaddress.IPv4Network, zones: int, addresses_per_zone: int) -> list[ipaddress.IPv4Network]:
    """Split ``vpc`` into equal ranges, as large as they can be: one a zone, and a last one left for ``service_ranges``.

    The last range stays free from the start: a subnet cannot shrink. ``addresses_per_zone`` is without AWS's five.

    Raises:
        ValueError: the ranges would be too small.
    """
    assert zones >= 1
    prefix = vpc.prefixlen + zones.bit_length()
    usable = 2 ** max(0, 32 - prefix) - AWS_RESERVED
    if prefix > _SMALLEST_PREFIX or usable < addresses_per_zone:
        raise ValueError(
            f"gpufleet:vpcCidr {vpc} split over {counted(zones, 'zone')} leaves "
            f"{counted(max(0, usable), 'address', 'addresses')} a zone "
            f"(/{prefix}), and {addresses_per_zone} are needed (nodes and endpoints; no subnet is smaller than "
            f"/{_SMALLEST_PREFIX}): set a larger range"
        )
    ranges = vpc.subnets(new_prefix=prefix)
    return [next(ranges) for _ in range(zones)]


def service_ranges(vpc: ipaddress.IPv4Network, zones: int, count: int) -> list[ipaddress.IPv4Network]:
    """The last ``count`` /28 ranges of ``vpc``, for subnets that hold no nodes; outside all of ``subnet_ranges``.

    Raises:
        ValueError: the nodes' subnets leave fewer.
    """
    free = 2 ** max(0, _SMALLEST_PREFIX - vpc.prefixlen - zones.bit_length())
    if vpc.prefixlen + zones.bit_length() > _SMALLEST_PREFIX or count > free:
        raise ValueError(
            f"gpufleet:vpcCidr {vpc} split over {counted(zones, 'zone')} leaves "
            f"{counted(free, 'range')} of /{_SMALLEST_PREFIX} for subnets "
            f"without nodes, and {count} are needed: set a larger range"
        )
    size, end = 2 ** (32 - _SMALLEST_PREFIX), int(vpc.broadcast_address) + 1
    return [ipaddress.IPv4Network((end - size * number, _SMALLEST_PREFIX)) for number in range(count, 0, -1)]
