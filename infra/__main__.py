"""The Pulumi program: configuration → components → exports."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra import bundle, images
from infra.component import Stack
from infra.configuration import load
from infra.controller import Controller
from infra.fleet import Fleet
from infra.lustre import Lustre
from infra.naming import Names, tags
from infra.network import Network
from infra.observability import Observability
from infra.security import Security
from infra.storage import Storage


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
    security = Security(stack, network)
    storage = Storage(stack, security, archive)
    observability = Observability(stack, security)
    lustre = Lustre(stack, network, security) if plan.lustre else None
    fleet = Fleet(stack, image, network, security, storage, observability, lustre)
    Controller(stack, network, security, storage, observability, fleet)

    exports = {
        "group_name": fleet.group_name,
        "launch_template_id": fleet.launch_template_id,
        "capacity_reservation_id": fleet.capacity_reservation_id,
        "bucket": storage.bucket,
        "checkpoints": storage.bucket.apply(lambda name: f"s3://{name}/{names.checkpoint_prefix}/"),
        "key_arn": security.key_arn,
        "queue_url": observability.queue_url,
        "log_group": observability.log_group,
        "image": {"id": image.id, "name": image.name},
    }
    for name, value in exports.items():
        pulumi.export(name, value)


if __name__ == "__main__":
    main()
