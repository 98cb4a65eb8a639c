"""Object bytes between memory and S3, in parallel parts: by the AWS Common Runtime (CRT), or by boto3 without it.

boto3's transfer manager copies, checks and encrypts under Python's global lock, beside the training loop. The CRT has
threads and retries of its own.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import SplitResult, urlsplit

from bootstrap.contract.staging import PART_BYTES
from bootstrap.training.errors import ConfigurationError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger(__name__)

# Least memory limit that the CRT accepts; its buffers hold the parts that are on their way.
BUFFER_BYTES = 2**30
# One connection carries about 85 MB/s, and eight ranks of a node open 128:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html
CONNECTIONS = 16
CRT_THREADS = 4
CONNECT_TIMEOUT_MS = 5_000
# S3's status for a range beyond the object's end.
RANGE_NOT_SATISFIABLE = 416
# User metadata: the call that wrote an object.
WRITE_ID = "write-id"


class TransferError(OSError):
    """Failed request; ``status`` is S3's HTTP status, None where S3 did not answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CrtTransfers:
    """Transfers of one bucket's objects with a boto3 client's credentials, region and endpoint.

    ImportError: awscrt is not installed.
    """

    def __init__(self, client: S3Client, bucket: str, *, connections: int = CONNECTIONS) -> None:
        import boto3
        from awscrt import io as crt_io
        from awscrt import s3
        from awscrt.auth import AwsCredentials, AwsCredentialsProvider

        credentials = boto3.Session().get_credentials()
        if credentials is None:
            raise ConfigurationError(f"no AWS credentials for s3://{bucket}: give the node a role, or set AWS_PROFILE")

        def frozen() -> AwsCredentials:
            keys = credentials.get_frozen_credentials()
            return AwsCredentials(keys.access_key, keys.secret_key, keys.token)

        self._s3, self._boto3_client, self._bucket = s3, client, bucket
        self._region = region = client.meta.region_name
        threads = crt_io.EventLoopGroup(CRT_THREADS)
        is_tls = self._url("-").scheme == "https"
        self._client = s3.S3Client(
            bootstrap=crt_io.ClientBootstrap(threads, crt_io.DefaultHostResolver(threads)),
            region=region,
            tls_mode=s3.S3RequestTlsMode.ENABLED if is_tls else s3.S3RequestTlsMode.DISABLED,
            signing_config=s3.create_default_s3_signing_config(
                region=region, credential_provider=AwsCredentialsProvider.new_delegate(frozen)
            ),
            part_size=PART_BYTES,
            # Twice what the connections hold, one part each.
            memory_limit=max(BUFFER_BYTES, 2 * connections * PART_BYTES),
            max_active_connections_override=connections,
            connect_timeout_ms=CONNECT_TIMEOUT_MS,
        )

    def put(self, key: str, views: list[memoryview], *, write_id: str, kms_key_id: str | None) -> None:
        """Upload the views as one new object, with ``write_id`` in its metadata; status 412 where one exists.

        ``If-None-Match`` goes with the request that makes the object, PutObject or CompleteMultipartUpload
        (https://github.com/awslabs/aws-c-s3/blob/main/source/s3_request_messages.c). S3 checks each part's CRC-64/NVME.
        """
        headers = {
            "Content-Length": str(sum(view.nbytes for view in views)),
            "If-None-Match": "*",
            f"x-amz-meta-{WRITE_ID}": write_id,
        }
        if kms_key_id:
            headers["x-amz-server-side-encryption"] = "aws:kms"
            headers["x-amz-server-side-encryption-aws-kms-key-id"] = kms_key_id
        checksum = self._s3.S3ChecksumConfig(
            algorithm=self._s3.S3ChecksumAlgorithm.CRC64NVME, location=self._s3.S3ChecksumLocation.TRAILER
        )
        self._request("PUT", key, headers, body=_PartsReader(views), checksum_config=checksum)

    def get(self, key: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the object's bytes from ``offset``, by ranges in parallel."""
        if not into.nbytes:
            return
        received = 0

        def receive(*, chunk: bytes, offset: int, first: int = offset, **_: object) -> None:
            nonlocal received
            _copy(memoryview(chunk), into[offset - first :])
            received += len(chunk)

        self._request("GET", key, {"Range": f"bytes={offset}-{offset + into.nbytes - 1}"}, on_body=receive)
        if received != into.nbytes:
            raise TransferError(f"it ends at byte {offset + received}", RANGE_NOT_SATISFIABLE)

    def _request(
        self, method: str, key: str, headers: dict[str, str], *, body: io.RawIOBase | None = None, **more: Any
    ) -> None:
        from awscrt.exceptions import AwsCrtError
        from awscrt.http import HttpHeaders, HttpRequest

        kind = self._s3.S3RequestType.PUT_OBJECT if method == "PUT" else self._s3.S3RequestType.GET_OBJECT
        url = self._url(key)
        request = HttpRequest(method, url.path, HttpHeaders([("Host", url.netloc), *headers.items()]), body)
        try:
            self._client.make_request(type=kind, request=request, **more).finished_future.result()
        except self._s3.S3ResponseError as error:
            text = (error.body or b"").decode(errors="replace")
            answer = ": ".join(re.findall(r"<(?:Code|Message)>(.*?)</", text, re.DOTALL)) or text
            message = f"{error.operation_name} was answered {error.status_code} {answer}"
            # The header by which boto3 finds a bucket of another region (botocore/utils.py, S3RegionRedirectorv2).
            there = {name.lower(): value for name, value in error.headers}.get("x-amz-bucket-region")
            if there and there != self._region and error.status_code in (301, 400):
                message += f" (the bucket is in {there}: set GPUFLEET_REGION to {there})"
            raise TransferError(message, error.status_code) from error
        except AwsCrtError as error:
            raise TransferError(f"{error.name}: {error.message}") from error

    def _url(self, key: str) -> SplitResult:
        """URL without its query, from boto3, which knows endpoints, partitions and addressing styles."""
        parameters = {"Bucket": self._bucket, "Key": key}
        return urlsplit(self._boto3_client.generate_presigned_url("get_object", Params=parameters))


class Boto3Transfers:
    """``CrtTransfers`` by boto3, which is slower and takes time from the training loop."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        logger.warning("awscrt is not installed: boto3 moves the checkpoints, slower; pip install awscrt")
        self._client, self._bucket = client, bucket
        for operation in ("PutObject", "CompleteMultipartUpload"):
            client.meta.events.register(f"provide-client-params.s3.{operation}", _only_if_absent)

    def put(self, key: str, views: list[memoryview], *, write_id: str, kms_key_id: str | None) -> None:
        """See ``CrtTransfers.put``."""
        extra: dict[str, Any] = {"Metadata": {WRITE_ID: write_id}}
        if kms_key_id:
            extra |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key_id}
        with _boto3_errors():
            self._client.upload_fileobj(cast(BinaryIO, _PartsReader(views)), self._bucket, key, ExtraArgs=extra)

    def get(self, key: str, offset: int, into: memoryview) -> None:
        """See ``CrtTransfers.get``."""

        def get_part(start: int) -> None:
            part = into[start : start + PART_BYTES]
            first = offset + start
            wanted = f"bytes={first}-{first + part.nbytes - 1}"
            with _boto3_errors():
                data = self._client.get_object(Bucket=self._bucket, Key=key, Range=wanted)["Body"].read()
            if len(data) != part.nbytes:
                raise TransferError(f"it ends at byte {first + len(data)}", RANGE_NOT_SATISFIABLE)
            part[:] = data

        with ThreadPoolExecutor(CONNECTIONS) as threads:
            list(threads.map(get_part, range(0, into.nbytes, PART_BYTES)))


@contextmanager
def _boto3_errors() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise TransferError(str(error), error.response["ResponseMetadata"].get("HTTPStatusCode")) from error
    except BotoCoreError as error:
        raise TransferError(str(error)) from error


# https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html (read 2026-11)
def _only_if_absent(params: dict[str, Any], **_: Any) -> None:
    params.setdefault("IfNoneMatch", "*")


class _PartsReader(io.RawIOBase):
    """Buffers read one after the other."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._position, sum(view.nbytes for view in self._views))[whence]
        self._position = start + offset
        return self._position

    def readinto(self, into: Any) -> int:
        target = memoryview(into).cast("B")
        filled, skipped = 0, 0
        for view in self._views:
            if (first := self._position + filled - skipped) < view.nbytes:
                part = view[first : first + target.nbytes - filled]
                _copy(part, target[filled:])
                filled += part.nbytes
            if filled == target.nbytes:
                break
            skipped += view.nbytes
        self._position += filled
        return filled


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes to the target's beginning; NumPy gives Python's global lock to the training loop meanwhile."""
    import numpy

    numpy.copyto(numpy.frombuffer(target, numpy.uint8)[: source.nbytes], numpy.frombuffer(source, numpy.uint8))
