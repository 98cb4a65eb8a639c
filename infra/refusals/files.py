"""Refusals of the local files that a stack uploads for its nodes."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from infra.bundle import files_of
from infra.s3_uri import read_s3_prefix

# The archive travels inside the stack's state, which Pulumi reads and writes whole.
TRAIN_DIR_LIMIT_MIB = 10


def train_dir_refusals(folder: Path | None) -> Iterator[str]:
    """Problems of gpufleet:trainDir."""
    if folder is None:
        return
    size = sum(file.stat().st_size for file in files_of(folder))
    if not folder.is_dir():
        yield f"gpufleet:trainDir {folder} is not a folder: name the one with your training code"
    elif not 0 < size <= TRAIN_DIR_LIMIT_MIB * 2**20:
        yield (
            f"gpufleet:trainDir {folder} has {size / 2**20:.1f} MiB of files, the limit is above 0 and at most "
            f"{TRAIN_DIR_LIMIT_MIB}: it is for code; data belongs into a bucket the nodes may read"
        )


def prefix_refusals(key: str, uri: str) -> Iterator[str]:
    """Problems of a prefix that becomes a resource of the nodes' policy: no wildcard may widen it."""
    if not uri or re.fullmatch(r"/[\w./=+-]*", uri) or read_s3_prefix(uri):
        return
    yield (
        f"gpufleet:{key} is {uri!r}: name an S3 prefix like s3://my-bucket/name (letters, digits and ._=+- between "
        "slashes), or a folder of the nodes like /mnt/nvme/name"
    )


def wheels_refusals(file: Path | None, cpu_architecture: str) -> Iterator[str]:
    """Problems of gpufleet:wheels on nodes of a CPU architecture."""
    if file is None:
        return
    try:
        with tarfile.open(file, "r:") as archive:
            wheels = [name.removeprefix("./") for name in archive.getnames() if name.endswith(".whl")]
    except (OSError, tarfile.TarError) as error:
        yield f"gpufleet:wheels {file} cannot be read as an uncompressed tar: {error}"
        return
    # The nodes look for the wheels at the top of the archive.
    torch = next((name for name in wheels if name.startswith("torch-")), None)
    # A wheel's last tag is its platform: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    machine = {"arm64": "aarch64"}.get(cpu_architecture, cpu_architecture)
    if torch is None:
        yield (
            f"gpufleet:wheels is {file}, with {len(wheels)} wheels and none of torch at its top: it must hold every "
            "wheel of bootstrap/requirements-node.txt (docs/bootstrap.md, 'Wheels for private subnets')"
        )
    elif not torch.endswith(f"{machine}.whl"):
        yield (
            f"gpufleet:wheels has {torch}, and the plan's nodes are {machine}: get the wheels of that platform "
            "(docs/bootstrap.md, 'Wheels for private subnets')"
        )
