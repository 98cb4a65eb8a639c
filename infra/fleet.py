"""The nodes of a stack: a group for each place (place_group.py), and what these share."""

from __future__ import annotations

from dataclasses import replace

import pulumi
import pulumi_aws as aws

from infra.component import Component, Stack
from infra.images import Image
from infra.lustre import Lustre
from infra.network import Network
from infra.observability import Observability
from infra.place_group import PlaceGroup
from infra.places import DeclaredPlace
from infra.security import Security
from infra.storage import Storage
from infra.user_data import NodeFacts, user_data


class Fleet(Component):
    """The groups of the places, and a capacity reservation where the plan buys one."""

    def __init__(
        self,
        stack: Stack,
        image: Image,
        network: Network,
        security: Security,
        storage: Storage,
        observability: Observability,
        lustre: Lustre | None,
    ) -> None:
        # A node needs its endpoints, permissions and files from its start to its end.
        needed = [network, security, *storage.node_files, *filter(None, [lustre])]
        super().__init__(stack, pulumi.ResourceOptions(depends_on=needed))
        settings, names, plan = stack.settings, stack.names, stack.settings.plan
        self.capacity_reservation_id = plan.purchase.capacity_reservation_id or self._reservation(network)
        facts: pulumi.Output[NodeFacts] = pulumi.Output.all(
            bucket=storage.bucket,
            bundle_key=storage.bundle_key,
            train_archive=storage.train_archive,
            key_arn=security.key_arn,
            log_group=observability.log_group,
            lustre=lustre.address if lustre else "",
        ).apply(lambda known: NodeFacts(ami_kind=image.kind, group=names.group, **known))

        def place_group(place: DeclaredPlace, group: DeclaredPlace) -> PlaceGroup:
            # The stack's own reservation has no other group.
            made = None if plan.purchase.capacity_reservation_id else self.capacity_reservation_id
            numbers = [group.number, *(other.number for other in place.groups if other.number != group.number)]
            groups = ",".join(names.groups[number - 1] for number in numbers)
            return PlaceGroup(
                stack,
                group,
                image,
                facts.apply(lambda known: user_data(settings, names, replace(known, group=groups))),
                network,
                security,
                group.reservation_id or (made if group.number == 1 else None),
                self._own,
            )

        places = network.places.values()
        groups = {group.number: place_group(place, group) for place in places for group in place.groups}
        self.group_name, self.launch_template_id = groups[1].name, groups[1].launch_template_id
        self.register_outputs({"group_name": self.group_name})

    def _reservation(self, network: Network) -> pulumi.Output[str] | None:
        plan = self._settings.plan
        if plan.purchase.option != "reserved":
            return None
        # Billed until destroyed, used or not. In the placement group, as its instances use no capacity from outside:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
        reservation = aws.ec2.CapacityReservation(
            f"{self._prefix}-nodes",
            instance_type=plan.instance_type,
            instance_count=plan.node_count,
            instance_platform="Linux/UNIX",
            availability_zone=network.zone_name,
            ebs_optimized=True,
            instance_match_criteria="targeted",
            end_date_type="unlimited",
            placement_group_arn=network.placement_groups[1].arn if network.placement_groups else None,
            tags=self._named(self._names.group),
            opts=self._own,
        )
        return reservation.id
