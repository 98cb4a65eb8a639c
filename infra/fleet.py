"""The nodes of a stack: a group for each place (place_group.py), and what these share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pulumi
import pulumi_aws as aws

from infra.component import Component, Stack
from infra.images import Image
from infra.place_group import PlaceGroup, PlaceGroupArgs
from infra.places import DeclaredPlace
from infra.user_data import NodeFacts, user_data


@dataclass(frozen=True, kw_only=True)
class FleetArgs:
    """Arguments of Fleet: the nodes' image, files, permissions and places."""

    image: Image
    bundle_sha256: str
    bundle_key: pulumi.Input[str]
    train_archive: pulumi.Input[str]
    bucket: pulumi.Input[str]
    log_group: pulumi.Input[str]
    key_arn: pulumi.Input[str]
    service_role_arn: pulumi.Input[str]
    instance_profile_arn: pulumi.Input[str]
    node_group_id: pulumi.Input[str]
    places: Mapping[str, DeclaredPlace]
    subnets: Mapping[str, pulumi.Input[str]]
    zone_name: str
    placement_groups: Mapping[int, aws.ec2.PlacementGroup]
    lustre: pulumi.Input[str] = ""


class Fleet(Component):
    """The groups of the places, and a capacity reservation where the plan buys one."""

    def __init__(self, stack: Stack, args: FleetArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(stack, opts)
        self._args, self._plan = args, stack.settings.plan
        self.capacity_reservation_id = self._reservation()
        names = stack.names
        node_facts: pulumi.Output[NodeFacts] = pulumi.Output.all(
            bucket=args.bucket,
            bundle_key=args.bundle_key,
            train_archive=args.train_archive,
            key_arn=args.key_arn,
            log_group=args.log_group,
            lustre=args.lustre,
        ).apply(
            lambda known: NodeFacts(
                ami_kind=args.image.kind, bundle_sha256=args.bundle_sha256, group=names.group, **known
            )
        )
        groups = {
            group.number: self._place_group(stack, node_facts, place, group)
            for place in args.places.values()
            for group in place.groups
        }
        self.group_names = [group.name for group in groups.values()]
        self.group_name, self.launch_template_id = groups[1].name, groups[1].launch_template_id
        self.register_outputs({"group_name": self.group_name})

    def _place_group(
        self,
        stack: Stack,
        facts: pulumi.Output[NodeFacts],
        place: DeclaredPlace,
        own: DeclaredPlace,
    ) -> PlaceGroup:
        """Declare the ``own`` group of a place."""
        args, settings, names = self._args, stack.settings, stack.names
        # The stack's own reservation has no other group.
        made = None if self._plan.purchase.capacity_reservation_id else self.capacity_reservation_id
        numbers = [own.number, *(group.number for group in place.groups if group.number != own.number)]
        groups = ",".join(names.groups[number - 1] for number in numbers)
        text = facts.apply(lambda known: user_data(settings, names, replace(known, group=groups)))
        return PlaceGroup(
            stack,
            PlaceGroupArgs(
                place=own,
                image=args.image,
                user_data=text,
                key_arn=args.key_arn,
                service_role_arn=args.service_role_arn,
                instance_profile_arn=args.instance_profile_arn,
                node_group_id=args.node_group_id,
                subnet_ids=[args.subnets[zone_id] for zone_id in place.zone_ids],
                placement_group=args.placement_groups.get(place.number),
                capacity_reservation_id=own.reservation_id or (made if own.number == 1 else None),
            ),
            self._own,
        )

    def _reservation(self) -> pulumi.Input[str] | None:
        args, plan = self._args, self._plan
        if plan.purchase.capacity_reservation_id:
            return plan.purchase.capacity_reservation_id
        if plan.purchase.option != "reserved":
            return None
        # Billed until destroyed, used or not. In the placement group, as its instances use no capacity from outside:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
        reservation = aws.ec2.CapacityReservation(
            f"{self._prefix}-nodes",
            instance_type=plan.instance_type,
            instance_count=plan.node_count,
            instance_platform="Linux/UNIX",
            availability_zone=args.zone_name,
            ebs_optimized=True,
            instance_match_criteria="targeted",
            end_date_type="unlimited",
            placement_group_arn=args.placement_groups[1].arn if args.placement_groups else None,
            tags=self._named(self._names.group),
            opts=self._own,
        )
        return reservation.id
