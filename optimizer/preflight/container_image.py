"""Check that the image that the training runs in exists, and fits the node."""

from __future__ import annotations

from collections.abc import Iterator

from bootstrap.contract.ecr import read_ecr_image
from optimizer.aws.registry import find_image
from optimizer.economics.staging import IMAGE_GIB, least_pull_s
from optimizer.preflight.model import Context, Finding, failure, passed

_CHECK = "container image"


def check_container_image(context: Context) -> Iterator[Finding]:
    """Look for the image of gpufleet:image, and for room on the root volume, where docker keeps its layers."""
    image = read_ecr_image(context.target.container_image)
    if image is None:
        return  # none is set, or the configuration's check refuses it
    uri = context.target.container_image
    found = find_image(image, context.plan.node.cpu_architecture)
    if isinstance(found, str):
        yield failure(
            _CHECK,
            found,
            value=uri,
            why="no node could pull it: the run would end in its set-up",
            next_step="push it, then gpufleet stack set PLAN --stack NAME --image URI",
        )
        return
    root_gib, size_gib = context.plan.volumes.root_gib, found.size_gib
    room_gib = root_gib - IMAGE_GIB
    if size_gib > room_gib:
        yield failure(
            _CHECK,
            f"{uri} has {size_gib:.1f} GiB of compressed layers, and a root volume of {root_gib} GiB leaves {room_gib} "
            f"beside the machine image",
            value=round(size_gib, 1),
            limit=room_gib,
            why="docker unpacks the layers onto the root volume, where they take more",
            next_step="raise volumes.root_gib in the plan, or build a smaller image",
        )
        return
    pull_s = least_pull_s(context.plan.node, context.plan.volumes, compressed_gib=size_gib)
    yield passed(
        _CHECK,
        f"{uri} is there; {size_gib:.1f} GiB of compressed layers for {room_gib} GiB of root volume beside the machine "
        f"image; each new node takes at least {pull_s / 60:.1f} min to pull it, and then checks its Python and torch",
        value=uri,
    )
