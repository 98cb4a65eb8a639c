"""Check that the machine image exists and fits the node."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

from optimizer.preflight.model import Context, Finding, Unknown, failure, find, passed, problems_or, warning

_OTHER_IMAGE = (
    "pulumi config set gpufleet:amiName NAME, an exact name of an AMI by Amazon, or gpufleet:amiId of your own"
)
_failure = partial(failure, "image", next_step=_OTHER_IMAGE)
_warning = partial(warning, "image")


def check_image(context: Context) -> Iterator[Finding]:
    """Look for the exact image, deprecated ones too: a running stack must still find the image it is on."""
    target = context.target
    if target.ami_problem:
        yield _failure(target.ami_problem, why="no node could be made")
        return
    images = _describe_images(context)
    if len(images) != 1:
        yield _failure(
            f"{len(images) or 'no'} image{'s' * (len(images) > 1)} {target.ami_id or target.ami_name!r} "
            f"in {context.region}",
            value=len(images),
            limit=1,
            why="the program takes exactly one, by name or id, and never the newest",
        )
        return
    (image,) = images
    yield from problems_or(
        _problems(context, image),
        lambda: passed(
            "image", f"{image['ImageId']} {image['Name']!r}, {image['Architecture']}, available", value=image["ImageId"]
        ),
    )


def _describe_images(context: Context) -> list[Any]:
    target = context.target
    wanted: dict[str, Any] = {"ImageIds": [target.ami_id]}
    if not target.ami_id:
        wanted = {"Owners": ["amazon"], "Filters": [{"Name": "name", "Values": [target.ami_name]}]}
    images = find(lambda: list(context.ec2.describe_images(IncludeDeprecated=True, **wanted)["Images"]))
    return [] if isinstance(images, Unknown) else images


def _problems(context: Context, image: Any) -> Iterator[Finding]:
    planned = context.plan.node.cpu_architecture
    name = image["Name"]
    if image["Architecture"] != planned:
        yield _failure(
            f"{name!r} is for {image['Architecture']}, and {context.plan.instance_type} is {planned}",
            value=image["Architecture"],
            limit=planned,
            why="EC2 refuses the launch",
        )
    if image["State"] != "available":
        yield _failure(
            f"{name!r} is {image['State']}",
            value=image["State"],
            limit="available",
            why="no instance can be launched from it",
        )
    volumes = image.get("BlockDeviceMappings", ())
    roots = [volume for volume in volumes if volume.get("DeviceName") == image.get("RootDeviceName")]
    needed_gib = max((int(volume.get("Ebs", {}).get("VolumeSize", 0)) for volume in roots), default=0)
    root_gib = context.plan.volumes.root_gib
    if root_gib < needed_gib:
        yield _failure(
            f"{name!r} needs a root volume of {needed_gib} GiB, and the plan has {root_gib}",
            value=root_gib,
            limit=needed_gib,
            why="a volume cannot be smaller than its snapshot",
            next_step="raise volumes.root_gib in the plan, or choose a smaller image",
        )
    if context.plan.node.efa_cards and not image.get("EnaSupport"):
        yield _failure(
            f"{name!r} is not registered with ENA support",
            why="types with EFA start only from images that have it",
        )
    deprecated = image.get("DeprecationTime")
    if deprecated and datetime.fromisoformat(deprecated) <= context.now:
        yield _warning(
            f"{name!r} is deprecated since {deprecated[:10]}",
            value=deprecated,
            why="it still launches and gets no fixes, and its owner may withdraw it: a node replaced then has no image "
            "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ami-deprecate.html)",
            next_step=_OTHER_IMAGE,
        )
    if context.target.ami_id and any(volume.get("Ebs", {}).get("Encrypted") for volume in volumes):
        yield _warning(
            f"the snapshots of {name!r} are encrypted",
            value="encrypted",
            why="Auto Scaling must be allowed to use their key, and it is not this stack's: where it may not, every "
            "launch fails with Client.InternalError "
            "(https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html)",
            next_step="let the stack's service-linked role use that key, or copy the image unencrypted",
        )
