"""Where the nodes run: private subnets without a way to or from the internet, and private doors to the AWS services."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.addresses import subnet_ranges
from infra.config import ConfigError, Settings
from infra.naming import Names
from optimizer.plan import INTERFACE_ENDPOINTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """One availability zone as this account sees it ("us-east-1a" is another zone in another account)."""

    name: str
    id: str


def choose_zones(settings: Settings) -> list[Zone]:
    """Zones to put subnets in: one for a fleet that trains together or has a reservation, else all of the plan's.

    Traffic between zones is slow and billed by the GB, and EFA does not cross them:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits

    Raises:
        ConfigError: none of the plan's zones is open to this account, or no zone offers the type.
    """
    plan = settings.plan
    wanted = (settings.zone_id,) if settings.zone_id else plan.zone_ids
    available = aws.get_availability_zones(
        state="available",
        # Leaves out Local and Wavelength Zones, which have no cluster placement groups.
        filters=[aws.GetAvailabilityZonesFilterArgs(name="opt-in-status", values=["opt-in-not-required"])],
    )
    zones = {
        zone_id: Zone(name=name, id=zone_id) for name, zone_id in zip(available.names, available.zone_ids, strict=True)
    }
    if not wanted:
        offers = aws.ec2.get_instance_type_offerings(
            location_type="availability-zone-id",
            filters=[aws.ec2.GetInstanceTypeOfferingsFilterArgs(name="instance-type", values=[plan.instance_type])],
        )
        wanted = tuple(sorted(offers.locations))
    found = [zones[zone_id] for zone_id in wanted if zone_id in zones]
    if not found:
        raise ConfigError(
            f"{plan.instance_type} is wanted in zones {', '.join(wanted) or '(none offers it)'}, and this account has "
            f"{', '.join(sorted(zones))} in {plan.region}: set gpufleet:zoneId, or choose another plan"
        )
    single = settings.gang or plan.purchase.option == "reserved"
    return found[:1] if single else found


@dataclass(frozen=True, kw_only=True)
class NetworkArgs:
    """What the network is for."""

    settings: Settings
    names: Names
    tags: dict[str, str]


class Network(pulumi.ComponentResource):
    """VPC with private subnets and endpoints, or an existing one; and the placement group.

    Attributes:
        vpc_id, subnet_ids: where the nodes go.
        zone_name: the one zone of a fleet that has one, for a capacity reservation.
        endpoint_group_id: security group of the interface endpoints; None in an existing VPC.
        s3_prefix_list_id: S3's addresses in this region; None in an existing VPC.
        placement_group: cluster placement group; None for a lone node.
    """

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpufleet:infra:Network", name, None, opts)
        settings = args.settings
        self._args = args
        self._own = pulumi.ResourceOptions(parent=self)
        self.endpoint_group_id: pulumi.Output[str] | None = None
        self.s3_prefix_list_id: pulumi.Output[str] | None = None
        self.vpc_id: pulumi.Input[str]
        self.subnet_ids: list[pulumi.Input[str]]
        if settings.vpc_id:
            self.vpc_id = settings.vpc_id
            self.subnet_ids = list(settings.subnet_ids)
            self.zone_name = aws.ec2.get_subnet(id=settings.subnet_ids[0]).availability_zone
        else:
            zones = choose_zones(settings)
            self.zone_name = zones[0].name
            self._create(zones)
        self.placement_group = self._placement_group()
        self.register_outputs({"vpc_id": self.vpc_id, "subnet_ids": self.subnet_ids, "zone": self.zone_name})

    def _create(self, zones: list[Zone]) -> None:
        args, plan = self._args, self._args.settings.plan
        prefix, tags = args.names.prefix, args.tags
        # Only a node's first interface has an address (the other EFA cards are efa-only), twice over for replacements
        # that start while their predecessors stop; endpoints take one each in the first subnet.
        ranges = subnet_ranges(args.settings.vpc_cidr, len(zones), 2 * plan.node_count + len(INTERFACE_ENDPOINTS))
        vpc = aws.ec2.Vpc(
            f"{prefix}-vpc",
            cidr_block=str(args.settings.vpc_cidr),
            # Both are needed for the endpoints' private names.
            enable_dns_support=True,
            enable_dns_hostnames=True,
            tags={**tags, "Name": prefix},
            opts=self._own,
        )
        # A VPC's default group lets its members talk to each other and out; adopted without rules, it lets nothing.
        aws.ec2.DefaultSecurityGroup(f"{prefix}-default-group", vpc_id=vpc.id, tags=tags, opts=self._own)
        routes = aws.ec2.RouteTable(
            f"{prefix}-private", vpc_id=vpc.id, tags={**tags, "Name": f"{prefix}-private"}, opts=self._own
        )
        subnets = []
        for zone, addresses in zip(zones, ranges, strict=True):
            subnet = aws.ec2.Subnet(
                f"{prefix}-{zone.id}",
                vpc_id=vpc.id,
                availability_zone=zone.name,
                cidr_block=str(addresses),
                map_public_ip_on_launch=False,
                tags={**tags, "Name": f"{prefix}-{zone.id}"},
                opts=self._own,
            )
            aws.ec2.RouteTableAssociation(
                f"{prefix}-{zone.id}", subnet_id=subnet.id, route_table_id=routes.id, opts=self._own
            )
            subnets.append(subnet)
        self.vpc_id = vpc.id
        self.subnet_ids = [subnet.id for subnet in subnets]
        self._endpoints(vpc, routes, subnets[0])

    def _endpoints(self, vpc: aws.ec2.Vpc, routes: aws.ec2.RouteTable, subnet: aws.ec2.Subnet) -> None:
        prefix, tags, region = self._args.names.prefix, self._args.tags, self._args.names.region
        # Free, and carries the checkpoints: https://docs.aws.amazon.com/vpc/latest/privatelink/gateway-endpoints.html
        s3 = aws.ec2.VpcEndpoint(
            f"{prefix}-s3",
            vpc_id=vpc.id,
            service_name=f"com.amazonaws.{region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            tags={**tags, "Name": f"{prefix}-s3"},
            opts=self._own,
        )
        self.s3_prefix_list_id = s3.prefix_list_id
        group = aws.ec2.SecurityGroup(
            f"{prefix}-endpoints",
            description="Interface endpoints: HTTPS from inside the VPC",
            vpc_id=vpc.id,
            tags={**tags, "Name": f"{prefix}-endpoints"},
            opts=self._own,
        )
        aws.vpc.SecurityGroupIngressRule(
            f"{prefix}-endpoints-https",
            security_group_id=group.id,
            description="HTTPS from inside the VPC",
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            cidr_ipv4=str(self._args.settings.vpc_cidr),
            tags=tags,
            opts=self._own,
        )
        self.endpoint_group_id = group.id
        for service in INTERFACE_ENDPOINTS:
            aws.ec2.VpcEndpoint(
                f"{prefix}-{service}",
                vpc_id=vpc.id,
                service_name=f"com.amazonaws.{region}.{service}",
                vpc_endpoint_type="Interface",
                private_dns_enabled=True,
                # One subnet serves the whole VPC: a second would double the hourly price for the same few calls.
                subnet_ids=[subnet.id],
                security_group_ids=[group.id],
                tags={**tags, "Name": f"{prefix}-{service}"},
                opts=self._own,
            )

    def _placement_group(self) -> aws.ec2.PlacementGroup | None:
        args = self._args
        # An existing reservation may belong to a placement group of its owner's; instances of another group could not
        # use it: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
        if not args.settings.gang or args.settings.plan.purchase.capacity_reservation_id:
            return None
        return aws.ec2.PlacementGroup(
            f"{args.names.prefix}-cluster", strategy="cluster", tags=args.tags, opts=self._own
        )
