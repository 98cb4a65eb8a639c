"""The nodes' network: private subnets, VPC endpoints to AWS services, and a NAT gateway where the user asks for one."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.component import ENDED_WITHIN, Component, Stack
from infra.places import alternates, declare_places
from infra.policies.resources import interface_endpoint_policy, s3_endpoint_policy
from infra.policies.statements import Policy
from infra.settings import ConfigError, StackSettings

VPC_RANGE = ipaddress.IPv4Network("10.42.0.0/16")
# Zones of a region are numbered from 1 ("use1-az6"); no region has more than six so far. Each has 8,192 addresses of
# its own, as a fleet that moves makes subnets in the new zone before it leaves the old one:
# https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html
ZONES = 7
# The last range has the subnets that hold no nodes, of the smallest size:
# https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html
_RANGES = list(VPC_RANGE.subnets(new_prefix=19))
_SMALL_RANGES = list(_RANGES[ZONES].subnets(new_prefix=28))
_NAT_RANGES, _ENDPOINT_RANGES = _SMALL_RANGES[-ZONES:], _SMALL_RANGES[-3 * ZONES : -2 * ZONES]


def zone_slot(zone_id: str) -> int:
    """Index of a zone's range among ``ZONES`` ranges: 1 of "use1-az2".

    Raises:
        ConfigError: not a zone id, or a number above ``ZONES``.
    """
    number = zone_id.rpartition("-az")[2]
    if not (number.isdecimal() and 1 <= int(number) <= ZONES):
        raise ConfigError(f"zone {zone_id}: expected an id like use1-az1, numbered up to {ZONES}")
    return int(number) - 1


def choose_zones(settings: StackSettings, account: Mapping[str, str]) -> list[str]:
    """Zone ids of the nodes' subnets: one for a gang or a reservation, else all of the plan's in the ``account``.

    EFA does not cross zones: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits
    """
    plan = settings.plan
    wanted = (settings.zone_id,) if settings.zone_id else plan.wanted_zone_ids
    if not wanted:
        offers = aws.ec2.get_instance_type_offerings(
            location_type="availability-zone-id", filters=[{"name": "instance-type", "values": [plan.instance_type]}]
        )
        wanted = tuple(sorted(offers.locations))
    chosen = [zone_id for zone_id in wanted if zone_id in account]
    if not chosen:
        raise ConfigError(
            f"{plan.instance_type} is wanted in zones {', '.join(wanted) or '(none offers it)'}, and this account has "
            f"{', '.join(sorted(account))} in {plan.region}: set gpufleet:zoneId, or choose another plan"
        )
    return chosen[:1] if settings.one_zone else chosen


def existing_subnets(settings: StackSettings) -> dict[str, aws.ec2.GetSubnetResult]:
    """Look up gpufleet:subnetIds by zone id; ConfigError for one in which no node starts, or a second one of a zone.

    A security group serves its own VPC alone: https://docs.aws.amazon.com/vpc/latest/userguide/vpc-security-groups.html
    """
    # The owner of a reservation knows its zone, which the catalog may not.
    plan, found = settings.plan, dict[str, aws.ec2.GetSubnetResult]()
    zones = () if plan.purchase.capacity_reservation_id else plan.zone_ids
    for subnet_id in settings.subnet_ids:
        subnet = aws.ec2.get_subnet(id=subnet_id)
        zone_id, fault = subnet.availability_zone_id, ""
        if subnet.vpc_id != settings.vpc_id:
            fault = f"in {subnet.vpc_id}, and gpufleet:vpcId is {settings.vpc_id}: give subnets of that VPC"
        elif zones and zone_id not in zones:
            fault = f"in {zone_id}, and the plan's nodes start in {', '.join(zones)}: give a subnet there"
        elif other := found.get(zone_id):
            fault = f"in {zone_id}, as {other.id} is: keep the larger one"
        if fault:
            raise ConfigError(f"{subnet_id} of gpufleet:subnetIds is {fault}")
        found[zone_id] = subnet
    return found


def _account_zones() -> dict[str, str]:
    """Names ("us-east-1a") of the region's zones by id; they differ between accounts."""
    # Local and Wavelength Zones have no cluster placement groups.
    regional: Any = {"name": "opt-in-status", "values": ["opt-in-not-required"]}
    available = aws.get_availability_zones(state="available", filters=[regional])
    return dict(zip(available.zone_ids, available.names, strict=True))


class Network(Component):
    """VPC with private subnets and endpoints, or an existing one; and the placement groups.

    Attributes:
        vpc_id: of the nodes.
        endpoint_group_id, s3_prefix_list_id: None in an existing VPC.
        places: by name; ``own_zones`` are the zone ids of the plan's own.
        subnets: subnet by zone id, those of the plan's alternates too.
        zone_name: zone of a fleet that runs in one zone, for a capacity reservation.
        placement_groups: cluster placement group by the number of a group of nodes; none for a lone node.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        settings = self._settings
        self.endpoint_group_id: pulumi.Output[str] | None = None
        self.s3_prefix_list_id: pulumi.Output[str] | None = None
        self.vpc_id: pulumi.Input[str]
        self.own_zones: list[str] = []
        self.subnets: dict[str, pulumi.Input[str]] = {}
        self._endpoint_subnets: dict[str, pulumi.Input[str]] = {}
        if settings.vpc_id:
            self.vpc_id = settings.vpc_id
            known = existing_subnets(settings)
            self.own_zones = list(known)
            self.zone_name = known[self.own_zones[0]].availability_zone
            self.subnets = {zone_id: subnet.id for zone_id, subnet in known.items()}
        else:
            self._account = _account_zones()
            self.own_zones = choose_zones(settings, self._account)
            self.zone_name = self._account[self.own_zones[0]]
            self._create()
        self.places = declare_places(settings, own_zones=self.own_zones, zones=set(self.subnets))
        self.placement_groups: dict[int, aws.ec2.PlacementGroup] = {}
        for place in self.places.values():
            # An existing reservation may belong to another placement group, and is then closed to this one:
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
            if settings.gang and not place.reservation_id:
                name = f"{self._prefix}-cluster" if place.number == 1 else f"{self._prefix}-cluster-{place.number}"
                shared = aws.ec2.PlacementGroup(name, strategy="cluster", tags=self._tags, opts=self._own)
                self.placement_groups |= {group.number: shared for group in place.groups}
        self.register_outputs({"vpc_id": self.vpc_id, "zone": self.zone_name})

    def _create(self) -> None:
        settings, prefix, tags = self._settings, self._prefix, self._tags
        vpc = aws.ec2.Vpc(
            f"{prefix}-vpc",
            cidr_block=str(VPC_RANGE),
            # The endpoints' private names need both.
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags=self._named(prefix),
            opts=self._own,
        )
        self.vpc_id = vpc.id
        # Adopted without rules, the VPC's default group lets nothing in or out.
        aws.ec2.DefaultSecurityGroup(f"{prefix}-default-group", vpc_id=vpc.id, tags=tags, opts=self._own)
        routes = aws.ec2.RouteTable(
            f"{prefix}-private", vpc_id=vpc.id, tags=self._named(f"{prefix}-private"), opts=self._own
        )
        wanted = [alternate.zone_id for alternate in alternates(settings)]
        wanted += [block.zone_id for block in settings.plan.purchase.blocks if block.zone_id]
        for zone in dict.fromkeys((*self.own_zones, *(zone for zone in wanted if zone in self._account))):
            self.subnets[zone] = self._subnet(zone, zone, _RANGES, routes)
        if settings.nat:
            self._nat(routes)
        # Free, and carries the checkpoints: https://docs.aws.amazon.com/vpc/latest/privatelink/gateway-endpoints.html
        reads = settings.read_prefixes
        s3 = s3_endpoint_policy(
            self._names, read_prefixes=reads, image_layers=bool(settings.image), internet=settings.nat
        )
        gateway = self._endpoint("s3", s3, vpc_endpoint_type="Gateway", route_table_ids=[routes.id])
        self.s3_prefix_list_id = gateway.prefix_list_id
        self._interface_endpoints(routes)

    def _subnet(
        self, name: str, zone: str, ranges: list[ipaddress.IPv4Network], routes: aws.ec2.RouteTable
    ) -> pulumi.Output[str]:
        name = f"{self._prefix}-{name}"
        subnet = aws.ec2.Subnet(
            name,
            vpc_id=self.vpc_id,
            availability_zone=self._account[zone],
            cidr_block=str(ranges[zone_slot(zone)]),
            map_public_ip_on_launch=False,
            tags=self._named(name),
            opts=pulumi.ResourceOptions(parent=self, custom_timeouts=ENDED_WITHIN),
        )
        aws.ec2.RouteTableAssociation(name, subnet_id=subnet.id, route_table_id=routes.id, opts=self._own)
        return subnet.id

    def _nat(self, private: aws.ec2.RouteTable) -> None:
        """Declare one NAT gateway, in the fleet's first zone: a second would cost more than traffic between zones.

        AWS's own services stay on the endpoints, whose routes and names come first.
        """
        prefix, vpc_id = self._prefix, self.vpc_id
        internet = aws.ec2.InternetGateway(
            f"{prefix}-internet", vpc_id=vpc_id, tags=self._named(prefix), opts=self._own
        )
        public = aws.ec2.RouteTable(
            f"{prefix}-public-routes", vpc_id=vpc_id, tags=self._named(f"{prefix}-public"), opts=self._own
        )
        anywhere: Any = {"destination_cidr_block": "0.0.0.0/0", "opts": self._own}
        out = aws.ec2.Route(f"{prefix}-public-routes", route_table_id=public.id, gateway_id=internet.id, **anywhere)
        address = aws.ec2.Eip(
            f"{prefix}-nat-address",
            domain="vpc",
            tags=self._named(f"{prefix}-nat"),
            # The internet gateway cannot be detached while the VPC has a public address.
            opts=self._after(internet),
        )
        gateway = aws.ec2.NatGateway(
            f"{prefix}-nat",
            allocation_id=address.id,
            subnet_id=self._subnet("public", self.own_zones[0], _NAT_RANGES, public),
            tags=self._named(prefix),
            # A change of zone replaces the gateway, and two gateways cannot share the address.
            opts=self._after(out, delete_before_replace=True),
        )
        aws.ec2.Route(f"{prefix}-private", route_table_id=private.id, nat_gateway_id=gateway.id, **anywhere)

    def _interface_endpoints(self, routes: aws.ec2.RouteTable) -> None:
        name = f"{self._prefix}-endpoints"
        group = aws.ec2.SecurityGroup(
            name,
            description="Interface endpoints: HTTPS from inside the VPC",
            vpc_id=self.vpc_id,
            tags=self._named(name),
            opts=self._own,
        )
        self._rule(
            aws.vpc.SecurityGroupIngressRule,
            "endpoints-https",
            group.id,
            "HTTPS from inside the VPC",
            cidr_ipv4=str(VPC_RANGE),
        )
        self.endpoint_group_id = group.id
        for service in self._settings.own_endpoints:
            self._endpoint(
                service,
                interface_endpoint_policy(self._names, service),
                vpc_endpoint_type="Interface",
                private_dns_enabled=True,
                # A second subnet would double the hourly price.
                subnet_ids=[self._endpoint_subnet(service, routes)],
                security_group_ids=[group.id],
            )

    def _endpoint_subnet(self, service: str, routes: aws.ec2.RouteTable) -> pulumi.Input[str]:
        """Subnet for an endpoint: the nodes' in their first zone that has the service, else a small one elsewhere.

        Services lack zones, and AWS refuses an endpoint there; calls of other zones cross over:
        https://docs.aws.amazon.com/vpc/latest/privatelink/create-interface-endpoint.html
        https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeVpcEndpointServices.html
        """
        name = f"com.amazonaws.{self._names.region}.{service}"
        offered = aws.ec2.get_vpc_endpoint_service(service_name=name, service_type="Interface").availability_zones
        zone = next((zone for zone in (*self.own_zones, *self._account) if self._account[zone] in offered), None)
        if zone is None:
            raise ConfigError(
                f"no zone of {self._names.region} in this account has {name} (it is in {', '.join(offered) or 'none'})"
                ", and nodes without a way out need it: choose another region, or an existing VPC (gpufleet:vpcId)"
            )
        known = self.subnets if zone in self.own_zones else self._endpoint_subnets
        if zone not in known:
            known[zone] = self._subnet(f"endpoints-{zone}", zone, _ENDPOINT_RANGES, routes)
        return known[zone]

    def _endpoint(self, service: str, policy: Policy, **arguments: Any) -> aws.ec2.VpcEndpoint:
        name = f"{self._prefix}-{service}"
        return aws.ec2.VpcEndpoint(
            name,
            vpc_id=self.vpc_id,
            service_name=f"com.amazonaws.{self._names.region}.{service}",
            policy=json.dumps(policy),
            tags=self._named(name),
            opts=self._own,
            **arguments,
        )
