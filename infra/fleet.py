"""The nodes: the launch template of one, and the Auto Scaling group of as many as the plan has."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from bootstrap.contract.start_reservation import FIRST
from infra.component import ENDED_WITHIN, METADATA_OPTIONS, Component, Stack, launch_tags
from infra.images import Image
from infra.places import alternates, reserves_starts
from infra.user_data import NodeFacts, user_data
from optimizer.contract.plan import NodeSpec

# Boot, installation, health checks and smoke test take up to half an hour; heartbeats of the bootstrap extend it.
LAUNCH_TIMEOUT_S = 1800
# Short, because the launch hook has proven the node.
HEALTH_CHECK_GRACE_S = 60
# From entering service to work that the metrics show: model and data load, then two samples a minute apart.
WARMUP_S = 300


@dataclass(frozen=True, kw_only=True)
class FleetArgs:
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
    lustre: pulumi.Input[str] = ""


def interfaces(
    node: NodeSpec, security_group_id: pulumi.Input[str]
) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
    """Declare the plan's interfaces for the launch template."""
    return [
        aws.ec2.LaunchTemplateNetworkInterfaceArgs(
            network_card_index=one.card,
            device_index=one.device,
            interface_type=one.kind,
            # EC2 takes this argument for a single interface only:
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-instance-addressing.html
            associate_public_ip_address="false" if len(node.interfaces) == 1 else None,
            delete_on_termination="true",
            security_groups=[security_group_id],
        )
        for one in node.interfaces
    ]


class Fleet(Component):
    """Launch template, Auto Scaling group with its lifecycle hooks, and a capacity reservation where the plan buys one.

    The group starts without a node; the controller, which meters them, sets their number.
    """

    def __init__(self, stack: Stack, args: FleetArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(stack, opts)
        self._args, self._plan = args, stack.settings.plan
        self.capacity_reservation_id = self._reservation()
        settings, names = stack.settings, stack.names

        def encoded(known: NodeFacts) -> str:
            return base64.b64encode(user_data(settings, names, known).encode()).decode()

        node_facts: pulumi.Output[NodeFacts] = pulumi.Output.all(
            bucket=args.bucket,
            bundle_key=args.bundle_key,
            train_archive=args.train_archive,
            key_arn=args.key_arn,
            log_group=args.log_group,
            lustre=args.lustre,
        ).apply(lambda known: NodeFacts(ami_kind=args.image.kind, bundle_sha256=args.bundle_sha256, **known))
        template = self._template(node_facts.apply(encoded))
        self.group_name = self._group(template).name
        self.launch_template_id = template.id
        self.register_outputs({"group_name": self.group_name})

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
            placement_group_arn=args.placement_group.arn if args.placement_group else None,
            tags=self._named(self._names.group),
            opts=self._own,
        )
        return reservation.id

    def _template(self, user_data: pulumi.Output[str]) -> aws.ec2.LaunchTemplate:
        args, plan = self._args, self._plan
        tags = self._named(self._names.group)
        reservation: aws.ec2.LaunchTemplateCapacityReservationSpecificationArgsDict | None = None
        placement = market = None
        if args.placement_group:
            placement = aws.ec2.LaunchTemplatePlacementArgs(group_name=args.placement_group.name, tenancy="default")
        # Not for a topped-up fleet: its rented nodes must launch outside of the reservation (the group's target).
        if self.capacity_reservation_id is not None and not plan.purchase.on_demand_top_up:
            reservation = {"capacity_reservation_target": {"capacity_reservation_id": self.capacity_reservation_id}}
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
        hooks: list[dict[str, Any]] = [
            {
                "name": name,
                "lifecycle_transition": f"autoscaling:EC2_INSTANCE_{phase}",
                "heartbeat_timeout": timeout,
                "default_result": "ABANDON",
            }
            for name, phase, timeout in (
                (self._names.launch_hook, "LAUNCHING", LAUNCH_TIMEOUT_S),
                (self._names.terminate_hook, "TERMINATING", plan.terminate_timeout_s),
            )
        ]
        mixed, pool = plan.purchase.option == "spot" or bool(alternates(self._settings)), self._settings.warm_pool
        # Not "$Latest": the group's state then says which template its next node gets.
        version = template.latest_version.apply(str)
        group = aws.autoscaling.Group(
            f"{self._prefix}-nodes",
            name=self._names.group,
            # No desired capacity is declared: the controller alone starts, meters and ends nodes.
            min_size=0,
            max_size=plan.node_count,
            vpc_zone_identifiers=args.subnet_ids,
            launch_template=None if mixed else aws.autoscaling.GroupLaunchTemplateArgs(id=template.id, version=version),
            mixed_instances_policy=self._mixed(template.id, version) if mixed else None,
            capacity_reservation_specification=self._top_up_target(),
            warm_pool=aws.autoscaling.GroupWarmPoolArgs(
                pool_state="Stopped",
                min_size=pool,
                # Unset means as many as the group could grow by:
                # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutWarmPool.html
                max_group_prepared_capacity=pool,
            )
            if pool
            else None,
            service_linked_role_arn=args.service_role_arn,
            # Spot capacity may take hours; `pulumi up` does not wait.
            wait_for_capacity_timeout="0",
            # A rebalance recommendation is a sign of risk only, and replacing a node kills the running step of all:
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
            capacity_rebalance=False,
            # Workers protect themselves while they work (bootstrap/agent); a scheduled action must be able to drain
            # the nodes of a Capacity Block.
            protect_from_scale_in=not workers and plan.purchase.option != "capacity-block",
            # AZRebalance would terminate healthy nodes to even out zones.
            suspended_processes=["AZRebalance"],
            # An unhealthy node ends at once, and its replacement is launched beside it. Without a policy the account
            # setting launchBeforeTerminate would keep a sick node until its replacement is in service, for which a
            # reservation has no room:
            # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-launch-before-terminate-account-setting.html
            instance_maintenance_policy=aws.autoscaling.GroupInstanceMaintenancePolicyArgs(
                min_healthy_percentage=0, max_healthy_percentage=100
            ),
            # No maximum lifetime, which would end a node that trains.
            instance_refresh=self._refresh(),
            default_instance_warmup=WARMUP_S if workers else None,
            health_check_type="EC2",
            health_check_grace_period=HEALTH_CHECK_GRACE_S,
            # Deletes the group with its instances at once; else destroy waits ten minutes for protected instances and
            # terminate hooks, then fails:
            # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DeleteAutoScalingGroup.html
            force_delete=True,
            enabled_metrics=[
                aws.autoscaling.Metric.GROUP_DESIRED_CAPACITY,
                aws.autoscaling.Metric.GROUP_IN_SERVICE_INSTANCES,
            ],
            # Part of CreateAutoScalingGroup: hooks made afterwards would miss the first instances.
            initial_lifecycle_hooks=[aws.autoscaling.GroupInitialLifecycleHookArgs(**hook) for hook in hooks],
            tags=[
                aws.autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=True)
                for key, value in sorted(self._tags.items())
            ],
            opts=pulumi.ResourceOptions(
                parent=self, ignore_changes=self._left_to_others(), custom_timeouts=ENDED_WITHIN
            ),
        )
        for hook in hooks:
            # The same hooks, so that a later change of a timeout reaches the group (PutLifecycleHook overwrites).
            aws.autoscaling.LifecycleHook(
                f"{self._prefix}-{hook['name']}", autoscaling_group_name=group.name, opts=self._own, **hook
            )
        return group

    def _top_up_target(self) -> aws.autoscaling.GroupCapacityReservationSpecificationArgsDict | None:
        """Fill the owned reservation first, and launch what it has no room for on demand, in one group.

        https://docs.aws.amazon.com/autoscaling/ec2/userguide/target-capacity-reservations.html
        """
        purchase = self._plan.purchase
        if not (purchase.capacity_reservation_id and purchase.on_demand_top_up):
            return None
        return {
            "capacity_reservation_preference": FIRST,
            "capacity_reservation_target": {"capacity_reservation_ids": [purchase.capacity_reservation_id]},
        }

    def _refresh(self) -> aws.autoscaling.GroupInstanceRefreshArgs | None:
        """A changed template replaces idle workers; protected nodes keep theirs until their next start.

        https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_RefreshPreferences.html
        """
        if self._plan.purchase.option == "capacity-block":
            return None  # its nodes train unprotected
        return aws.autoscaling.GroupInstanceRefreshArgs(
            strategy="Rolling",
            preferences=aws.autoscaling.GroupInstanceRefreshPreferencesArgs(
                # AWS's default, which the group's maintenance policy would replace.
                min_healthy_percentage=90,
                scale_in_protected_instances="Ignore",
                standby_instances="Ignore",
                skip_matching=True,
            ),
        )

    def _left_to_others(self) -> list[str]:
        """Properties that `up` does not set back, because others change them."""
        # The provider reads and updates the hooks only as resources of their own.
        left = ["initialLifecycleHooks"]
        if reserves_starts(self._settings):
            # The controller lets a gang start in its reservations alone, and lifts that once it runs.
            left.append("capacityReservationSpecification")
        if self._settings.warm_pool:
            # The controller suspends launches while no node may run.
            left.append("suspendedProcesses")
        if self._settings.moving_bounds:
            # The controller stops nodes by these bounds, between which policies and schedules move the size.
            left += ["minSize", "maxSize"]
        rotates = bool(alternates(self._settings))
        if rotates:
            # The controller goes to the next place when this one has no capacity.
            left += ["vpcZoneIdentifiers", "mixedInstancesPolicy.launchTemplate.overrides"]
        if rotates or self._plan.purchase.fallback == "on-demand":
            # The controller buys the gang on demand when spot does not come.
            left.append("mixedInstancesPolicy.instancesDistribution.onDemandBaseCapacity")
        return left

    def _mixed(
        self, template_id: pulumi.Output[str], version: pulumi.Output[str]
    ) -> aws.autoscaling.GroupMixedInstancesPolicyArgsDict:
        plan = self._plan
        return {
            "instances_distribution": {
                "on_demand_base_capacity": (
                    plan.purchase.on_demand_base if plan.purchase.option == "spot" else plan.node_count
                ),
                "on_demand_percentage_above_base_capacity": 0,
                # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-fleet-allocation-strategy.html
                "spot_allocation_strategy": "price-capacity-optimized",
            },
            "launch_template": {
                "launch_template_specification": {"launch_template_id": template_id, "version": version},
                # Nodes on demand take the types in this order.
                "overrides": [{"instance_type": name} for name in (plan.instance_type, *plan.purchase.spot_types)],
            },
        }
