"""Copies a run's newest valid checkpoint and its ledger from one region's bucket to another's, inside S3.

No node is paid while the copy runs, no node needs rights on another stack's bucket and key, and the old stack may go
at once. Within a region nothing moves: another plan of the same stack reads the same bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from boto3.s3.transfer import TransferConfig, create_transfer_manager

from bootstrap.contract.checkpoint import ENGINE_PREFIX, MANIFEST_NAME, STEP_PREFIX, ManifestError, read_contents
from optimizer.aws import clients
from optimizer.aws.paging import list_objects, read_object
from optimizer.commands.output import say
from optimizer.contract.errors import GpufleetError
from optimizer.contract.units import GIB

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from infra.naming import Names

PART_BYTES = 256 * 2**20
# The full-object checksum that the nodes' client writes:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
CHECKSUM = {"ChecksumAlgorithm": "CRC64NVME"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Objects to carry, by key below the prefix with their bytes, and which is the manifest; None: no checkpoint."""

    objects: Mapping[str, int]
    manifest: str | None
    step: int

    @property
    def gib(self) -> float:
        """Size of all objects."""
        return sum(self.objects.values()) / GIB


def find_carried(client: S3Client, bucket: str, prefix: str) -> Carried:
    """Find the newest checkpoint whose manifest is valid and whose files are whole, and all that is no checkpoint.

    Checkpoints that are passed over are named. Nodes check the content of files when they load them.
    """
    sizes = _list_sizes(client, bucket, prefix)
    other = {key: size for key, size in sizes.items() if not _is_checkpoint(key)}
    rank, newest = (-1, 0.0, ""), Carried(objects=other, manifest=None, step=0)
    for key in sizes.keys() - other.keys():
        folder, _, name = key.rpartition("/")
        if name != MANIFEST_NAME:
            continue
        try:
            contents = read_contents(folder, read_object(client, bucket, f"{prefix}/{key}"))
            if contents is None or (contents.step, contents.created_unix_s, folder) < rank:
                continue
            files = {f"{folder}/{file}": size for file, size in contents.files.items()}
            if wrong := [file for file, size in files.items() if sizes.get(file) != size]:
                raise ManifestError(f"{wrong[0]} has {sizes.get(wrong[0], 0)} bytes, not its manifest's")
        except ManifestError as error:
            say(f"note: passed over, not valid: {folder}: {error}", err=True)
            continue
        rank = contents.step, contents.created_unix_s, folder
        newest = Carried(objects={**other, **files, key: sizes[key]}, manifest=key, step=contents.step)
    return newest


def _list_sizes(client: S3Client, bucket: str, prefix: str) -> dict[str, int]:
    listed = list_objects(client, bucket, f"{prefix}/")
    return {item["Key"].removeprefix(f"{prefix}/"): item["Size"] for item in listed}


def _is_checkpoint(key: str) -> bool:
    folder = key.partition("/")[0]
    return bool(STEP_PREFIX.match(folder) or ENGINE_PREFIX.match(folder))


def copy(source: Names, target: Names, carried: Carried, show: Callable[[str], None]) -> None:
    """Copy what the target's bucket lacks, the manifest last.

    S3 encrypts the copies with the key of the target bucket. Nothing in the source changes, and a second call goes on
    where one ended: a checkpoint's file never changes, so one that is there with its size is not copied again.

    Raises:
        GpufleetError: what arrived is not a whole checkpoint.
    """
    prefix, client, reader = source.checkpoint_prefix, clients.s3(target.region), clients.s3(source.region)
    there = _list_sizes(client, target.bucket, prefix)
    missing = [key for key, size in carried.objects.items() if not _is_checkpoint(key) or there.get(key) != size]
    config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=16)
    last = [key for key in missing if key == carried.manifest]
    for keys in ([key for key in missing if key not in last], last):
        with create_transfer_manager(client, config) as manager:
            copies = {}
            for key in keys:
                place = {"Bucket": source.bucket, "Key": f"{prefix}/{key}"}
                copies[key] = manager.copy(place, target.bucket, place["Key"], CHECKSUM, source_client=reader)
            for key, running in copies.items():
                running.result()
                show(f"copied {key}, {carried.objects[key] / GIB:,.2f} of {carried.gib:,.2f} GiB")
    if find_carried(client, target.bucket, prefix).step < carried.step:
        raise GpufleetError(
            f"the checkpoint of step {carried.step:,} is not whole in {target.bucket}",
            why="a run goes on only from a whole checkpoint",
            next_step="run the same command again: it copies anew what has another size",
        )
