"""Where checkpoints live: a directory or an S3 prefix behind one small contract. What is written is never overwritten.

A directory must be shared by all nodes of a run (FSx for Lustre, EFS) unless the run has one node.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast
from urllib.parse import urlsplit

from bootstrap.training.errors import AlreadyExistsError, CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

URI_VARIABLE = "GPUFLEET_CHECKPOINT_URI"
KMS_KEY_VARIABLE = "GPUFLEET_KMS_KEY_ARN"
# Local NVMe of the node, for files on their way to and from S3; the system's temporary folder if not set.
SCRATCH_VARIABLE = "GPUFLEET_SCRATCH_DIR"


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a finished write put in the store."""

    bytes: int
    sha256: str


class Store(Protocol):
    """Named immutable objects. Names are relative paths with ``/``."""

    @property
    def uri(self) -> str:
        """Where this store is, for people."""

    def write(self, name: str, fill: Callable[[BinaryIO], None]) -> Written:
        """Write what ``fill`` writes, all or nothing, durably.

        Raises:
            AlreadyExistsError: ``name`` is taken.
            CheckpointError: it cannot be written.
        """

    def read(self, name: str) -> bytes:
        """Whole content of a small object.

        Raises:
            FileNotFoundError: no such object.
            CheckpointError: it cannot be read.
        """

    def fetch(self, name: str) -> Any:
        """Context manager of a local path with the content; raises as ``read``."""

    def names(self, prefix: str) -> list[str]:
        """Names that begin with ``prefix``, sorted.

        Raises:
            CheckpointError: the store cannot be listed.
        """

    def delete(self, name: str) -> None:
        """Remove; a name that is not there is no error."""


def open_store(uri: str | None = None) -> Store:
    """Store of a URI: ``s3://bucket/prefix`` or a directory.

    Args:
        uri: ``GPUFLEET_CHECKPOINT_URI``, which launch.sh sets from the node's bucket, if not given.

    Raises:
        ConfigurationError: no URI, or one that is neither.
    """
    uri = uri or os.environ.get(URI_VARIABLE)
    if not uri:
        raise ConfigurationError(
            f"no checkpoint store: pass one, or set {URI_VARIABLE} to s3://BUCKET/PREFIX or a path"
        )
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        if not parts.netloc:
            raise ConfigurationError(f"{uri!r} names no bucket; expected s3://BUCKET/PREFIX")
        return S3Store(parts.netloc, parts.path.strip("/"), kms_key_id=os.environ.get(KMS_KEY_VARIABLE) or None)
    if parts.scheme not in ("", "file"):
        raise ConfigurationError(f"{uri!r}: checkpoints go to s3://BUCKET/PREFIX or a directory, not {parts.scheme}://")
    return LocalStore(Path(parts.path if parts.scheme else uri))


class _HashingFile:
    """Binary file that counts and hashes what passes through; just enough of a file for ``torch.save``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self._bytes += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def written(self) -> Written:
        return Written(bytes=self._bytes, sha256=self._sha256.hexdigest())


def _fill_file(path: Path, fill: Callable[[BinaryIO], None]) -> Written:
    """Run ``fill`` into a new file and force it to the disk."""
    with path.open("xb") as file:
        hashing = _HashingFile(file)
        fill(cast(BinaryIO, hashing))
        file.flush()
        os.fsync(file.fileno())
    return hashing.written()


def file_digest(path: Path) -> Written:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Written(bytes=file.tell(), sha256=digest.hexdigest())


class LocalStore:
    """Objects as files under a directory.

    A file appears under its name by a hard link from a finished, fsynced temporary file: a rename that refuses to
    overwrite. The folder is fsynced as well, or the name itself may not survive a power cut.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def write(self, name: str, fill: Callable[[BinaryIO], None]) -> Written:
        """See ``Store.write``."""
        final = self.root / name
        temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                written = _fill_file(temporary, fill)
                try:
                    os.link(temporary, final)
                except FileExistsError as error:
                    raise AlreadyExistsError(f"{final} exists, and a checkpoint is never overwritten") from error
            finally:
                temporary.unlink(missing_ok=True)
            for folder in (final.parent, self.root):
                _fsync_folder(folder)
        except OSError as error:
            raise CheckpointError(f"cannot write {final}: {error}") from error
        return written

    def read(self, name: str) -> bytes:
        """See ``Store.read``."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(name) from None
        except OSError as error:
            raise CheckpointError(f"cannot read {self.root / name}: {error}") from error

    @contextmanager
    def fetch(self, name: str) -> Iterator[Path]:
        """See ``Store.fetch``."""
        path = self.root / name
        if not path.is_file():
            raise FileNotFoundError(name)
        yield path

    def names(self, prefix: str) -> list[str]:
        """See ``Store.names``; a folder that another process removes meanwhile has none."""
        found = (
            (Path(folder) / file).relative_to(self.root).as_posix()
            for folder, _, files in os.walk(self.root, onerror=_refuse_but_missing)
            for file in files
        )
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """See ``Store.delete``; removes the folder with its last file."""
        path = self.root / name
        path.unlink(missing_ok=True)
        if path.parent != self.root:
            with suppress(OSError):
                path.parent.rmdir()


def _refuse_but_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise CheckpointError(f"{error.filename} cannot be listed: {error.strerror}") from error


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class S3Store:
    """Objects under ``s3://bucket/prefix``, encrypted with KMS; every write is conditional on the name being free.

    ``If-None-Match: *`` goes with each PutObject and CompleteMultipartUpload
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html, read 2026-11). boto3's transfer
    manager splits large files into parts and retries each; S3 checks each part's CRC on arrival.

    Needs s3:PutObject, s3:GetObject, s3:DeleteObject, s3:AbortMultipartUpload on the prefix, s3:ListBucket on the
    bucket, and kms:GenerateDataKey, kms:Decrypt on the key.

    Args:
        bucket: bucket name.
        prefix: key prefix without slashes at its ends; may be empty.
        kms_key_id: key to encrypt with; the bucket's default encryption if None.
        client: S3 client to use instead of a new one; it gets the conditional-write hooks.
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

    def write(self, name: str, fill: Callable[[BinaryIO], None]) -> Written:
        """See ``Store.write``. Goes through a scratch file, as S3 wants to know a part before it takes it."""
        with _scratch_folder() as folder:
            path = folder / "object"
            try:
                written = _fill_file(path, fill)
                self._upload(name, path, written)
            except OSError as error:
                raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error
        return written

    def _upload(self, name: str, path: Path, written: Written) -> None:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError

        # The digest as metadata tells our own earlier attempt, whose answer was lost, from another writer's object.
        extra: dict[str, Any] = {"Metadata": {"sha256": written.sha256}}
        if self._kms_key_id:
            extra |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self._kms_key_id}
        try:
            self._client.upload_file(str(path), self._bucket, self._prefix + name, ExtraArgs=extra)
        except (BotoCoreError, ClientError, S3UploadFailedError) as error:
            if "PreconditionFailed" not in str(error):
                raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error
            if self._digest_of(name) != written.sha256:
                raise AlreadyExistsError(f"{self.uri}/{name} exists, and a checkpoint is never overwritten") from error

    def _digest_of(self, name: str) -> str | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)["Metadata"].get("sha256")
        except (BotoCoreError, ClientError):
            return None

    def read(self, name: str) -> bytes:
        """See ``Store.read``.

        Not through the transfer manager, which names its temporary files with Python's global random generator: this
        is called beside training, whose random numbers it would shift.
        """
        with self._reading(name):
            return self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()

    @contextmanager
    def fetch(self, name: str) -> Iterator[Path]:
        """See ``Store.fetch``; the scratch copy goes when the context ends."""
        with _scratch_folder() as folder:
            path = folder / "object"
            with self._reading(name):
                self._client.download_file(self._bucket, self._prefix + name, str(path))
            yield path

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey"):
                raise FileNotFoundError(name) from None
            raise CheckpointError(f"cannot read {self.uri}/{name}: {error}") from error
        except (BotoCoreError, OSError) as error:
            raise CheckpointError(f"cannot read {self.uri}/{name}: {error}") from error

    def names(self, prefix: str) -> list[str]:
        """See ``Store.names``."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        except (BotoCoreError, ClientError) as error:
            raise CheckpointError(f"cannot list {self.uri}: {error}") from error
        return sorted(key.removeprefix(self._prefix) for key in keys)

    def delete(self, name: str) -> None:
        """See ``Store.delete``."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
        except (BotoCoreError, ClientError) as error:
            raise CheckpointError(f"cannot delete {self.uri}/{name}: {error}") from error


def _s3_client() -> S3Client:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigurationError("checkpoints on S3 need boto3: pip install boto3") from error
    # A final checkpoint has two minutes: give up on a silent connection and retry well before that.
    config = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 4})
    return boto3.client("s3", config=config, region_name=os.environ.get("GPUFLEET_REGION") or None)


def _only_if_absent(params: dict[str, Any], **_: Any) -> None:
    params.setdefault("IfNoneMatch", "*")


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gpufleet-", dir=os.environ.get(SCRATCH_VARIABLE) or None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
