"""Object bytes to and from S3 by the AWS Common Runtime (CRT): parallel parts and retries in native threads.

boto3's transfer manager copies, checks and encrypts under Python's global lock, beside the training loop, and takes its
retries' jitter from Python's global random generator, which belongs to the training. The CRT does neither.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult

from bootstrap.training.errors import ConfigurationError

if TYPE_CHECKING:
    from awscrt.auth import AwsCredentials
    from awscrt.http import HttpHeaders

# Least limit that the CRT accepts; its buffers hold the parts that are on their way.
MEMORY_LIMIT_BYTES = 2**30
PART_BYTES = 16 * 2**20
# One connection carries about 85 MB/s, and eight ranks of a node open 128:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html
CONNECTIONS = 16
THREADS = 4
# A final checkpoint has two minutes. The CRT itself gives a silent connection up after 30 s
# (https://github.com/awslabs/aws-c-s3/blob/main/source/s3_client.c, monitoring options).
CONNECT_TIMEOUT_MS = 5_000


class CrtError(OSError):
    """Failed request; ``status`` is S3's HTTP status, None where S3 did not answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CrtClient:
    """Puts and gets objects by their URLs; ``credentials`` gives access key, secret key and session token."""

    def __init__(self, *, region: str, is_tls: bool, credentials: Callable[[], tuple[str, str, str | None]]) -> None:
        try:
            from awscrt import auth, s3
            from awscrt import io as crt_io
        except ImportError as error:
            raise ConfigurationError("checkpoints on S3 need the AWS Common Runtime: pip install awscrt") from error

        def frozen() -> AwsCredentials:
            return auth.AwsCredentials(*credentials())

        threads = crt_io.EventLoopGroup(THREADS)
        self._s3 = s3
        self._client = s3.S3Client(
            bootstrap=crt_io.ClientBootstrap(threads, crt_io.DefaultHostResolver(threads)),
            region=region,
            tls_mode=s3.S3RequestTlsMode.ENABLED if is_tls else s3.S3RequestTlsMode.DISABLED,
            signing_config=s3.create_default_s3_signing_config(
                region=region, credential_provider=auth.AwsCredentialsProvider.new_delegate(frozen)
            ),
            part_size=PART_BYTES,
            memory_limit=MEMORY_LIMIT_BYTES,
            max_active_connections_override=CONNECTIONS,
            connect_timeout_ms=CONNECT_TIMEOUT_MS,
        )

    def put(self, url: SplitResult, views: list[memoryview], headers: Mapping[str, str]) -> None:
        """Upload the views' bytes as one object, in parallel parts where it is larger than a part.

        ``If-None-Match`` goes with the request that makes the object, PutObject or CompleteMultipartUpload
        (https://github.com/awslabs/aws-c-s3/blob/main/source/s3_request_messages.c). S3 checks each part's CRC-64/NVME.
        """
        size = sum(view.nbytes for view in views)
        checksum = self._s3.S3ChecksumConfig(
            algorithm=self._s3.S3ChecksumAlgorithm.CRC64NVME, location=self._s3.S3ChecksumLocation.TRAILER
        )
        self._request(
            "PUT", url, {"Content-Length": str(size), **headers}, body=_Parts(views), checksum_config=checksum
        )

    def get(self, url: SplitResult, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the object's bytes from ``offset``, by ranges in parallel."""
        if not into.nbytes:
            return
        received = 0

        def receive(*, chunk: memoryview, offset: int, first: int = offset, **_: object) -> None:
            nonlocal received
            _copy(memoryview(chunk), into[offset - first :])
            received += len(chunk)

        self._request("GET", url, {"Range": f"bytes={offset}-{offset + into.nbytes - 1}"}, on_body=receive)
        if received != into.nbytes:
            raise CrtError(f"it ends at byte {offset + received}")

    def _request(
        self,
        method: str,
        url: SplitResult,
        headers: Mapping[str, str],
        *,
        body: io.RawIOBase | None = None,
        **more: Any,
    ) -> None:
        from awscrt.exceptions import AwsCrtError
        from awscrt.http import HttpHeaders, HttpRequest

        all_headers: HttpHeaders = HttpHeaders([("Host", url.netloc), *headers.items()])
        kind = self._s3.S3RequestType.PUT_OBJECT if method == "PUT" else self._s3.S3RequestType.GET_OBJECT
        request = HttpRequest(method, url.path, all_headers, body)
        try:
            self._client.make_request(type=kind, request=request, **more).finished_future.result()
        except self._s3.S3ResponseError as error:
            answer = (error.body or b"").decode(errors="replace")
            message = f"{error.operation_name} was answered {error.status_code} {answer}"
            raise CrtError(message, error.status_code) from error
        except AwsCrtError as error:
            raise CrtError(f"{error.name}: {error.message}") from error


class _Parts(io.RawIOBase):
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
