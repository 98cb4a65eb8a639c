"""A place's nodes: their launch template, placement group and Auto Scaling group of as many as the plan has.

Groups, templates and placement groups cost nothing. The controller starts, meters and ends the nodes, and changes
nothing else of them, so a second `up` finds nothing to do.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pulumi
import pulumi_aws as aws

from bootstrap.contract.timings import BLOCK_TAIL
from infra.component import ENDED_WITHIN, Component, Stack
from infra.images import Image
from infra.network import Network
from infra.places import DeclaredPlace
from infra.security import Security

# Boot, installation, health checks and smoke test take up to half an hour; heartbeats of the bootstrap extend it.
LAUNCH_TIMEOUT_S = 1800
# Short, because the launch hook has proven the node.
HEALTH_CHECK_GRACE_S = 60
# From entering service to work that the metrics show: model and data load, then two samples a minute apart.
WARMUP_S = 300
# Properties of the group that `up` does not set back. The provider reads and updates the hooks only as resources of
# their own. The controller alone keeps the bounds of the size. AWS may answer the size's type after another has set the
# size, and refuses to clear it; set by `up`, a newer provider plans it again and again:
# https://github.com/hashicorp/terraform-provider-aws/issues/37523
# https://github.com/hashicorp/terraform-provider-aws/issues/47088
LEFT_TO_OTHERS = ["initialLifecycleHooks", "desiredCapacityType", "minSize", "maxSize"]
# A changed template replaces idle workers; those that work protect themselves. A gang takes it at its next start:
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_RefreshPreferences.html
REFRESH: Any = {
    "strategy": "Rolling",
    "preferences": {
        # AWS's default, which the group's maintenance policy would replace.
        "min_healthy_percentage": 90,
        "scale_in_protected_instances": "Ignore",
        "standby_instances": "Ignore",
        "skip_matching": True,
    },
}


class PlaceGroup(Component):
    """Launch template and Auto Scaling group of one place, with its hooks and scaling; it starts without a node."""

    def __init__(
        self,
        stack: Stack,
        place: DeclaredPlace,
        image: Image,
        user_data: pulumi.Output[str],
        network: Network,
        security: Security,
        reservation_id: pulumi.Input[str] | None,
        opts: pulumi.ResourceOptions,
    ) -> None:
        self._suffix = "" if place.number == 1 else f"-{place.number}"
        super().__init__(stack, opts, self._suffix)
        self._place, self._plan, self._network, self._security = place, stack.settings.plan, network, security
        self._name = stack.names.groups[place.number - 1]
        template = self._template(image, user_data, reservation_id)
        self.name = self._group(template).name
        self.launch_template_id = template.id
        # A component of their own had both, and `up` would add them here before it deletes them there. A group takes no
        # second action of a time and no second policy of a metric: https://github.com/TerraConstructs/base/issues/127
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-scaling-target-tracking.html
        before = pulumi.Alias(parent=pulumi.create_urn("scaling", "gpufleet:infra:Scaling"))
        self._moved = pulumi.ResourceOptions(parent=self, aliases=[before])
        if place.block:
            self._drain_before(place.block.end)
        if (scaling := self._settings.scaling) and scaling.gpu_utilization_percent is not None:
            self._track_utilization(scaling.gpu_utilization_percent)
        self.register_outputs({"group_name": self.name})

    def _template(
        self, image: Image, user_data: pulumi.Output[str], reservation_id: pulumi.Input[str] | None
    ) -> aws.ec2.LaunchTemplate:
        plan, place, security = self._plan, self._place, self._security
        tags, instance_type = self._named(self._name), place.instance_type
        target: Any = {"capacity_reservation_target": {"capacity_reservation_id": reservation_id}}
        cluster = self._network.placement_groups.get(place.number)
        # EC2 takes this argument for a single interface only:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-instance-addressing.html
        lone = {"associate_public_ip_address": "false"} if len(plan.node.interfaces) == 1 else {}
        network_interfaces: Any = [
            {
                "network_card_index": interface.card,
                "device_index": interface.device,
                "interface_type": interface.kind,
                "delete_on_termination": "true",
                "security_groups": [security.node_group_id],
                **lone,
            }
            for interface in plan.node.interfaces
        ]
        # The image's further volumes would be encrypted and end with the node only where its owner chose so:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/AMIEncryption.html
        volume: Any = {"encrypted": "true", "kms_key_id": security.key_arn, "delete_on_termination": "true"}
        root = {
            "volume_type": "gp3",
            "volume_size": plan.volumes.root_gib,
            "iops": plan.volumes.iops,
            "throughput": plan.volumes.throughput_mib_per_s,
        }
        volumes: Any = [{"device_name": image.root_device, "ebs": root | volume}]
        volumes += [{"device_name": name, "ebs": volume} for name in image.other_devices]
        return aws.ec2.LaunchTemplate(
            f"{self._prefix}-node{self._suffix}",
            # EC2 takes 255 characters, and a model's name may be longer.
            description=f"gpufleet {self._names.stack}: {instance_type} for {plan.job.model}"[:255],
            image_id=image.id,
            instance_type=instance_type,
            user_data=user_data.apply(lambda text: base64.b64encode(text.encode()).decode()),
            update_default_version=True,
            ebs_optimized="true",
            instance_initiated_shutdown_behavior="terminate",
            iam_instance_profile={"arn": security.instance_profile_arn},
            # A token is required, and answers travel one hop: a container or a forged request cannot read the role's
            # credentials.
            metadata_options={
                "http_endpoint": "enabled",
                "http_tokens": "required",
                "http_put_response_hop_limit": 1,
                "instance_metadata_tags": "disabled",
            },
            monitoring={"enabled": False},
            block_device_mappings=volumes,
            network_interfaces=network_interfaces,
            placement={"group_name": cluster.name, "tenancy": "default"} if cluster else None,
            capacity_reservation_specification=None if reservation_id is None else target,
            # https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-template-capacity-blocks.html
            instance_market_options={"market_type": "capacity-block"} if place.block else None,
            tag_specifications=[
                {"resource_type": kind, "tags": tags} for kind in ("instance", "volume", "network-interface")
            ],
            tags=tags,
            opts=self._own,
        )

    def _group(self, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.Group:
        plan, workers = self._plan, self._settings.mode == "workers"
        hooks: Any = [
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
        tags: Any = [{"key": key, "value": it, "propagate_at_launch": True} for key, it in sorted(self._tags.items())]
        mixed = self._place.purchase == "spot"
        # Not "$Latest": the group's state then says which template its next node gets.
        version = template.latest_version.apply(str)
        group = aws.autoscaling.Group(
            f"{self._prefix}-nodes{self._suffix}",
            name=self._name,
            # No desired capacity is declared: the controller alone starts, meters and ends nodes.
            min_size=0,
            max_size=plan.node_count,
            vpc_zone_identifiers=[self._network.subnets[zone_id] for zone_id in self._place.zone_ids],
            launch_template=None if mixed else {"id": template.id, "version": version},
            mixed_instances_policy=self._mixed(template.id, version) if mixed else None,
            service_linked_role_arn=self._security.service_role_arn,
            # Spot capacity may take hours; `pulumi up` does not wait.
            wait_for_capacity_timeout="0",
            # A rebalance recommendation is a sign of risk only, and replacing a node kills the running step of all:
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
            capacity_rebalance=False,
            # Workers protect themselves while they work (bootstrap/agent); a scheduled action must be able to drain
            # the nodes of a Capacity Block.
            protect_from_scale_in=not workers and not self._place.block,
            # AZRebalance would terminate healthy nodes to even out zones.
            suspended_processes=["AZRebalance"],
            # An unhealthy node ends at once, and its replacement is launched beside it. Without a policy the account
            # setting launchBeforeTerminate would keep a sick node until its replacement is in service, for which a
            # reservation has no room:
            # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-launch-before-terminate-account-setting.html
            instance_maintenance_policy={"min_healthy_percentage": 0, "max_healthy_percentage": 100},
            # No maximum lifetime, which would end a node that trains.
            instance_refresh=REFRESH if workers and not self._place.block else None,
            default_instance_warmup=WARMUP_S if workers else None,
            health_check_type="EC2",
            health_check_grace_period=HEALTH_CHECK_GRACE_S,
            # Deletes the group with its instances at once; else destroy waits ten minutes for protected instances and
            # terminate hooks, then fails:
            # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DeleteAutoScalingGroup.html
            force_delete=True,
            # Part of CreateAutoScalingGroup: hooks made afterwards would miss the first instances.
            initial_lifecycle_hooks=hooks,
            tags=tags,
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=LEFT_TO_OTHERS, custom_timeouts=ENDED_WITHIN),
        )
        for hook in hooks:
            # The same hooks, so that a later change of a timeout reaches the group (PutLifecycleHook overwrites).
            aws.autoscaling.LifecycleHook(
                f"{self._prefix}-{hook['name']}{self._suffix}",
                autoscaling_group_name=group.name,
                opts=self._own,
                **hook,
            )
        return group

    def _mixed(
        self, template_id: pulumi.Output[str], version: pulumi.Output[str]
    ) -> aws.autoscaling.GroupMixedInstancesPolicyArgsDict:
        is_workers = self._settings.mode == "workers"
        return {
            "instances_distribution": {
                # A gang's nodes on demand are a group of their own.
                "on_demand_base_capacity": self._plan.purchase.on_demand_base if is_workers else 0,
                "on_demand_percentage_above_base_capacity": 0,
                # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-fleet-allocation-strategy.html
                "spot_allocation_strategy": "price-capacity-optimized",
            },
            "launch_template": {
                "launch_template_specification": {"launch_template_id": template_id, "version": version},
                # Nodes on demand take the types in this order.
                "overrides": [{"instance_type": self._place.instance_type}],
            },
        }

    def _track_utilization(self, percent: float) -> None:
        """Add nodes above ``percent``, the mean over the nodes in service, and take nodes below."""
        aws.autoscaling.Policy(
            f"{self._prefix}-gpu-utilization",
            autoscaling_group_name=self.name,
            policy_type="TargetTrackingScaling",
            target_tracking_configuration={
                "target_value": percent,
                "customized_metric_specification": {
                    "namespace": self._names.metric_namespace,
                    # Published by every node, each minute, for each GPU (bootstrap/cloudwatch-agent.json).
                    "metric_name": "GpuUtilizationPercent",
                    "statistic": "Average",
                },
            },
            opts=self._moved,
        )

    def _drain_before(self, end: datetime) -> None:
        """Drain a block's nodes, should the controller not have done so some minutes earlier."""
        # The terminate hook ends before AWS ends the node.
        moment = (end - BLOCK_TAIL - timedelta(seconds=self._plan.terminate_timeout_s)).astimezone(UTC)
        # Auto Scaling takes no time in the past.
        if moment > datetime.now(UTC):
            name = f"{self._prefix}-block-end{self._suffix}"
            aws.autoscaling.Schedule(
                name,
                scheduled_action_name=name,
                autoscaling_group_name=self.name,
                desired_capacity=0,
                # Auto Scaling takes no size below the smallest, which is not 0 where workers stand by:
                # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
                min_size=0,
                max_size=-1,  # The provider leaves it; its default is 0.
                start_time=f"{moment:%Y-%m-%dT%H:%M:%SZ}",
                opts=self._moved,
            )
