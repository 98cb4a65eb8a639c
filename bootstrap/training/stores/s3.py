"""Checkpoints under ``s3://bucket/prefix``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootstrap.training.errors import AlreadyExistsError, CheckpointError, ConfigurationError
from bootstrap.training.stores.base import Digest, Fill, fill_file

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Local NVMe for files on their way to and from S3; default: the system's temporary folder.
SCRATCH_VARIABLE = "GPUFLEET_SCRATCH_DIR"


class S3Store:
    """``Store`` under a prefix of a bucket; without a key the bucket's default encrypts.

    Needs s3:PutObject, s3:GetObject, s3:DeleteObject, s3:AbortMultipartUpload on the prefix, s3:ListBucket on the
    bucket, and kms:GenerateDataKey, kms:Decrypt on the key.
    """

    def __init__(
        self, bucket: str, prefix: str, *, kms_key_id: str | None = None, client: S3Client | None = None
    ) -> None:
        self.uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._kms_key_id = kms_key_id
        self._client = client or _s3_client()
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self._client.meta.events.register(f"provide-client-params.s3.{operation}", _only_if_absent)

    def write(self, name: str, fill: Fill) -> Digest:
        """See ``Store.write``; uses a scratch file, as S3 needs a part's size before the part."""
        with _scratch_file() as path:
            try:
                digest = fill_file(path, fill)
                self._upload(name, path, digest)
            except OSError as error:
                raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error
        return digest

    def _upload(self, name: str, path: Path, digest: Digest) -> None:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError

        # The digest tells our own earlier attempt, whose answer was lost, from another writer's object.
        extra: dict[str, Any] = {"Metadata": {"sha256": digest.sha256}}
        if self._kms_key_id:
            extra |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self._kms_key_id}
        try:
            self._client.upload_file(str(path), self._bucket, self._prefix + name, ExtraArgs=extra)
        except (BotoCoreError, ClientError, S3UploadFailedError) as error:
            if "PreconditionFailed" not in str(error):
                raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error
            if self._stored_sha256(name) != digest.sha256:
                raise AlreadyExistsError(f"{self.uri}/{name} exists, and a checkpoint is never overwritten") from error

    def _stored_sha256(self, name: str) -> str | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)["Metadata"].get("sha256")
        except (BotoCoreError, ClientError):
            return None

    def read(self, name: str) -> bytes:
        """See ``Store.read``."""
        # The transfer manager draws from Python's random generator, which would shift the training's numbers.
        with self._errors("read", name):
            return self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()

    @contextmanager
    def fetch(self, name: str) -> Iterator[Path]:
        """See ``Store.fetch``."""
        with _scratch_file() as path:
            with self._errors("read", name):
                self._client.download_file(self._bucket, self._prefix + name, str(path))
            yield path

    def names(self, prefix: str) -> list[str]:
        """See ``Store.names``."""
        with self._errors("list"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return sorted(item["Key"].removeprefix(self._prefix) for page in pages for item in page.get("Contents", []))

    def delete(self, name: str) -> None:
        """See ``Store.delete``."""
        with self._errors("delete", name):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    @contextmanager
    def _errors(self, verb: str, name: str = "") -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, OSError) as error:
            code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
            if verb == "read" and code in ("404", "NoSuchKey"):
                raise FileNotFoundError(name) from None
            raise CheckpointError(f"cannot {verb} {self.uri}{'/' if name else ''}{name}: {error}") from error


def _s3_client() -> S3Client:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigurationError("checkpoints on S3 need boto3: pip install boto3") from error
    # A final checkpoint has two minutes: retry a silent connection well before that.
    config = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 4})
    return boto3.client("s3", config=config, region_name=os.environ.get("GPUFLEET_REGION") or None)


# https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html (read 2026-11)
def _only_if_absent(params: dict[str, Any], **_: Any) -> None:
    params.setdefault("IfNoneMatch", "*")


@contextmanager
def _scratch_file() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gpufleet-", dir=os.environ.get(SCRATCH_VARIABLE) or None))
    try:
        yield folder / "object"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
