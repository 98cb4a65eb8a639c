"""EC2 NAT gateways that take their network interface along; moto 5.2 leaves it behind.

https://docs.aws.amazon.com/vpc/latest/userguide/nat-gateway-working-with.html
"""

from __future__ import annotations

from typing import Any

from moto.ec2.models.nat_gateways import NatGateway, NatGatewayBackend

_delete = NatGatewayBackend.delete_nat_gateway


def install() -> None:
    """Put the method into moto's EC2."""
    NatGatewayBackend.delete_nat_gateway = delete_nat_gateway  # type: ignore[method-assign]


def delete_nat_gateway(self: Any, nat_gateway_id: str) -> NatGateway:
    """Delete the gateway; its address stays allocated, and is billed."""
    gateway = _delete(self, nat_gateway_id)
    for address in self.describe_addresses():
        if address.eni is gateway._eni:
            self.disassociate_address(association_id=address.association_id)
    gateway._eni.attachment_id = None
    self.delete_network_interface(gateway._eni.id)
    return gateway
