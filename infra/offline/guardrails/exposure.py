"""Rules on reach: nothing is public, no traffic from outside the VPC, a node's credentials stay on the node."""

from __future__ import annotations

import ipaddress

from infra.offline.guardrails.declared import Breaches, Declared

_EVERYWHERE = frozenset({"0.0.0.0/0", "::/0"})
_HTTPS = ("tcp", 443, 443)
# An existing VPC may have its own. The stack's own VPC has Amazon's, which security groups do not filter.
_NAME_SERVERS = (("tcp", 53, 53), ("udp", 53, 53))
_PUBLIC_ACCESS_SWITCHES = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")


def metadata_needs_a_token(declared: Declared) -> Breaches:
    """IMDSv2 with one hop: no forged request and no container reads a role's credentials."""
    for template in declared.all("LaunchTemplate"):
        options = template.inputs.get("metadataOptions") or {}
        if options.get("httpTokens") != "required":
            yield template, f"has metadataOptions.httpTokens {options.get('httpTokens')!r}, not 'required'"
        if options.get("httpPutResponseHopLimit") != 1:
            yield (
                template,
                f"has metadataOptions.httpPutResponseHopLimit {options.get('httpPutResponseHopLimit')}, not 1",
            )


def nothing_is_public(declared: Declared) -> Breaches:
    """No public address, no traffic in from outside the VPC, no public bucket or function; no SSH key."""
    yield from _public_addresses(declared)
    yield from _ingress(declared)
    yield from _egress(declared)
    for bucket in declared.all("Bucket"):
        blocks = declared.referring("BucketPublicAccessBlock", "bucket", bucket)
        if not any(all(block.get(switch) is True for switch in _PUBLIC_ACCESS_SWITCHES) for block in blocks):
            yield bucket, "does not block public access by all four switches"
    for url in declared.all("FunctionUrl"):
        yield url, "gives a function an address on the internet"


def _public_addresses(declared: Declared) -> Breaches:
    for subnet in declared.all("Subnet"):
        if subnet.inputs.get("mapPublicIpOnLaunch") is not False:
            yield subnet, "gives its instances public addresses"
    for template in declared.all("LaunchTemplate"):
        cards = template.inputs.get("networkInterfaces", [])
        if any(str(card.get("associatePublicIpAddress")) == "true" for card in cards):
            yield template, "gives its instances public addresses"
        if template.inputs.get("keyName"):
            yield template, "has an SSH key; use Session Manager"
    for key in declared.all("KeyPair"):
        yield key, "is an SSH key; use Session Manager"
    if not declared.all("NatGateway"):
        for resource in declared.all("Eip", "InternetGateway"):
            yield resource, "is reachable from the internet, and there is no NAT gateway that needs it"
    # A subnet whose route table leads to an internet gateway is for the NAT gateway alone.
    tables = {route.inputs["routeTableId"] for route in declared.all("Route") if route.inputs.get("gatewayId")}
    associations = [association.inputs for association in declared.all("RouteTableAssociation")]
    public = {given["subnetId"] for given in associations if given["routeTableId"] in tables}
    for user in declared.all("Group", "NodeGroup", "Cluster", "VpcEndpoint"):
        network = user.inputs.get("vpcConfig") or {}
        used = user.inputs.get("vpcZoneIdentifiers") or user.inputs.get("subnetIds") or network.get("subnetIds") or []
        if public & set(used):
            yield user, "is in a subnet with a route to the internet gateway"


def _ingress(declared: Declared) -> Breaches:
    own = [ipaddress.IPv4Network(vpc.inputs["cidrBlock"]) for vpc in declared.all("Vpc")]
    for group in declared.all("SecurityGroup", "DefaultSecurityGroup"):
        if group.inputs.get("ingress") or group.inputs.get("egress"):
            yield group, "has inline rules, which this check does not read"
    for rule in declared.all("SecurityGroupIngressRule"):
        if rule.inputs.get("cidrIpv6") or rule.inputs.get("prefixListId"):
            yield rule, "lets in traffic from outside the VPC"
        cidr = rule.inputs.get("cidrIpv4")
        if cidr and not any(ipaddress.IPv4Network(cidr).subnet_of(vpc) for vpc in own):
            yield rule, f"lets in {cidr}, which is outside the VPC"


def _egress(declared: Declared) -> Breaches:
    # The owner of an existing VPC bounds the traffic out of it.
    may_leave = bool(declared.all("NatGateway")) or not declared.all("Vpc")
    for rule in declared.all("SecurityGroupEgressRule"):
        if not {rule.inputs.get("cidrIpv4"), rule.inputs.get("cidrIpv6")} & _EVERYWHERE:
            continue
        ports = tuple(rule.inputs.get(argument) for argument in ("ipProtocol", "fromPort", "toPort"))
        if not may_leave:
            yield rule, "lets nodes reach any address, and the user asked for no NAT gateway"
        if ports != _HTTPS and (declared.all("Vpc") or ports not in _NAME_SERVERS):
            yield rule, f"lets nodes reach any address by {ports}; only HTTPS may"
