"""Ask a training for a profiler trace, and read it (bootstrap/contract/trace.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootstrap.contract.trace import REQUEST, TraceRequest
from optimizer.aws import errors
from optimizer.contract.errors import GpufleetError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def ask(client: S3Client, bucket: str, checkpoint_prefix: str, request: TraceRequest) -> None:
    """Write a request; it takes the place of an earlier one."""
    client.put_object(
        Bucket=bucket,
        Key=f"{checkpoint_prefix}/{REQUEST}",
        Body=request.to_text().encode(),
        ContentType="application/json",
    )


def read_answer(client: S3Client, bucket: str, checkpoint_prefix: str, request: TraceRequest) -> bytes | None:
    """Return the trace; None where there is no answer yet, a GpufleetError where the rank could not take it."""
    for name in (request.trace, request.failure):
        try:
            content = client.get_object(Bucket=bucket, Key=f"{checkpoint_prefix}/{name}")["Body"].read()
        except Exception as error:
            if not errors.is_no_object(error):
                raise
            continue
        if name == request.trace:
            return content
        raise GpufleetError(
            f"rank {request.rank} took no trace: {content.decode(errors='replace').strip()}",
            why="one profiler at a time can trace a process",
        )
    return None
