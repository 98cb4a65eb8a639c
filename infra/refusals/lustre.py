"""Refusals of a stack that reads its data from an FSx for Lustre file system, its own or an existing one."""

from __future__ import annotations

from collections.abc import Iterator

from infra.s3_uri import read_s3_prefix
from infra.settings import LUSTRE_FOLDER, StackSettings

# PyTorch 2.11 for x86_64, with kernel 6.17 and lustre-client-modules-6.17.0-1020-aws:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpupt211oss-ul2404-2026-08-17.html
WITH_CLIENT = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Ubuntu 24.04) 20260815"


def lustre_refusals(settings: StackSettings) -> Iterator[str]:
    """Settings that leave the nodes without the file system, its data, or a kernel that can mount it."""
    gib = settings.plan.lustre.storage_gib if settings.plan.lustre else 0
    file_system = f"the plan has an FSx for Lustre file system of {gib} GiB (workload.lustre_gib)"
    without = "or make the plan without workload.lustre_gib: each node copies the data"
    if read_s3_prefix(settings.data) is None:
        yield (
            f"{file_system}, and gpufleet:data is {settings.data or 'not set'}: it would be paid for and empty; "
            f"`pulumi config set gpufleet:data s3://BUCKET/PREFIX`, {without}"
        )
    yield from _image_refusal(settings, f"{file_system}, and", f", {without}")


def file_system_refusals(settings: StackSettings) -> Iterator[str]:
    """Settings that leave the nodes without the existing file system or its data."""
    existing, without = "gpufleet:fileSystem is set", "or `pulumi config rm gpufleet:fileSystem`"
    if settings.plan.lustre:
        yield (
            f"{existing}, and the plan has a file system of its own for the same folder: make the plan without "
            f"workload.lustre_gib, {without}"
        )
    if not settings.vpc_id:
        yield (
            f"{existing}, and a VPC of the stack's own does not reach it: set gpufleet:vpcId to its VPC and "
            f"gpufleet:subnetIds to a subnet in its zone, {without}"
        )
    if not f"{settings.data}/".startswith(f"{LUSTRE_FOLDER}/"):
        yield (
            f"{existing}, and gpufleet:data is {settings.data or 'not set'}: name the data's folder of it, "
            f"`pulumi config set gpufleet:data {LUSTRE_FOLDER}/FOLDER`, {without}"
        )
    yield from _image_refusal(settings, f"{existing}, and", f", {without}")


def _image_refusal(settings: StackSettings, what: str, otherwise: str) -> Iterator[str]:
    if not (settings.ami_name or settings.ami_id):
        # The client is a module of one kernel release. Newer releases boot kernel 7.0, for which no notes list one:
        # https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpubaseoss-ul2404-2026-09-16.html
        yield (
            f"{what} the newest Deep Learning AMI may have no Lustre client for its kernel: name a release "
            "whose notes list lustre-client-modules of its kernel_version, for x86_64 `pulumi config set "
            f'gpufleet:amiName "{WITH_CLIENT}"`, an image of your own with the client in gpufleet:amiId{otherwise}'
        )
