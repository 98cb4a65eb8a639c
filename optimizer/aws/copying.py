"""Copies a run's newest valid checkpoint and its ledger from one region's bucket to another's, inside S3.

New nodes could read the old bucket: their gateway endpoint reaches its own region alone, an interface endpoint other
regions, too (https://docs.aws.amazon.com/vpc/latest/privatelink/aws-services-cross-region-privatelink-support.html).
The copy is better: no node is paid while it runs, the transfer between the regions costs the same and no endpoint an
hour, no node may read the bucket and use the key of another stack, and the old stack may go at once, not only after
the new one's first checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from boto3.s3.transfer import TransferConfig, create_transfer_manager

from bootstrap.contract.checkpoint import (
    ENGINE_PREFIX,
    MANIFEST_NAME,
    STEP_PREFIX,
    Contents,
    ManifestError,
    read_contents,
)
from optimizer.aws.paging import list_objects, read_object
from optimizer.contract.errors import GpufleetError
from optimizer.contract.units import GIB

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART_BYTES = 256 * 2**20
# The full-object checksum that the nodes' client writes:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
CHECKSUM = {"ChecksumAlgorithm": "CRC64NVME"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Objects to carry, by key below the prefix with their bytes, and which is the manifest; None: no checkpoint."""

    objects: Mapping[str, int]
    manifest: str | None
    step: int | None
    faults: tuple[str, ...]  # of newer checkpoints that are passed over

    @property
    def gib(self) -> float:
        """Size of all objects."""
        return sum(self.objects.values()) / GIB


def find_carried(client: S3Client, bucket: str, prefix: str) -> Carried:
    """Find the newest checkpoint whose manifest is valid and whose files are whole, and all that is no checkpoint.

    Nodes check the content of files against the manifest when they load them.
    """
    sizes = _list_sizes(client, bucket, prefix)
    other = {key: size for key, size in sizes.items() if not _is_checkpoint(key)}
    found: list[tuple[Contents, str]] = []
    faults = []
    for key in sizes:
        folder, _, name = key.rpartition("/")
        if name != MANIFEST_NAME or not _is_checkpoint(key):
            continue
        try:
            contents = read_contents(folder, read_object(client, bucket, f"{prefix}/{key}"))
            if contents is None:
                continue
            _check_files(contents, {name: sizes.get(f"{folder}/{name}") for name in contents.files})
            found.append((contents, folder))
        except ManifestError as error:
            faults.append(f"{folder}: {error}")
    if not found:
        return Carried(objects=other, manifest=None, step=None, faults=tuple(faults))
    contents, folder = max(found, key=lambda pair: (pair[0].step, pair[0].created_unix_s, pair[1]))
    manifest = f"{folder}/{MANIFEST_NAME}"
    files = {f"{folder}/{name}": size for name, size in contents.files.items()}
    return Carried(
        objects={**other, **files, manifest: sizes[manifest]},
        manifest=manifest,
        step=contents.step,
        faults=tuple(faults),
    )


def _list_sizes(client: S3Client, bucket: str, prefix: str) -> dict[str, int]:
    listed = list_objects(client, bucket, f"{prefix}/")
    return {item["Key"].removeprefix(f"{prefix}/"): item["Size"] for item in listed}


def _is_checkpoint(key: str) -> bool:
    folder = key.partition("/")[0]
    return bool(STEP_PREFIX.match(folder) or ENGINE_PREFIX.match(folder))


def _check_files(contents: Contents, sizes: Mapping[str, int | None]) -> None:
    for name, size in contents.files.items():
        if sizes[name] != size:
            got = "is missing" if sizes[name] is None else f"has {sizes[name]} bytes"
            raise ManifestError(f"{name} {got}, and its manifest says {size}")


def copy(
    source: S3Client,
    target: S3Client,
    carried: Carried,
    *,
    from_bucket: str,
    to_bucket: str,
    prefix: str,
    say: Callable[[str], None],
) -> int:
    """Copy what the target lacks, the manifest last, and return its bytes.

    S3 encrypts the copies with the key of the target bucket. Nothing in the source changes, and a second call goes on
    where one ended: a checkpoint's file never changes, so one that is there with its size is not copied again.

    Raises:
        GpufleetError: a copy has another size than its source.
    """
    there = _list_sizes(target, to_bucket, prefix)
    missing = {key: size for key, size in carried.objects.items() if not _is_checkpoint(key) or there.get(key) != size}
    total, done = sum(missing.values()), 0

    def copy_all(keys: Sequence[str]) -> None:
        nonlocal done
        config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=16)
        with create_transfer_manager(target, config) as manager:
            copies = {}
            for key in keys:
                place = {"Bucket": from_bucket, "Key": f"{prefix}/{key}"}
                copies[key] = manager.copy(place, to_bucket, place["Key"], CHECKSUM, source_client=source)
            for key, running in copies.items():
                running.result()
                done += missing[key]
                say(f"{done / GIB:,.2f} of {total / GIB:,.2f} GiB are there")
        arrived = _list_sizes(target, to_bucket, prefix)
        for key in keys:
            if arrived.get(key) != missing[key]:
                raise GpufleetError(
                    f"s3://{to_bucket}/{prefix}/{key} is not the same as its source in {from_bucket}",
                    limit=f"{missing[key]} bytes",
                    why="a run goes on only from a whole checkpoint",
                    next_step="run the same command again: it copies the object anew",
                )

    copy_all([key for key in missing if key != carried.manifest])
    if carried.manifest in missing:
        copy_all([carried.manifest])
    return total
