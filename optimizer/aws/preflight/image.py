"""Whether the machine image is there, and fits the node."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from optimizer.aws import errors
from optimizer.aws.preflight.model import Context, Row

_CHECK = "image"
_OTHER = "pulumi config set gpufleet:amiName NAME, an exact name of an AMI by Amazon, or gpufleet:amiId of your own"


def check_image(context: Context) -> Iterator[Row]:
    """DescribeImages of the exact image, deprecated ones too: a running stack must still find the one it is on."""
    target = context.target
    if target.ami_problem:
        yield Row(check=_CHECK, level="error", found=target.ami_problem, why="no node could be made", next_step=_OTHER)
        return
    ec2 = context.ec2
    wanted = target.ami_id or target.ami_name
    try:
        if target.ami_id:
            answer = ec2.describe_images(ImageIds=[wanted], IncludeDeprecated=True)
        else:
            answer = ec2.describe_images(
                Owners=["amazon"], IncludeDeprecated=True, Filters=[{"Name": "name", "Values": [wanted]}]
            )
        images: list[Any] = list(answer["Images"])
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        images = []
    if len(images) != 1:
        yield Row(
            check=_CHECK,
            level="error",
            found=f"{len(images) or 'no'} image{'s' * (len(images) > 1)} {wanted!r} in {context.region}",
            value=len(images),
            limit=1,
            why="the program takes exactly one, by name or id, and never the newest",
            next_step=_OTHER,
        )
        return
    (image,) = images
    fits = True
    for problem in _problems(context, image):
        fits = False
        yield problem
    if fits:
        yield Row(
            check=_CHECK,
            level="ok",
            found=f"{image['ImageId']} {image['Name']!r}, {image['Architecture']}, available",
            value=image["ImageId"],
        )


def _problems(context: Context, image: Any) -> Iterator[Row]:
    planned = context.plan.node.cpu_architecture
    name = image["Name"]
    if image["Architecture"] != planned:
        yield Row(
            check=_CHECK,
            level="error",
            found=f"{name!r} is for {image['Architecture']}, and {context.plan.instance_type} is {planned}",
            value=image["Architecture"],
            limit=planned,
            why="EC2 refuses the launch",
            next_step=_OTHER,
        )
    if image["State"] != "available":
        yield Row(
            check=_CHECK,
            level="error",
            found=f"{name!r} is {image['State']}",
            value=image["State"],
            limit="available",
            why="no instance can be launched from it",
            next_step=_OTHER,
        )
    root_gib, needed_gib = context.plan.volumes.root_gib, _root_gib(image)
    if root_gib < needed_gib:
        yield Row(
            check=_CHECK,
            level="error",
            found=f"{name!r} needs a root volume of {needed_gib} GiB, and the plan has {root_gib}",
            value=root_gib,
            limit=needed_gib,
            why="a volume cannot be smaller than its snapshot",
            next_step="raise volumes.root_gib in the plan, or choose a smaller image",
        )
    if context.plan.node.efa_cards and not image.get("EnaSupport"):
        yield Row(
            check=_CHECK,
            level="error",
            found=f"{name!r} is not registered with ENA support",
            why="types with EFA start only from images that have it",
            next_step=_OTHER,
        )
    deprecated = image.get("DeprecationTime")
    if deprecated and datetime.fromisoformat(deprecated) <= context.now:
        yield Row(
            check=_CHECK,
            level="warning",
            found=f"{name!r} is deprecated since {deprecated[:10]}",
            value=deprecated,
            why="it still launches and gets no fixes, and its owner may withdraw it: a node replaced then has no image "
            "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ami-deprecate.html)",
            next_step=_OTHER,
        )
    if context.target.ami_id and any(mapping.get("Ebs", {}).get("Encrypted") for mapping in _volumes(image)):
        yield Row(
            check=_CHECK,
            level="warning",
            found=f"the snapshots of {name!r} are encrypted",
            value="encrypted",
            why="Auto Scaling must be allowed to use their key, and it is not this stack's: where it may not, every "
            "launch fails with Client.InternalError "
            "(https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html)",
            next_step="let the stack's service-linked role use that key, or copy the image unencrypted",
        )


def _volumes(image: Any) -> list[Any]:
    return list(image.get("BlockDeviceMappings", ()))


def _root_gib(image: Any) -> int:
    return max(
        (
            int(mapping.get("Ebs", {}).get("VolumeSize", 0))
            for mapping in _volumes(image)
            if mapping.get("DeviceName") == image.get("RootDeviceName")
        ),
        default=0,
    )
