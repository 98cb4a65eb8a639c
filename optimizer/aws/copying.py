"""Copies a run's checkpoint and ledger from one stack's bucket to another's, inside S3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bootstrap.contract.checkpoint import ENGINE_PREFIX, MANIFEST_NAME, STEP_PREFIX, Contents, ManifestError
from bootstrap.contract.checkpoint import read_contents as read_manifest
from optimizer.aws import errors
from optimizer.contract.errors import GpufleetError
from optimizer.contract.units import GIB

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Copies at a time, objects or parts of one.
COPIES = 16
# A larger object is copied in parts. One CopyObject takes 5 GB at most:
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
PART_BYTES = 256 * 2**20
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MOST_PARTS = 10_000
# The full-object checksum that the nodes' client writes; S3 compares it with the parts when a multipart upload ends:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
CHECKSUM: Final = "CRC64NVME"


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

    @property
    def requests(self) -> int:
        """Requests of the copy that S3 bills as writes."""
        return sum(
            1 if size <= PART_BYTES else 2 + math.ceil(size / _part_bytes(size)) for size in self.objects.values()
        )


def find_carried(client: S3Client, bucket: str, prefix: str) -> Carried:
    """Find the newest checkpoint whose manifest is valid and whose files are whole, and all that is no checkpoint.

    Nodes check the content of files against the manifest when they load them.
    """
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    sizes = {one["Key"].removeprefix(f"{prefix}/"): one["Size"] for page in pages for one in page.get("Contents", [])}
    other = {key: size for key, size in sizes.items() if not _is_checkpoint(key)}
    found: list[tuple[Contents, str]] = []
    faults = []
    for key in sizes:
        folder, _, name = key.rpartition("/")
        if name != MANIFEST_NAME or not _is_checkpoint(key):
            continue
        try:
            contents = read_manifest(folder, client.get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read())
            if contents is None:
                continue
            _check_files(contents, {name: sizes.get(f"{folder}/{name}") for name in contents.files})
            found.append((contents, folder))
        except ManifestError as error:
            faults.append(f"{folder}: {error}")
    if not found:
        return Carried(objects=other, manifest=None, step=None, faults=tuple(faults))
    contents, folder = max(found, key=lambda one: (one[0].step, one[0].created_unix_s, one[1]))
    manifest = f"{folder}/{MANIFEST_NAME}"
    files = {f"{folder}/{name}": size for name, size in contents.files.items()}
    return Carried(
        objects={**other, **files, manifest: sizes[manifest]},
        manifest=manifest,
        step=contents.step,
        faults=tuple(faults),
    )


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
    where one ended: an object that is there, with the same size and checksum, is not copied again.

    Raises:
        GpufleetError: a copy has another size or checksum than its source.
    """
    task = _Copy(source=source, target=target, from_bucket=from_bucket, to_bucket=to_bucket)
    keys = [f"{prefix}/{key}" for key in carried.objects if key != carried.manifest]
    with ThreadPoolExecutor(COPIES) as threads:
        done = task.copy_all(threads, keys, say)
        if carried.manifest:
            done += task.copy_all(threads, [f"{prefix}/{carried.manifest}"], say)
    return done


@dataclass(frozen=True, kw_only=True)
class _Copy:
    source: S3Client
    target: S3Client
    from_bucket: str
    to_bucket: str

    def copy_all(self, threads: ThreadPoolExecutor, keys: Iterable[str], say: Callable[[str], None]) -> int:
        heads = list(zip(keys, threads.map(self._head_source, keys), strict=True))
        missing = [one for one, there in zip(heads, threads.map(self._is_there, heads), strict=True) if not there]
        # Parts of one object go through the same threads as small objects.
        small = [one for one in missing if one[1]["ContentLength"] <= PART_BYTES]
        list(threads.map(self._copy_whole, small))
        done, total = (sum(head["ContentLength"] for _, head in some) for some in (small, missing))
        for key, head in missing:
            if (size := head["ContentLength"]) > PART_BYTES:
                say(f"copying {key}, {size / GIB:,.2f} GiB; {done / GIB:,.2f} of {total / GIB:,.2f} GiB are there")
                self._copy_in_parts(threads, key, head)
                done += size
        for one, there in zip(missing, threads.map(self._is_there, missing), strict=True):
            if not there:
                raise GpufleetError(
                    f"s3://{self.to_bucket}/{one[0]} is not the same as its source in {self.from_bucket}",
                    limit="the same size and checksum",
                    why="a run goes on only from a whole checkpoint",
                    next_step="run the same command again: it copies the object anew",
                )
        return sum(int(head["ContentLength"]) for _, head in missing)

    def _head_source(self, key: str) -> Any:
        return self.source.head_object(Bucket=self.from_bucket, Key=key, ChecksumMode="ENABLED")

    def _is_there(self, one: tuple[str, Any]) -> bool:
        key, head = one
        try:
            there: Any = self.target.head_object(Bucket=self.to_bucket, Key=key, ChecksumMode="ENABLED")
        except Exception as error:
            if errors.is_not_found(error) or errors.is_no_object(error):
                return False
            raise
        checksums = _full_checksum(head), _full_checksum(there)
        return there["ContentLength"] == head["ContentLength"] and (None in checksums or checksums[0] == checksums[1])

    def _copy_whole(self, one: tuple[str, Any]) -> None:
        key, head = one
        self.target.copy_object(
            Bucket=self.to_bucket,
            Key=key,
            CopySource={"Bucket": self.from_bucket, "Key": key},
            # Another writer's object of the same name in the meantime is not what was checked.
            CopySourceIfMatch=head["ETag"],
            ChecksumAlgorithm=CHECKSUM,
        )

    def _copy_in_parts(self, threads: ThreadPoolExecutor, key: str, head: Any) -> None:
        place: Any = {"Bucket": self.to_bucket, "Key": key}
        full: Any = {"ChecksumAlgorithm": CHECKSUM, "ChecksumType": "FULL_OBJECT"}
        upload = self.target.create_multipart_upload(**place, **full, Metadata=head["Metadata"])["UploadId"]
        size = head["ContentLength"]
        step = _part_bytes(size)

        def copy_part(number: int) -> Any:
            first = (number - 1) * step
            answer: Any = self.target.upload_part_copy(
                **place,
                UploadId=upload,
                PartNumber=number,
                CopySource={"Bucket": self.from_bucket, "Key": key},
                CopySourceIfMatch=head["ETag"],
                CopySourceRange=f"bytes={first}-{min(first + step, size) - 1}",
            )
            return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

        try:
            parts = list(threads.map(copy_part, range(1, math.ceil(size / step) + 1)))
            known: Any = {f"Checksum{CHECKSUM}": checksum} if (checksum := _full_checksum(head)) else {}
            self.target.complete_multipart_upload(
                **place, UploadId=upload, MultipartUpload={"Parts": parts}, ChecksumType="FULL_OBJECT", **known
            )
        except BaseException:
            # The bucket's lifecycle rule ends uploads that a kill leaves.
            self.target.abort_multipart_upload(**place, UploadId=upload)
            raise


def _part_bytes(size: int) -> int:
    return max(PART_BYTES, math.ceil(size / MOST_PARTS))


def _full_checksum(head: Any) -> str | None:
    """Checksum of a whole object, or None: one over its parts' checksums depends on how it was divided."""
    return head.get(f"Checksum{CHECKSUM}") if head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" else None
