"""Container images of ECR's private registries, as their URIs name them."""

from __future__ import annotations

import re
from dataclasses import dataclass

# ecr.api signs in, ecr.dkr hands out manifests; layers come from S3:
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html
ENDPOINTS = ("ecr.api", "ecr.dkr")
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/Registries.html
# https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_CreateRepository.html
# https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_ImageIdentifier.html
_URI = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/"
    r"(?P<repository>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"@(?P<digest>sha256:[0-9a-f]{64})",
    re.ASCII,
)


@dataclass(frozen=True)
class EcrImage:
    """An image by its digest, which no push can move."""

    account: str
    region: str
    repository: str
    digest: str


def read_ecr_image(uri: str) -> EcrImage | None:
    """Parts of a URI like ``111122223333.dkr.ecr.us-east-1.amazonaws.com/train@sha256:…``; None for anything else."""
    match = _URI.fullmatch(uri)
    return EcrImage(**{name: match[name] for name in EcrImage.__dataclass_fields__}) if match else None
