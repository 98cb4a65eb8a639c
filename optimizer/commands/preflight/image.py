"""Check that an own machine image can boot, and that the image that the training runs in exists and fits the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bootstrap.contract.ecr import read_ecr_image
from infra.images import dlami_of
from optimizer.aws.images import find_image, newest
from optimizer.commands.preflight.model import Context, Finding, Unknown, failure, find, passed
from optimizer.contract.plan import describe_unbootable
from optimizer.economics.staging import IMAGE_GIB, least_pull_s


def check_image(context: Context) -> Iterator[Finding]:
    """Trace a user's own image to the image it was made from; `pulumi up` judges everything else about an image."""
    source, names = context.settings.ami_id, list[str]()
    # A private source, one that is gone and one of another region are not found:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/identify-source-ami-used-to-create-new-ami.html
    while source and (found := describe_images(context, source)):
        (root,) = found
        names.append(repr(root["Name"]))
        source = root.get("SourceImageId", "")
    if not names:
        return
    text = f"{context.settings.ami_id} {' of '.join(names)}"
    if fault := describe_unbootable(root["Name"], root.get("ImageOwnerAlias") or root.get("OwnerId", "")):
        yield failure(
            f"{text} {fault}",
            why="every node would fail, be paid for and be replaced",
            next_step="pulumi config set gpufleet:amiId ID, of an image made from a Deep Learning AMI",
        )
    else:
        is_known = root["Name"].startswith("Deep Learning ")
        yield passed(text if is_known else f"{text}, an image of your own: it must come from a Deep Learning AMI")


def wanted_image(context: Context) -> str:
    """Return the id or the exact name of the nodes' image; ConfigError where no image drives the plan's GPUs."""
    settings = context.settings
    pinned = settings.dlami.id if settings.dlami else ""
    return settings.ami_id or settings.ami_name or pinned or newest(context.region, dlami_of(context.plan).parameter)


def describe_images(context: Context, wanted: str) -> list[Any]:
    """Describe the images of an id or an exact name."""
    chosen: dict[str, Any] = {"ImageIds": [wanted]}
    if not wanted.startswith("ami-"):
        chosen = {"Owners": ["amazon"], "Filters": [{"Name": "name", "Values": [wanted]}]}
    images = find(lambda: list(context.ec2.describe_images(IncludeDeprecated=True, **chosen)["Images"]))
    return [] if isinstance(images, Unknown) else images


def check_container_image(context: Context) -> Iterator[Finding]:
    """Look for the image of gpufleet:image, and for room on the root volume, where docker keeps its layers."""
    uri = context.settings.image
    image = read_ecr_image(uri)
    if image is None:
        return  # none is set, or the configuration's check refuses it
    found = find_image(image, context.plan.node.cpu_architecture)
    if isinstance(found, str):
        yield failure(
            found,
            value=uri,
            why="no node could pull it: the run would end in its set-up",
            next_step="push it, then pulumi config set gpufleet:image URI@DIGEST, which docker push prints",
        )
        return
    root_gib, size_gib = context.plan.volumes.root_gib, found
    room_gib = root_gib - IMAGE_GIB
    if size_gib > room_gib:
        yield failure(
            f"{uri} has {size_gib:.1f} GiB of compressed layers, and a root volume of {root_gib} GiB leaves {room_gib} "
            f"beside the machine image",
            value=round(size_gib, 1),
            limit=room_gib,
            why="docker unpacks the layers onto the root volume, where they take more",
            next_step="build a smaller image",
        )
        return
    pull_s = least_pull_s(context.plan.node, context.plan.volumes, compressed_gib=size_gib)
    yield passed(
        f"{uri} is there; {size_gib:.1f} GiB of compressed layers for {room_gib} GiB of root volume beside the machine "
        f"image; each new node takes at least {pull_s / 60:.1f} min to pull it, and then checks its Python and torch",
        value=uri,
    )
