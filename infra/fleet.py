"""The nodes: the launch template of one, and the Auto Scaling group of as many as the plan has."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.component import METADATA_OPTIONS, Component, ComponentArgs, launch_tags
from infra.images import Image
from infra.user_data import NodeFacts, environment, user_data
from optimizer.plan import Node

# Time limit of a node's health checks and smoke test, s: booting 2 TiB of memory, mounting NVMe and, where the image
# lacks them, installing driver, CUDA and EFA takes up to half an hour. Heartbeats of the bootstrap extend it.
LAUNCH_TIMEOUT_S = 1800
# The launch hook has proven the node, so a failed status check counts soon after.
HEALTH_CHECK_GRACE_S = 60
# Time from entering service, which follows the launch hook, to work that the metrics show, s: model and data load, then
# two samples a minute apart.
WARMUP_S = 300


@dataclass(frozen=True, kw_only=True)
class FleetArgs(ComponentArgs):
    """Arguments of Fleet: the nodes' image, files, permissions and place."""

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
    subnet_ids: list[pulumi.Input[str]]
    zone_name: str
    placement_group: aws.ec2.PlacementGroup | None
    node_config: pulumi.Input[str] = ""


def interfaces(node: Node, security_group_id: pulumi.Input[str]) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
    """One interface a network card: card 0 carries IP and, where it can, EFA; the others EFA only, without an address.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    cards = range(node.network_cards if node.efa_cards else 1)
    # One card more than EFA interfaces: card 0 has no EFA, as DescribeInstanceTypes says of p6-b300.48xlarge.
    first = "efa" if node.efa_cards == node.network_cards else "interface"
    return [
        aws.ec2.LaunchTemplateNetworkInterfaceArgs(
            network_card_index=card,
            device_index=0 if card == 0 else 1,
            interface_type=first if card == 0 else "efa-only",
            # EC2 takes this argument for a single interface only, and gives no public address to several:
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-instance-addressing.html
            associate_public_ip_address="false" if len(cards) == 1 else None,
            delete_on_termination="true",
            security_groups=[security_group_id],
        )
        for card in cards
    ]


class Fleet(Component):
    """Launch template, Auto Scaling group with its lifecycle hooks, and a capacity reservation where the plan buys one.

    The group starts without a node; the controller, which meters them, sets their number (infra/controller.py).

    Attributes:
        group_name: the Auto Scaling group.
        launch_template_id: the template.
        environment: variables of the nodes' node.env.
        capacity_reservation_id: the reservation the nodes run in; None without one.
    """

    def __init__(self, name: str, args: FleetArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(name, args, opts)
        self._args, self._plan = args, args.settings.plan
        self.capacity_reservation_id = self._reservation()
        settings, names = args.settings, args.names

        def facts(known: Mapping[str, str]) -> NodeFacts:
            return NodeFacts(ami_kind=args.image.kind, bundle_sha256=args.bundle_sha256, **known)

        def encoded(known: list[Any]) -> str:
            known_facts, node_config = known
            return base64.b64encode(user_data(settings, names, known_facts, node_config).encode()).decode()

        node_facts: pulumi.Output[NodeFacts] = pulumi.Output.all(
            bucket=args.bucket,
            bundle_key=args.bundle_key,
            train_archive=args.train_archive,
            key_arn=args.key_arn,
            log_group=args.log_group,
        ).apply(facts)
        self.environment = node_facts.apply(lambda known: environment(settings, names, known))
        template = self._template(pulumi.Output.all(node_facts, args.node_config).apply(encoded))
        group = self._group(template)
        self.group_name = group.name
        self.launch_template_id = template.id
        self.register_outputs({"group_name": self.group_name})

    def _reservation(self) -> pulumi.Input[str] | None:
        args, plan = self._args, self._plan
        if plan.purchase.capacity_reservation_id:
            return plan.purchase.capacity_reservation_id
        if plan.purchase.option != "reserved":
            return None
        # Billed from the moment it exists, used or not, until destroyed. Made in the placement group, as instances of a
        # cluster group use no capacity from outside it: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
        reservation = aws.ec2.CapacityReservation(
            f"{self._prefix}-nodes",
            instance_type=plan.instance_type,
            instance_count=plan.node_count,
            instance_platform="Linux/UNIX",
            availability_zone=args.zone_name,
            ebs_optimized=True,
            instance_match_criteria="targeted",
            end_date_type="unlimited",
            placement_group_arn=args.placement_group.arn if args.placement_group else None,
            tags=self._named(self._names.group),
            opts=self._own,
        )
        return reservation.id

    def _template(self, user_data: pulumi.Output[str]) -> aws.ec2.LaunchTemplate:
        args, plan = self._args, self._plan
        tags = self._named(self._names.group)
        placement = reservation = market = None
        if args.placement_group:
            placement = aws.ec2.LaunchTemplatePlacementArgs(group_name=args.placement_group.name, tenancy="default")
        if self.capacity_reservation_id is not None:
            reservation = aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(
                capacity_reservation_target=(
                    aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(
                        capacity_reservation_id=self.capacity_reservation_id
                    )
                )
            )
        if plan.purchase.option == "capacity-block":
            # https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-template-capacity-blocks.html
            market = aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block")
        return aws.ec2.LaunchTemplate(
            f"{self._prefix}-node",
            # EC2 takes 255 characters, and a model's name may be longer.
            description=f"gpufleet {self._names.stack}: {plan.instance_type} for {plan.job.model}"[:255],
            image_id=args.image.id,
            instance_type=plan.instance_type,
            user_data=user_data,
            update_default_version=True,
            ebs_optimized="true",
            instance_initiated_shutdown_behavior="terminate",
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=args.instance_profile_arn),
            metadata_options=METADATA_OPTIONS,
            monitoring=aws.ec2.LaunchTemplateMonitoringArgs(enabled=False),
            block_device_mappings=[
                aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
                    device_name=args.image.root_device,
                    ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
                        volume_type="gp3",
                        volume_size=plan.volumes.root_gib,
                        iops=plan.volumes.iops,
                        throughput=plan.volumes.throughput_mib_per_s,
                        encrypted="true",
                        kms_key_id=args.key_arn,
                        delete_on_termination="true",
                    ),
                )
            ],
            network_interfaces=interfaces(plan.node, args.node_group_id),
            placement=placement,
            capacity_reservation_specification=reservation,
            instance_market_options=market,
            tag_specifications=launch_tags(tags),
            tags=tags,
            opts=self._own,
        )

    def _group(self, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.Group:
        args, plan, workers = self._args, self._plan, self._settings.mode == "workers"
        hooks = (
            (self._names.launch_hook, "autoscaling:EC2_INSTANCE_LAUNCHING", LAUNCH_TIMEOUT_S),
            (self._names.terminate_hook, "autoscaling:EC2_INSTANCE_TERMINATING", plan.terminate_timeout_s),
        )
        spot = plan.purchase.option == "spot"
        group = aws.autoscaling.Group(
            f"{self._prefix}-nodes",
            name=self._names.group,
            # The desired capacity is not declared, so the group begins without a node, and no later `up` sets it back:
            # the controller starts a gang whole or not at all, meters it and ends it. Nodes that another hand starts
            # would run without a meter.
            min_size=0,
            max_size=plan.node_count,
            vpc_zone_identifiers=args.subnet_ids,
            launch_template=None if spot else self._plain(template),
            mixed_instances_policy=self._mixed(template) if spot else None,
            warm_pool=self._warm_pool() if args.settings.warm_pool else None,
            service_linked_role_arn=args.service_role_arn,
            # Spot capacity may take hours to come; `pulumi up` has done its work when the group exists.
            wait_for_capacity_timeout="0",
            # On a rebalance recommendation, a sign of risk and no more, Auto Scaling would start a replacement and kill
            # the node, and with it the running step of all. The notice goes to the queue and means "checkpoint now":
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
            capacity_rebalance=False,
            protect_from_scale_in=self._protected,
            # AZRebalance would terminate healthy nodes to even out zones.
            suspended_processes=["AZRebalance"],
            # Neither a maximum lifetime, which ends a node that trains, nor a maintenance policy, whose only use is a
            # replacement that is paid while it waits for a place in a full gang.
            instance_refresh=self._refresh(),
            default_instance_warmup=WARMUP_S if workers else None,
            health_check_type="EC2",
            health_check_grace_period=HEALTH_CHECK_GRACE_S,
            # Deletes the group with its instances at once. Without it, destroy sets the size to 0 and waits for
            # protected instances and terminate hooks that never come, ten minutes, then fails:
            # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DeleteAutoScalingGroup.html
            force_delete=True,
            enabled_metrics=[
                aws.autoscaling.Metric.GROUP_DESIRED_CAPACITY,
                aws.autoscaling.Metric.GROUP_IN_SERVICE_INSTANCES,
            ],
            # Part of CreateAutoScalingGroup: hooks made afterwards would miss the first instances.
            initial_lifecycle_hooks=[
                aws.autoscaling.GroupInitialLifecycleHookArgs(
                    name=name, lifecycle_transition=transition, heartbeat_timeout=timeout, default_result="ABANDON"
                )
                for name, transition, timeout in hooks
            ],
            tags=[
                aws.autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=True)
                for key, value in sorted(self._tags.items())
            ],
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=self._left_to_others()),
        )
        for name, transition, timeout in hooks:
            # The same hooks, so that a later change of a timeout reaches the group (PutLifecycleHook overwrites).
            aws.autoscaling.LifecycleHook(
                f"{self._prefix}-{name}",
                name=name,
                autoscaling_group_name=group.name,
                lifecycle_transition=transition,
                heartbeat_timeout=timeout,
                default_result="ABANDON",
                opts=self._own,
            )
        return group

    @property
    def _protected(self) -> bool:
        """Only the controller lets a node of a gang go.

        Workers protect themselves while they work (bootstrap/launch.sh). Nodes of a Capacity Block are unprotected, so
        that the scheduled action can drain them before the block's end, also when the controller fails.
        """
        settings = self._settings
        return settings.mode == "training" and settings.plan.purchase.option != "capacity-block"

    def _refresh(self) -> aws.autoscaling.GroupInstanceRefreshArgs | None:
        """Replacement of running nodes when the launch template changes: protected nodes stay.

        A gang therefore takes the new template at its next start; idle workers are replaced one after another, busy
        ones keep theirs. Unprotected nodes of a Capacity Block train, so nothing refreshes them.
        https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_RefreshPreferences.html
        """
        if self._plan.purchase.option == "capacity-block":
            return None
        return aws.autoscaling.GroupInstanceRefreshArgs(
            strategy="Rolling",
            preferences=aws.autoscaling.GroupInstanceRefreshPreferencesArgs(
                scale_in_protected_instances="Ignore", standby_instances="Ignore", skip_matching=True
            ),
        )

    def _warm_pool(self) -> aws.autoscaling.GroupWarmPoolArgs:
        nodes = self._settings.warm_pool
        return aws.autoscaling.GroupWarmPoolArgs(
            pool_state="Stopped",
            min_size=nodes,
            # Equal to min_size: as many whatever the group's size. Unset means as many as the group could grow by:
            # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutWarmPool.html
            max_group_prepared_capacity=nodes,
        )

    def _left_to_others(self) -> list[str]:
        """Properties that `up` does not set back, because others change them."""
        # The provider reads and updates the hooks only as resources of their own.
        left = ["initialLifecycleHooks"]
        if self._settings.moving_bounds:
            # Policies and schedules move the desired size between these bounds, so the controller stops nodes by them.
            left += ["minSize", "maxSize"]
        if self._plan.purchase.fallback == "on-demand":
            # The controller buys the gang on demand when spot does not come.
            left.append("mixedInstancesPolicy.instancesDistribution.onDemandBaseCapacity")
        return left

    def _plain(self, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.GroupLaunchTemplateArgs:
        return aws.autoscaling.GroupLaunchTemplateArgs(id=template.id, version=_version(template))

    def _mixed(self, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.GroupMixedInstancesPolicyArgs:
        plan = self._plan
        return aws.autoscaling.GroupMixedInstancesPolicyArgs(
            instances_distribution=aws.autoscaling.GroupMixedInstancesPolicyInstancesDistributionArgs(
                on_demand_base_capacity=plan.purchase.on_demand_base,
                on_demand_percentage_above_base_capacity=0,
                # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-fleet-allocation-strategy.html
                spot_allocation_strategy="price-capacity-optimized",
            ),
            launch_template=aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateArgs(
                launch_template_specification=(
                    aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateLaunchTemplateSpecificationArgs(
                        launch_template_id=template.id, version=_version(template)
                    )
                ),
                # Nodes on demand take the types in this order. The plan names only types like its own, none slower: a
                # gang runs at its slowest node's pace, and the plan promises this type's memory and speed.
                overrides=[
                    aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateOverrideArgs(instance_type=instance_type)
                    for instance_type in (plan.instance_type, *plan.purchase.spot_types)
                ],
            ),
        )


def _version(template: aws.ec2.LaunchTemplate) -> pulumi.Output[str]:
    # The number, not "$Latest": the group's state then says which template its next node gets.
    return template.latest_version.apply(str)
