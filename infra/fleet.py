"""The nodes: a launch template that says what one is, and an Auto Scaling group for as many as the plan has."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.images import Image
from infra.naming import Names
from infra.settings import Settings
from infra.user_data import NodeFacts, environment, user_data
from optimizer.plan import Node

# Until a node must have passed its health checks and smoke test: booting 2 TiB of memory, mounting NVMe and, on an
# image without them, installing driver, CUDA and EFA takes up to half an hour. Heartbeats of the bootstrap extend it.
LAUNCH_TIMEOUT_S = 1800
# The launch hook has proven the node, so a failed status check counts soon after.
HEALTH_CHECK_GRACE_S = 60
# From entering service, which the launch hook holds back until the node is proven, to work that the metrics show: model
# and data load, then two samples a minute apart.
WARMUP_S = 300


@dataclass(frozen=True, kw_only=True)
class FleetArgs:
    """What the nodes are and where they go."""

    settings: Settings
    names: Names
    tags: dict[str, str]
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

    Using one of four cards in silence is the classic loss, two addresses of one host the classic puzzle:
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


class Fleet(pulumi.ComponentResource):
    """Launch template, Auto Scaling group with its lifecycle hooks, and a capacity reservation where the plan buys one.

    The group starts without a node. How many there are is the controller's to say, which meters them
    (infra/controller.py).

    Attributes:
        group_name: the Auto Scaling group.
        launch_template_id: the template.
        environment: variables of the nodes' node.env.
        capacity_reservation_id: the reservation the nodes run in; None without one.
    """

    def __init__(self, name: str, args: FleetArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpufleet:infra:Fleet", name, None, opts)
        self._args = args
        self._own = pulumi.ResourceOptions(parent=self)
        self.capacity_reservation_id = self._reservation()
        facts = self._node_facts()
        self.environment = facts.apply(lambda found: environment(args.settings.plan, found))
        template = self._template(self._user_data(facts))
        group = self._group(template)
        self.group_name = group.name
        self.launch_template_id = template.id
        self.register_outputs({"group_name": self.group_name})

    def _reservation(self) -> pulumi.Input[str] | None:
        args, plan = self._args, self._args.settings.plan
        if plan.purchase.capacity_reservation_id:
            return plan.purchase.capacity_reservation_id
        if plan.purchase.option != "reserved":
            return None
        # Billed from the moment it exists, used or not, until destroyed. Made in the placement group, as instances of a
        # cluster group use no capacity from outside it: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
        reservation = aws.ec2.CapacityReservation(
            f"{args.names.prefix}-nodes",
            instance_type=plan.instance_type,
            instance_count=plan.node_count,
            instance_platform="Linux/UNIX",
            availability_zone=args.zone_name,
            ebs_optimized=True,
            instance_match_criteria="targeted",
            end_date_type="unlimited",
            placement_group_arn=args.placement_group.arn if args.placement_group else None,
            tags={**args.tags, "Name": args.names.group},
            opts=self._own,
        )
        return reservation.id

    def _template(self, user_data: pulumi.Output[str]) -> aws.ec2.LaunchTemplate:
        args, plan = self._args, self._args.settings.plan
        tags = {**args.tags, "Name": args.names.group}
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
            f"{args.names.prefix}-node",
            # As much as EC2 takes; a model's name is anybody's.
            description=f"gpufleet {args.names.stack}: {plan.instance_type} for {plan.job.model}"[:255],
            image_id=args.image.id,
            instance_type=plan.instance_type,
            user_data=user_data,
            update_default_version=True,
            ebs_optimized="true",
            instance_initiated_shutdown_behavior="terminate",
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=args.instance_profile_arn),
            # Tokens, and one hop: a container or a forged request cannot read the role's credentials.
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                http_put_response_hop_limit=1,
                instance_metadata_tags="disabled",
            ),
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
            tag_specifications=[
                aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=tags)
                for kind in ("instance", "volume", "network-interface")
            ],
            tags=tags,
            opts=self._own,
        )

    def _node_facts(self) -> pulumi.Output[NodeFacts]:
        args, names, settings = self._args, self._args.names, self._args.settings
        known: pulumi.Output[dict[str, str]] = pulumi.Output.all(
            bucket=args.bucket,
            bundle_key=args.bundle_key,
            train_archive=args.train_archive,
            key_arn=args.key_arn,
            log_group=args.log_group,
        )
        return known.apply(
            lambda known: NodeFacts(
                stack=names.stack,
                run=settings.run_id(known["train_archive"]),
                mode=settings.mode,
                group=names.group,
                launch_hook=names.launch_hook,
                terminate_hook=names.terminate_hook,
                checkpoint_prefix=names.checkpoint_prefix,
                train_command=settings.train_command,
                metric_namespace=names.metric_namespace,
                ami_kind=args.image.kind,
                bundle_sha256=args.bundle_sha256,
                warm_pool=settings.warm_pool > 0,
                **known,
            )
        )

    def _user_data(self, facts: pulumi.Output[NodeFacts]) -> pulumi.Output[str]:
        plan = self._args.settings.plan

        def encode(known: list[Any]) -> str:
            return base64.b64encode(user_data(plan, *known).encode()).decode()

        return pulumi.Output.all(facts, self._args.node_config).apply(encode)

    def _group(self, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.Group:
        args, plan, workers = self._args, self._args.settings.plan, self._args.settings.mode == "workers"
        hooks = (
            (args.names.launch_hook, "autoscaling:EC2_INSTANCE_LAUNCHING", LAUNCH_TIMEOUT_S),
            (args.names.terminate_hook, "autoscaling:EC2_INSTANCE_TERMINATING", plan.terminate_timeout_s),
        )
        spot = plan.purchase.option == "spot"
        group = aws.autoscaling.Group(
            f"{args.names.prefix}-nodes",
            name=args.names.group,
            # From none to the plan's number. The desired capacity is not declared, so the group begins without a node,
            # and no later `up` sets it back: it is the controller's, which starts a gang whole or not at all, meters
            # it and ends it. Nodes that another hand starts would run without a meter.
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
            # It would terminate healthy nodes to even out zones.
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
                for key, value in sorted(args.tags.items())
            ],
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=self._left_to_others()),
        )
        for name, transition, timeout in hooks:
            # The same hooks, so that a later change of a timeout reaches the group (PutLifecycleHook overwrites).
            aws.autoscaling.LifecycleHook(
                f"{args.names.prefix}-{name}",
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
        """Whether only the controller lets a node go.

        Not workers, which protect themselves while they work (bootstrap/launch.sh), nor the nodes of a Capacity Block:
        the scheduled action that drains them before its end must be able to, also when the controller fails.
        """
        settings = self._args.settings
        return settings.mode == "training" and settings.plan.purchase.option != "capacity-block"

    def _refresh(self) -> aws.autoscaling.GroupInstanceRefreshArgs | None:
        """What becomes of running nodes when the launch template changes: protected ones stay.

        A gang therefore takes the new template when it starts next; idle workers are replaced one after another, busy
        ones keep theirs. Unprotected nodes of a Capacity Block train, so nothing refreshes them.
        https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_RefreshPreferences.html
        """
        if self._args.settings.plan.purchase.option == "capacity-block":
            return None
        return aws.autoscaling.GroupInstanceRefreshArgs(
            strategy="Rolling",
            preferences=aws.autoscaling.GroupInstanceRefreshPreferencesArgs(
                scale_in_protected_instances="Ignore", standby_instances="Ignore", skip_matching=True
            ),
        )

    def _warm_pool(self) -> aws.autoscaling.GroupWarmPoolArgs:
        nodes = self._args.settings.warm_pool
        return aws.autoscaling.GroupWarmPoolArgs(
            pool_state="Stopped",
            min_size=nodes,
            # Equal to min_size: that many, whatever the group's size. Without it, as many as the group could grow by:
            # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutWarmPool.html
            max_group_prepared_capacity=nodes,
        )

    def _left_to_others(self) -> list[str]:
        """Properties that `up` does not set back."""
        # The provider reads and updates the hooks only as resources of their own.
        left = ["initialLifecycleHooks"]
        if self._args.settings.moving_bounds:
            # The controller's: policies and schedules move the desired size between these, so it stops nodes by them.
            left += ["minSize", "maxSize"]
        if self._args.settings.plan.purchase.fallback == "on-demand":
            # The controller's, which buys the gang on demand when spot does not come.
            left.append("mixedInstancesPolicy.instancesDistribution.onDemandBaseCapacity")
        return left

    def _plain(self, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.GroupLaunchTemplateArgs:
        return aws.autoscaling.GroupLaunchTemplateArgs(id=template.id, version=_version(template))

    def _mixed(self, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.GroupMixedInstancesPolicyArgs:
        plan = self._args.settings.plan
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
                # In this order for nodes on demand. The plan names only types like its own, none slower, as a gang runs
                # at its slowest node's pace and the memory and speed it promises are this type's.
                overrides=[
                    aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateOverrideArgs(instance_type=instance_type)
                    for instance_type in (plan.instance_type, *plan.purchase.spot_types)
                ],
            ),
        )


def _version(template: aws.ec2.LaunchTemplate) -> pulumi.Output[str]:
    # The number, not "$Latest": the group's state then says which template its next node gets.
    return template.latest_version.apply(str)
