"""The machine image that a plan's nodes boot, by exact name.

AWS's SSM parameters name only the newest release: a node that is replaced weeks later would run another driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pulumi_aws as aws

from infra.kubernetes.constants import EKS_RELEASE_VERSION, KUBERNETES_VERSION
from infra.settings import ConfigError, Platform, Settings
from optimizer.plan import FleetPlan

# Released 2026-10-08 with driver 595.91.07, CUDA 12.8 to 13.2, EFA 1.50.0, aws-ofi-nccl 1.21.1, Python 3.12; arm64's
# notes, read 2026-11-21:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpubaseossarm64-ul2404-2026-10-08.html
PINNED = {
    "x86_64": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261006",
    "arm64": "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261006",
}
ImageKind = Literal["dlami", "custom", "eks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A machine image. A "custom" one may lack driver, CUDA, NCCL and EFA, which the bootstrap then installs."""

    id: str
    name: str
    kind: ImageKind
    root_device: str


def pinned_name(plan: FleetPlan, platform: Platform = "ec2") -> str:
    """Name of the image for ``plan`` when neither amiId nor amiName is set."""
    node = plan.node
    if platform == "eks":
        date = EKS_RELEASE_VERSION.rpartition("-")[2]
        return f"amazon-eks-node-al2023-{node.cpu_architecture}-nvidia-{KUBERNETES_VERSION}-v{date}"
    other = "name an image that drives it in gpufleet:amiName, or give your own in gpufleet:amiId"
    if node.gpu == "V100":
        # Volta has no GSP, which NVIDIA's open kernel modules need: https://github.com/NVIDIA/open-gpu-kernel-modules
        raise ConfigError(
            f"{plan.instance_type} has V100 GPUs; the pinned Deep Learning AMI has NVIDIA's open driver, "
            f"which starts with Turing; {other}"
        )
    if node.gpu_count < 1:
        raise ConfigError(
            f"{plan.instance_type} has {node.gpu_count:g} of a GPU; a fractional GPU needs NVIDIA's vGPU "
            f"(GRID) driver, which the pinned Deep Learning AMI does not have "
            f"(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/install-nvidia-driver.html); {other}"
        )
    return PINNED[node.cpu_architecture]


def look_up(settings: Settings) -> Image:
    """Find the image of the plan in its region."""
    plan = settings.plan
    by, wanted = "image-id", settings.ami_id
    if not wanted:
        by, wanted = "name", settings.ami_name or pinned_name(plan, settings.platform)
    # Without most_recent, two images of one name are an error. A running stack must find its image once deprecated.
    ami = aws.ec2.get_ami(
        owners=None if settings.ami_id else ["amazon"],
        include_deprecated=True,
        filters=[aws.ec2.GetAmiFilterArgs(name=by, values=[wanted])],
    )
    if ami.architecture != plan.node.cpu_architecture:
        raise ConfigError(
            f"AMI {wanted!r} is for {ami.architecture}, and {plan.instance_type} is {plan.node.cpu_architecture}: "
            f"choose an image of that architecture with gpufleet:amiName or gpufleet:amiId"
        )
    for mapping in ami.block_device_mappings:
        size_gib = int(mapping.ebs.get("volume_size") or 0)
        if mapping.device_name == ami.root_device_name and size_gib > plan.volumes.root_gib:
            raise ConfigError(
                f"AMI {wanted!r} needs a root volume of {size_gib} GiB, and the plan has volumes.root_gib "
                f"{plan.volumes.root_gib}: a volume cannot be smaller than its snapshot"
            )
    kind: ImageKind = "eks" if settings.platform == "eks" else "custom" if settings.ami_id else "dlami"
    return Image(id=ami.id, name=ami.name, kind=kind, root_device=ami.root_device_name)
