"""The Pulumi program: configuration → components → exports."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra import bundle, images
from infra.component import Stack
from infra.configuration import load
from infra.controller import Controller, ControllerArgs
from infra.fleet import Fleet, FleetArgs
from infra.lustre import Lustre, LustreArgs
from infra.naming import Names, tags
from infra.network import Network
from infra.observability import Observability
from infra.scaling import Scaling
from infra.security import Security, SecurityArgs
from infra.storage import Storage, StorageArgs


def main(*, starts_nodes: bool = True) -> None:
    """Declare every resource of the stack; ``starts_nodes`` and errors as ``configuration.load``."""
    settings = load(starts_nodes=starts_nodes)
    plan = settings.plan
    image = images.look_up(settings)
    names = Names(
        stack=settings.stack,
        account_id=aws.get_caller_identity().account_id,
        region=plan.region,
        partition=aws.get_partition().partition,
    )
    stack = Stack(settings=settings, names=names, tags=tags(settings.stack, plan.job.model, settings.tags))
    archive = bundle.build(requirements=settings.requirements)

    network = Network(stack)
    security = Security(
        stack,
        SecurityArgs(
            vpc_id=network.vpc_id,
            placement_groups=list(network.placement_groups.values()),
            endpoint_group_id=network.endpoint_group_id,
            s3_prefix_list_id=network.s3_prefix_list_id,
        ),
    )
    storage = Storage(
        stack,
        StorageArgs(
            key_arn=security.key_arn,
            claim=security.claim,
            bundle=archive,
            train_code=bundle.pack(settings.train_dir, "train") if settings.train_dir else None,
        ),
    )
    observability = Observability(stack, security.key_arn, security.claim)
    lustre = None
    mounted: pulumi.Input[str] = ""
    if plan.lustre:
        lustre = Lustre(
            stack,
            LustreArgs(
                planned=plan.lustre,
                key_arn=security.key_arn,
                subnet_id=network.subnet_ids[0],
                node_group_id=security.node_group_id,
            ),
            # The file system's servers talk to each other and to the nodes by the rules of the nodes' group.
            pulumi.ResourceOptions(depends_on=[security]),
        )
        mounted = lustre.address
    fleet = Fleet(
        stack,
        FleetArgs(
            image=image,
            bundle_sha256=archive.sha256,
            bundle_key=storage.bundle_key,
            train_archive=storage.train_archive,
            bucket=storage.bucket,
            log_group=observability.log_group,
            key_arn=security.key_arn,
            service_role_arn=security.service_role_arn,
            instance_profile_arn=security.instance_profile_arn,
            node_group_id=security.node_group_id,
            places=network.places,
            subnets=network.subnets,
            zone_name=network.zone_name,
            placement_groups=network.placement_groups,
            lustre=mounted,
        ),
        # A node needs its endpoints, permissions and files from its start to its end.
        pulumi.ResourceOptions(depends_on=[network, security, *storage.node_files, *filter(None, [lustre])]),
    )
    if settings.scaling or plan.purchase.capacity_block:
        Scaling(stack, network.places.values(), fleet.group_names)
    Controller(
        stack,
        ControllerArgs(
            key_arn=security.key_arn,
            bucket=storage.bucket,
            queue_url=observability.queue_url,
            group_name=fleet.group_name,
            train_archive=storage.train_archive,
            places=network.places,
            subnets=network.subnets,
        ),
        # The controller starts nodes as soon as it runs, so it comes after everything that nodes need, and goes before.
        pulumi.ResourceOptions(depends_on=[fleet, observability]),
    )

    exports = {
        "region": plan.region,
        "group_name": fleet.group_name,
        "launch_template_id": fleet.launch_template_id,
        "capacity_reservation_id": fleet.capacity_reservation_id,
        "bucket": storage.bucket,
        "checkpoints": storage.bucket.apply(lambda name: f"s3://{name}/{names.checkpoint_prefix}/"),
        "key_arn": security.key_arn,
        "queue_url": observability.queue_url,
        "log_group": observability.log_group,
        "image": {"id": image.id, "name": image.name},
        "plan": {
            "model": plan.job.model,
            "nodes": f"{plan.node_count} x {plan.instance_type}",
            "purchase": plan.purchase.option,
            "expected_hours": settings.planned.hours.expected,
            "expected_cost_usd": settings.planned.cost_usd.expected,
            "p95_cost_usd": settings.planned.cost_usd.p95,
        },
    }
    for name, value in exports.items():
        pulumi.export(name, value)


if __name__ == "__main__":
    main()
