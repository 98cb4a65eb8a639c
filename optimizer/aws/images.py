"""Machine images as EC2, and container images as ECR describes them."""

from __future__ import annotations

import json
from typing import Any

from bootstrap.contract.ecr import EcrImage
from optimizer.aws import clients, errors
from optimizer.contract.units import GIB


def newest(region: str, parameter: str) -> str:
    """Return the image id in a public SSM parameter (ssm:GetParameter); raises boto3's errors."""
    return str(clients.ssm(region).get_parameter(Name=parameter)["Parameter"]["Value"])


# Indexes list one image a platform: https://docs.aws.amazon.com/AmazonECR/latest/userguide/docker-push-multi-architecture-image.html
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
# Docker's names of EC2's architectures: https://github.com/opencontainers/image-spec/blob/main/image-index.md
_ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}


def find_image(image: EcrImage, cpu_architecture: str) -> float | str:
    """Return the GiB of compressed layers that a node of this architecture pulls, or the reason why there are none.

    Calls ecr:BatchGetImage, which pulls need too, so other accounts' images are found as well. Raises boto3's errors.
    https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_BatchGetImage.html
    """
    name = f"{image.repository} of account {image.account} in {image.region}"
    try:
        manifest = _read_manifest(image, image.digest)
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        return f"there is no repository {name}"
    if manifest is None:
        return f"repository {name} has no image {image.digest}"
    if "manifests" in manifest:
        platform = _ARCHITECTURES[cpu_architecture]
        parts = {part.get("platform", {}).get("architecture"): part["digest"] for part in manifest["manifests"]}
        manifest = _read_manifest(image, parts[platform]) if platform in parts else None
        if manifest is None:
            return f"{image.digest} of {name} has no image for {cpu_architecture} ({platform})"
    return float(sum(int(layer["size"]) for layer in manifest["layers"]) / GIB)


def _read_manifest(image: EcrImage, digest: str) -> Any | None:
    answer = clients.ecr(image.region).batch_get_image(
        registryId=image.account, repositoryName=image.repository, imageIds=[{"imageDigest": digest}],
        acceptedMediaTypes=[*_INDEX_TYPES, *_MANIFEST_TYPES],
    )  # fmt: skip
    return next((json.loads(found["imageManifest"]) for found in answer["images"]), None)
