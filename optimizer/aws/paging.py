"""Read lists and objects of AWS whole: all pages of an answer, a bucket's listing, an object's content.

Nothing is imported, so that a parser of saved answers beside its call needs no botocore.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_s3 import S3Client


def pages(client: Any, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
    """Yield what AWS lists under ``key`` on all pages of its answer."""
    for page in client.get_paginator(operation).paginate(**arguments):
        yield from page[key]


def instances(client: EC2Client, **arguments: Any) -> Iterator[Any]:
    """Yield the instances of DescribeInstances."""
    for reservation in pages(client, "describe_instances", "Reservations", **arguments):
        yield from reservation["Instances"]


def filters(values: Mapping[str, Collection[str]]) -> list[dict[str, Any]]:
    """Return the filters of a Describe call, values by name."""
    return [{"Name": name, "Values": sorted(chosen)} for name, chosen in values.items()]


def list_objects(client: S3Client, bucket: str, prefix: str) -> list[Any]:
    """Return the objects whose keys begin with ``prefix``, as S3 lists them."""
    found = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [item for page in found for item in page.get("Contents", ())]


def read_object(client: S3Client, bucket: str, key: str) -> bytes:
    """Return an object's content."""
    return client.get_object(Bucket=bucket, Key=key)["Body"].read()
