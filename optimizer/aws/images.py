"""Machine images as AWS describes them: the newest Deep Learning AMI, an image's age, and its source images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from optimizer.aws import clients

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import FilterTypeDef

# Age of an image at which `status` warns. AWS patches its images nightly, and lists drivers and kernels by release:
# https://docs.aws.amazon.com/dlami/latest/devguide/dlami-release-archive-ubuntu.html
MAX_AGE_DAYS = 60
# An image of an image of an image: more copies than people make.
_MAX_COPIES = 8


def newest(region: str, parameter: str) -> str:
    """Return the image id in a public SSM parameter (ssm:GetParameter); raises boto3's errors."""
    return str(clients.ssm(region).get_parameter(Name=parameter)["Parameter"]["Value"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageAge:
    """An image and its age in days."""

    id: str
    days: int

    @property
    def old(self) -> bool:
        """True from MAX_AGE_DAYS on."""
        return self.days >= MAX_AGE_DAYS


def read_age(ec2: EC2Client, image_id: str, instance_ids: Sequence[str], now: datetime) -> ImageAge | None:
    """Return the age of an image, by default the instances'; None without either, or where AWS has no date.

    Raises boto3's errors.
    """
    if not image_id and instance_ids:
        # A filter passes over instances that EC2 does not know yet, and takes 200 values:
        # https://github.com/apache/druid/pull/1954
        known: list[FilterTypeDef] = [{"Name": "instance-id", "Values": list(instance_ids[:100])}]
        reservations = ec2.describe_instances(Filters=known)["Reservations"]
        image_id = next((reservation["Instances"][0].get("ImageId", "") for reservation in reservations), "")
    if not image_id:
        return None
    images = ec2.describe_images(ImageIds=[image_id], IncludeDeprecated=True)["Images"]
    created = next((image.get("CreationDate", "") for image in images), "")
    return ImageAge(id=image_id, days=(now - datetime.fromisoformat(created)).days) if created else None


def ancestors(ec2: EC2Client, image: Any) -> Iterator[Any]:
    """Yield the image, its source, the source's source, as far as AWS shows them; raises boto3's errors.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/identify-source-ami-used-to-create-new-ami.html
    """
    for _ in range(_MAX_COPIES):
        yield image
        # A copy from another region keeps the source's id, which this region does not know.
        source = image.get("SourceImageId")
        if not source or image.get("SourceImageRegion", ec2.meta.region_name) != ec2.meta.region_name:
            return
        filters: Any = [{"Name": "image-id", "Values": [source]}]
        sources = ec2.describe_images(Filters=filters, IncludeDeprecated=True)["Images"]
        if not sources:
            return
        image = sources[0]
