"""Machine images as EC2, and container images as ECR describes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bootstrap.contract.ecr import EcrImage
from optimizer.aws import clients, errors
from optimizer.contract.units import GIB


def newest(region: str, parameter: str) -> str:
    """Return the image id in a public SSM parameter (ssm:GetParameter); raises boto3's errors."""
    return str(clients.ssm(region).get_parameter(Name=parameter)["Parameter"]["Value"])


# Indexes list one image a platform: https://docs.aws.amazon.com/AmazonECR/latest/userguide/docker-push-multi-architecture-image.html
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# Docker's names of EC2's architectures: https://github.com/opencontainers/image-spec/blob/main/image-index.md
_ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerImage:
    """Digest of an image or index, and compressed size of the layers that a node pulls."""

    digest: str
    size_gib: float


def find_image(image: EcrImage, cpu_architecture: str) -> ContainerImage | str:
    """Find an image and what a node of this architecture pulls of it, or the reason why there is none.

    Calls ecr:BatchGetImage, which pulls need too, so other accounts' images are found as well. Raises boto3's errors.
    https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_BatchGetImage.html
    """
    wanted = {"imageDigest": image.digest} if image.digest else {"imageTag": image.tag}
    name = f"{image.repository} of account {image.account} in {image.region}"
    try:
        found = _get_manifest(image, wanted)
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        return f"there is no repository {name}"
    if found is None:
        return f"repository {name} has no image {image.digest or image.tag}"
    manifest, digest = json.loads(found["imageManifest"]), str(found["imageId"]["imageDigest"])
    if "manifests" in manifest:
        platform = _ARCHITECTURES[cpu_architecture]
        of = next(
            (entry for entry in manifest["manifests"] if entry.get("platform", {}).get("architecture") == platform),
            None,
        )
        part = _get_manifest(image, {"imageDigest": of["digest"]}) if of else None
        if part is None:
            return f"{image.pinned(digest)} has no image for {cpu_architecture} ({platform})"
        manifest = json.loads(part["imageManifest"])
    return ContainerImage(digest=digest, size_gib=sum(int(layer["size"]) for layer in manifest["layers"]) / GIB)


def _get_manifest(image: EcrImage, wanted: dict[str, str]) -> Any | None:
    answer = clients.ecr(image.region).batch_get_image(
        registryId=image.account, repositoryName=image.repository, imageIds=[wanted],
        acceptedMediaTypes=[*_INDEX_TYPES, *_MANIFEST_TYPES],
    )  # fmt: skip
    return next(iter(answer["images"]), None)
