"""The machine image that a plan's nodes boot: a Deep Learning AMI by instance type, or the user's own."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import Literal

import pulumi_aws as aws

from infra.bundle import SOURCE
from infra.places import fitting
from infra.settings import ConfigError, StackSettings
from optimizer.contract.plan import FleetPlan, describe_unbootable, describe_undriven

ImageKind = Literal["dlami", "custom"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dlami:
    """One of AWS's Deep Learning AMIs, in all its releases."""

    type: str
    architecture: str
    torch: bool
    ofi_nccl: str  # version of aws-ofi-nccl
    families: frozenset[str] = frozenset()

    @property
    def parameter(self) -> str:
        """SSM parameter with the id of the newest release in each region."""
        # Named after the image: https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html
        return f"/aws/service/deeplearning/ami/{self.architecture}/{self.type}/latest/ami-id"


_PYTORCH, _BASE = "oss-nvidia-driver-gpu-pytorch-2.11-ubuntu-24.04", "base-oss-nvidia-driver-gpu-ubuntu-24.04"
# With torch 2.11 in /opt/pytorch. The families are "supported_ec2_instances" of the release notes, read 2026-11-23; a
# family that the notes do not name (G7, G7e, P6-B300) boots the base image.
# Driver 595.91.07, EFA 1.47.0, aws-ofi-nccl 1.18.0, as in PyTorch 2.12's image of 2026-08-24:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpupt211oss-ul2404-2026-08-17.html
# Driver 595.91.07; P6e-GB200 is named too, but no EFA version, so it boots the base image:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpupt211ossarm64-ul2404-2026-10-09.html
WITH_TORCH = {
    "x86_64": Dlami(
        type=_PYTORCH,
        architecture="x86_64",
        torch=True,
        ofi_nccl="1.18.0",
        families=frozenset(["g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"]),
    ),
    "arm64": Dlami(type=_PYTORCH, architecture="arm64", torch=True, ofi_nccl="1.21.1", families=frozenset({"g5g"})),
}
# With driver, CUDA and EFA, without torch. Driver 595.91.07, CUDA 12.8 to 13.2, EFA 1.50.0, aws-ofi-nccl 1.21.1, Python
# 3.12; x86_64's names G7, G7e and P6-B300, arm64's P6e-GB200:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpubaseoss-ul2404-2026-09-16.html
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpubaseossarm64-ul2404-2026-10-08.html
WITHOUT_TORCH = {
    name: Dlami(type=_BASE, architecture=name, torch=False, ofi_nccl="1.21.1") for name in ("x86_64", "arm64")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A machine image. A "custom" one, derived from a Deep Learning AMI, may have other versions."""

    id: str
    name: str
    kind: ImageKind
    root_device: str
    other_devices: tuple[str, ...]  # of its further volumes


def has_fault(software: str, version: str) -> bool:
    """True for a version that bootstrap/known-bad.csv names: a gang that talks over EFA cannot train with it."""
    with (SOURCE / "known-bad.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["software"] == software]
    return any(_parts(row["first"]) <= _parts(version) < _parts(row["fixed"]) for row in rows)


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def dlami_of(plan: FleetPlan, *, is_parent: bool = False) -> Dlami:
    """Deep Learning AMI for ``plan`` without amiId and amiName; ``is_parent``: from which the user's own derives.

    Raises:
        ConfigError: none drives the plan's GPUs.
    """
    node = plan.node
    other = "name an image that drives it in gpufleet:amiName, or give your own in gpufleet:amiId"
    if undriven := describe_undriven(node.gpu, node.gpu_count):
        raise ConfigError(f"{plan.instance_type} {undriven}; {other}")
    with_torch = WITH_TORCH[node.cpu_architecture]
    others = (alternate.instance_type for alternate in fitting(plan))
    types = (plan.instance_type, *others)
    is_supported = all(name.partition(".")[0] in with_torch.families for name in types)
    # The set-up renews an own image's EFA software (bootstrap/steps/install-efa.sh).
    talks_over_efa = plan.node_count > 1 and plan.node.efa_cards > 0 and not is_parent
    if is_supported and not (talks_over_efa and has_fault("aws-ofi-nccl", with_torch.ofi_nccl)):
        return with_torch
    return WITHOUT_TORCH[node.cpu_architecture]


def brings_torch(settings: StackSettings) -> bool:
    """True if the training's image has torch; amiId is taken for a child of AWS's image for the type."""
    if settings.image:
        return True  # the container does
    if settings.ami_name:
        return "PyTorch" in settings.ami_name
    try:
        return dlami_of(settings.plan, is_parent=bool(settings.ami_id)).torch
    except ConfigError:
        return False


def look_up(settings: StackSettings) -> Image:
    """Find the image of the plan in its region.

    Raises:
        ConfigError: the image does not fit the plan, or cannot boot the steps.
    """
    plan = settings.plan
    by, wanted = _wanted(settings)
    # Without most_recent, two images of one name are an error. A running stack must find its image once deprecated.
    ami = aws.ec2.get_ami(
        owners=None if settings.ami_id else ["amazon"],
        include_deprecated=True,
        filters=[{"name": by, "values": [wanted]}],
    )
    if ami.architecture != plan.node.cpu_architecture:
        raise ConfigError(
            f"AMI {wanted!r} is for {ami.architecture}, and {plan.instance_type} is {plan.node.cpu_architecture}: "
            f"choose an image of that architecture with gpufleet:amiName or gpufleet:amiId"
        )
    sizes = {item.device_name: int(item.ebs.get("volume_size") or 0) for item in ami.block_device_mappings if item.ebs}
    if (size_gib := sizes.pop(ami.root_device_name, 0)) > plan.volumes.root_gib:
        raise ConfigError(
            f"AMI {wanted!r} needs a root volume of {size_gib} GiB, and the plan has volumes.root_gib "
            f"{plan.volumes.root_gib}: a volume cannot be smaller than its snapshot"
        )
    if fault := describe_unbootable(ami.name, ami.image_owner_alias or ami.owner_id):
        raise ConfigError(
            f"AMI {ami.name!r} ({ami.id}) {fault}. Name one in gpufleet:amiName, or build your own from one (EC2 Image "
            "Builder, CreateImage) and set gpufleet:amiId"
        )
    kind: ImageKind = "custom" if settings.ami_id else "dlami"
    return Image(id=ami.id, name=ami.name, kind=kind, root_device=ami.root_device_name, other_devices=tuple(sizes))


def _wanted(settings: StackSettings) -> tuple[str, str]:
    """Filter of DescribeImages, and its value."""
    if settings.ami_id:
        return "image-id", settings.ami_id
    if settings.ami_name:
        return "name", settings.ami_name
    plan, pinned = settings.plan, settings.dlami
    parameter = dlami_of(plan).parameter
    if pinned is None:
        return "image-id", str(aws.ssm.get_parameter(name=parameter).value)
    if (pinned.region, pinned.parameter) != (plan.region, parameter):
        raise ConfigError(
            f"gpufleet:dlami is {pinned.id} of {pinned.parameter} in {pinned.region}, and the plan's nodes need "
            f"{parameter} in {plan.region}: `gpufleet stack set PLAN --stack {settings.stack}` writes both"
        )
    return "image-id", pinned.id
