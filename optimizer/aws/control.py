"""Read and write bootstrap/contract's objects under ``control/`` in a stack's bucket; unknown keys are skipped."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from bootstrap.contract import request, state
from bootstrap.contract.codec import FormatError
from bootstrap.contract.request import PersonRequest, Want
from bootstrap.contract.state import ControllerState
from optimizer.aws import errors
from optimizer.errors import GpufleetError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")


def read_state(client: S3Client, bucket: str, prefix: str) -> ControllerState | None:
    """Read the controller's state; None before its first tick, a GpufleetError where it is none."""
    return _parse(state.read_state, client, bucket, f"{prefix}/{state.FILE}")


def read_request(client: S3Client, bucket: str, prefix: str) -> PersonRequest | None:
    """Read the last person's request, if any, as ``read_state`` does."""
    return _parse(request.read_request, client, bucket, f"{prefix}/{request.FILE}")


def write_request(client: S3Client, bucket: str, prefix: str, *, want: Want, by: str, now: datetime) -> None:
    """Ask the controller to run or to stop; of two people who ask at once, one gets a GpufleetError."""
    key = f"{prefix}/{request.FILE}"
    content = _read(client, bucket, key)
    text = PersonRequest(schema_version=1, want=want, at=now, by=by).to_text()
    common: dict[str, Any] = {"Bucket": bucket, "Key": key, "Body": text.encode(), "ContentType": "application/json"}
    condition: dict[str, Any] = {"IfMatch": content[1]} if content else {"IfNoneMatch": "*"}
    try:
        client.put_object(**common, **condition)
    except Exception as error:
        if not errors.is_written_by_another(error):
            raise
        raise GpufleetError(
            f"s3://{bucket}/{key} changed while it was written",
            why="another person asked the controller for something at the same moment",
            next_step="read gpufleet status, then ask again",
        ) from error


def _read(client: S3Client, bucket: str, key: str) -> tuple[str, str] | None:
    try:
        answer = client.get_object(Bucket=bucket, Key=key)
        return answer["Body"].read().decode(errors="replace"), answer["ETag"]
    except Exception as error:
        if errors.is_no_object(error):
            return None
        raise


def _parse(read: Callable[..., T], client: S3Client, bucket: str, key: str) -> T | None:
    content = _read(client, bucket, key)
    try:
        return content and read(content[0], f"s3://{bucket}/{key}", lenient=True)
    except FormatError as error:
        raise GpufleetError(
            f"{error}; this version of gpufleet cannot read it",
            next_step="use the version of gpufleet that the stack was deployed with",
        ) from error
