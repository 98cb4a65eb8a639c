"""Refusals of the local files that a stack uploads for its nodes."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from infra.bundle import files_of
from infra.s3_uri import read_s3_prefix
from infra.settings import ConfigError
from infra.wheels import Wanted, wheel_names

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


def wheels_refusals(file: Path | None, wanted: Wanted) -> Iterator[str]:
    """Problems of gpufleet:requirements, and of gpufleet:wheels for nodes that need ``wanted``."""
    try:
        missing = wanted.missing_from(wheel_names(file) if file else ())
    except ConfigError as error:
        yield str(error)
    except (OSError, tarfile.TarError) as error:
        yield f"gpufleet:wheels {file} cannot be read as an uncompressed tar: {error}; pack it with `gpufleet wheels`"
    else:
        if file and missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            yield (
                f"gpufleet:wheels {file} has no wheel of {', '.join(missing[:3])}{more} for {wanted.machine}, "
                "which the plan's nodes need: pack it again with `gpufleet wheels`"
            )
