"""Refusals of a plan that reads its data from an FSx for Lustre file system."""

from __future__ import annotations

from collections.abc import Iterator

from infra.s3_uri import read_s3_prefix
from infra.settings import Settings

# PyTorch 2.11 for x86_64, with kernel 6.17 and lustre-client-modules-6.17.0-1020-aws:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpupt211oss-ul2404-2026-08-17.html
WITH_CLIENT = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Ubuntu 24.04) 20260815"


def lustre_refusals(settings: Settings) -> Iterator[str]:
    """Settings that leave the nodes without the file system, its data, or a kernel that can mount it."""
    gib = settings.plan.lustre.storage_gib if settings.plan.lustre else 0
    file_system = f"the plan has an FSx for Lustre file system of {gib} GiB (workload.lustre_gib)"
    without = "or make the plan without workload.lustre_gib: each node copies the data"
    if settings.platform != "ec2":
        yield f"{file_system}, and gpufleet:platform eks mounts none in its pods: use platform ec2, {without}"
    if read_s3_prefix(settings.data) is None:
        yield (
            f"{file_system}, and gpufleet:data is {settings.data or 'not set'}: it would be paid for and empty; "
            f"`pulumi config set gpufleet:data s3://BUCKET/PREFIX`, {without}"
        )
    if not (settings.ami_name or settings.ami_id):
        # The client is a module of one kernel release. Newer releases boot kernel 7.0, for which no notes list one:
        # https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpubaseoss-ul2404-2026-09-16.html
        yield (
            f"{file_system}, and the newest Deep Learning AMI may have no Lustre client for its kernel: name a release "
            "whose notes list lustre-client-modules of its kernel_version, for x86_64 `pulumi config set "
            f'gpufleet:amiName "{WITH_CLIENT}"`, an image of your own with the client in gpufleet:amiId, {without}'
        )
