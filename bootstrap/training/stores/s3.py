"""Checkpoints under ``s3://bucket/prefix``."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from bootstrap.contract.checkpoint import PRUNED, PRUNED_TAG
from bootstrap.training.errors import AlreadyExistsError, CheckpointError, ConfigurationError, InvalidCheckpoint
from bootstrap.training.stores.base import Buffer, byte_views
from bootstrap.training.stores.transfers import (
    BUFFER_BYTES,
    CONNECTIONS,
    RANGE_NOT_SATISFIABLE,
    WRITE_ID,
    Boto3Transfers,
    CrtTransfers,
    TransferError,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Local NVMe for training data staged from S3 (staging.py); default: the system's temporary folder.
SCRATCH_VARIABLE = "GPUFLEET_SCRATCH_DIR"

# boto3's own retries draw their jitter from Python's global random generator, which belongs to the training.
RETRY_PAUSES_S = (0.5, 1.0, 2.0)


class S3Store:
    """``Store`` under a prefix of a bucket; without a key the bucket's default encrypts.

    Needs s3:PutObject, s3:GetObject, s3:DeleteObject, s3:AbortMultipartUpload on the prefix, s3:ListBucket on the
    bucket, and kms:GenerateDataKey, kms:Decrypt on the key; s3:PutObjectTagging for the tag of deleted objects.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        kms_key_id: str | None = None,
        client: S3Client | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        self.uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self.buffer_bytes = BUFFER_BYTES
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._kms_key_id = kms_key_id
        self._connections = connections
        self._client = client or make_client()
        self._tags_deleted = True

    @cached_property
    def _transfers(self) -> CrtTransfers | Boto3Transfers:
        try:
            return CrtTransfers(self._client, self._bucket, connections=self._connections)
        except ImportError:
            return Boto3Transfers(make_client(attempts=4), self._bucket)

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """See ``Store.write``."""
        # The id tells our own earlier attempt, whose answer was lost, from another writer's object.
        write_id = uuid.uuid4().hex
        key = self._prefix + name
        try:
            self._transfers.put(key, byte_views(parts), write_id=write_id, kms_key_id=self._kms_key_id)
        except TransferError as error:
            if self._stored_write_id(name) == write_id:
                return
            if error.status == 412:
                raise AlreadyExistsError(f"{self.uri}/{name} exists, and a checkpoint is never overwritten") from error
            raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error

    def _stored_write_id(self, name: str) -> str | None:
        try:
            head = self._call("read", name, lambda key: self._client.head_object(Bucket=self._bucket, Key=key))
        except (CheckpointError, FileNotFoundError):
            return None
        return head["Metadata"].get(WRITE_ID)

    def read(self, name: str) -> bytes:
        """See ``Store.read``."""
        return self._call(
            "read", name, lambda key: self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        )

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """See ``Store.read_into``."""
        try:
            self._transfers.get(self._prefix + name, offset, into.cast("B"))
        except TransferError as error:
            if error.status == 404:
                raise FileNotFoundError(name) from None
            kind = InvalidCheckpoint if error.status == RANGE_NOT_SATISFIABLE else CheckpointError
            raise kind(f"cannot read {into.nbytes} bytes at {offset} of {self.uri}/{name}: {error}") from error

    def names(self, prefix: str) -> list[str]:
        """See ``Store.names``."""

        def keys(start: str) -> list[str]:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
            return sorted(item["Key"].removeprefix(self._prefix) for page in pages for item in page.get("Contents", []))

        return self._call("list", prefix, keys)

    def delete(self, name: str) -> None:
        """See ``Store.delete``; with a tag by which the bucket drops it sooner than what others delete."""
        if self._tags_deleted:
            self._tag(name)
        self._call("delete", name, lambda key: self._client.delete_object(Bucket=self._bucket, Key=key))

    def _tag(self, name: str) -> None:
        def tag(key: str) -> object:
            tags = [{"Key": PRUNED_TAG, "Value": PRUNED}]
            return self._client.put_object_tagging(Bucket=self._bucket, Key=key, Tagging={"TagSet": tags})  # type: ignore[typeddict-item]

        try:
            self._call("mark", name, tag)
        except FileNotFoundError:
            pass
        except CheckpointError as error:
            # A role or a bucket of one's own.
            self._tags_deleted = False
            logger.warning("pruned checkpoints stay as long as other deleted objects: %s", error)

    def _call(self, verb: str, name: str, request: Callable[[str], T]) -> T:
        from botocore.exceptions import BotoCoreError, ClientError

        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                return request(self._prefix + name)
            except (BotoCoreError, ClientError, OSError) as error:
                response = error.response if isinstance(error, ClientError) else {}
                if response.get("Error", {}).get("Code") in ("404", "NoSuchKey"):
                    raise FileNotFoundError(name) from None
                status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
                if pause_s is None or status < 500:
                    raise CheckpointError(f"cannot {verb} {self.uri}/{name}: {error}") from error
            time.sleep(pause_s)
        raise AssertionError


def make_client(*, attempts: int = 1, connections: int = CONNECTIONS) -> S3Client:
    """Client of S3 that gives a silent connection up well before a final checkpoint's two minutes are over."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigurationError("checkpoints and data on S3 need boto3: pip install boto3") from error
    config = Config(
        connect_timeout=5,
        read_timeout=20,
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": attempts},
    )
    return boto3.client("s3", config=config, region_name=os.environ.get("GPUFLEET_REGION") or None)
