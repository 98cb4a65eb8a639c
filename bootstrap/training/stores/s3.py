"""Checkpoints under ``s3://bucket/prefix``."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from bootstrap.training.errors import AlreadyExistsError, CheckpointError, ConfigurationError
from bootstrap.training.stores.base import Digest, byte_views, fill_file
from bootstrap.training.stores.crt import MEMORY_LIMIT_BYTES, CrtClient, CrtError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Local NVMe for files on their way to and from S3; default: the system's temporary folder.
SCRATCH_VARIABLE = "GPUFLEET_SCRATCH_DIR"
# User metadata of an object: the call that wrote it.
WRITE_METADATA = "write"


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
        self.buffer_bytes = MEMORY_LIMIT_BYTES
        self._client = client or _s3_client()
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self._client.meta.events.register(f"provide-client-params.s3.{operation}", _only_if_absent)

    @cached_property
    def _crt(self) -> CrtClient:
        import boto3

        credentials = boto3.Session().get_credentials()
        if credentials is None:
            raise ConfigurationError(f"no AWS credentials for {self.uri}: give the node a role, or set AWS_PROFILE")

        def frozen() -> tuple[str, str, str | None]:
            keys = credentials.get_frozen_credentials()
            return str(keys.access_key), str(keys.secret_key), keys.token

        region = self._client.meta.region_name
        return CrtClient(region=region, is_tls=self._url("").scheme == "https", credentials=frozen)

    def _url(self, name: str) -> SplitResult:
        """URL of an object without its query, from boto3, which knows endpoints, partitions and addressing styles."""
        parameters = {"Bucket": self._bucket, "Key": self._prefix + name or "-"}
        return urlsplit(self._client.generate_presigned_url("get_object", Params=parameters))

    def write(self, name: str, parts: Any) -> Digest:
        """See ``Store.write``; a scratch file for a ``Fill``, as S3 needs a part's size before the part."""
        if not callable(parts):
            self._write_parts(name, byte_views(parts))
            return Digest(bytes=0, sha256="")
        with _scratch_file() as path:
            try:
                digest = fill_file(path, parts)
                self._upload(name, path, digest)
            except OSError as error:
                raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error
        return digest

    def _write_parts(self, name: str, views: list[memoryview]) -> None:
        # The token tells our own earlier attempt, whose answer was lost, from another writer's object.
        token = uuid.uuid4().hex
        headers = {"If-None-Match": "*", f"x-amz-meta-{WRITE_METADATA}": token}
        if self._kms_key_id:
            headers["x-amz-server-side-encryption"] = "aws:kms"
            headers["x-amz-server-side-encryption-aws-kms-key-id"] = self._kms_key_id
        try:
            self._crt.put(self._url(name), views, headers)
        except CrtError as error:
            stored = self._stored_metadata(name).get(WRITE_METADATA)
            if stored == token:
                return
            if error.status == 412:
                raise AlreadyExistsError(f"{self.uri}/{name} exists, and a checkpoint is never overwritten") from error
            raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error

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
            if self._stored_metadata(name).get("sha256") != digest.sha256:
                raise AlreadyExistsError(f"{self.uri}/{name} exists, and a checkpoint is never overwritten") from error

    def _stored_metadata(self, name: str) -> dict[str, str]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)["Metadata"]
        except (BotoCoreError, ClientError):
            return {}

    def read(self, name: str) -> bytes:
        """See ``Store.read``."""
        # The transfer manager draws from Python's random generator, which would shift the training's numbers.
        with self._errors("read", name):
            return self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """See ``Store.read_into``."""
        try:
            self._crt.get(self._url(name), offset, into.cast("B"))
        except CrtError as error:
            if error.status == 404:
                raise FileNotFoundError(name) from None
            place = f"{self.uri}/{name}"
            raise CheckpointError(f"cannot read {into.nbytes} bytes at {offset} of {place}: {error}") from error

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
