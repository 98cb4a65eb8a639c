"""Read and write bootstrap/contract's objects under ``control/`` in a stack's bucket; unknown keys are skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from bootstrap.contract import request, state
from bootstrap.contract.codec import FormatError, to_text
from bootstrap.contract.request import PersonRequest, StackSpend, Want, merge_spends
from bootstrap.contract.shared_ceiling import SharedCeiling, SharedSpend, StackRow, read_shared_spend
from bootstrap.contract.state import ControllerState
from optimizer.aws import errors
from optimizer.contract.errors import GpufleetError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")


def read_state(client: S3Client, bucket: str, prefix: str) -> ControllerState | None:
    """Read the controller's state; None before its first tick or without a bucket, a GpufleetError where it is none."""
    return _parse(state.read_state, client, bucket, f"{prefix}/{state.FILE}")


def read_request(client: S3Client, bucket: str, prefix: str) -> PersonRequest | None:
    """Read the last person's request, if any, as ``read_state`` does."""
    return _parse(request.read_request, client, bucket, f"{prefix}/{request.FILE}")


def write_request(
    client: S3Client,
    bucket: str,
    prefix: str,
    *,
    want: Want,
    by: str,
    now: datetime,
    moved_to: str = "",
    elsewhere: Mapping[str, StackSpend] | None = None,
    begun_at: datetime | None = None,
    progress: float = 0.0,
) -> None:
    """Ask the controller to run or to stop; of two people who ask at once, one gets a GpufleetError.

    What other stacks spent stays known, and so does where a stopped run moved to.
    """

    def ask(before: PersonRequest | None) -> PersonRequest:
        known = before.elsewhere if before else {}
        moved = moved_to or (before.moved_to if before and want == "stop" else "")
        return PersonRequest(
            schema_version=1, want=want, at=now, by=by, moved_to=moved, elsewhere=merge_spends(known, elsewhere or {}),
            begun_at=begun_at, progress=progress,
        )  # fmt: skip

    _change_request(client, bucket, prefix, ask)


def end_spend(client: S3Client, bucket: str, prefix: str, *, stack: str, now: datetime) -> None:
    """Tell the controller that ``stack``, which the run moved away from, costs nothing from ``now`` on."""

    def ended(before: PersonRequest | None) -> PersonRequest | None:
        if before is None or stack not in before.elsewhere:
            return before
        spend = before.elsewhere[stack]
        final = replace(spend, usd=spend.usd_until(now), usd_per_hour=0.0, at=now)
        return replace(before, elsewhere={**before.elsewhere, stack: final})

    _change_request(client, bucket, prefix, ended)


def end_rows(client: S3Client, shared: SharedCeiling, stack: str, now: datetime) -> None:
    """Let the rows of a destroyed stack under a shared ceiling grow no more; ``stack``: REGION/NAME."""

    def ended(text: str) -> str:
        try:
            rows = read_shared_spend(text, f"s3://{shared.bucket}/{shared.key}").rows
        except FormatError as error:
            raise GpufleetError(str(error), next_step="bring an earlier version of the object back") from error
        for meter in rows:
            if meter.startswith(f"{stack} since "):  # bootstrap/controller/decide.py
                rows[meter] = StackRow(usd=rows[meter].usd_until(now), usd_per_hour=0.0, end_s=0.0, at=now)
        return to_text(SharedSpend(rows=rows))

    _change(client, shared.bucket, shared.key, lambda text: text and ended(text))


def _change_request(
    client: S3Client, bucket: str, prefix: str, change: Callable[[PersonRequest | None], PersonRequest | None]
) -> None:
    key = f"{prefix}/{request.FILE}"

    def changed(text: str | None) -> str | None:
        before = None
        with suppress(FormatError):  # replaced
            before = request.read_request(text or "", key, lenient=True)
        after = change(before)
        return None if after is None or after == before else after.to_text()

    _change(client, bucket, key, changed)


def _change(client: S3Client, bucket: str, key: str, change: Callable[[str | None], str | None]) -> None:
    content = _read(client, bucket, key)
    if (text := change(content[0] if content else None)) is None:
        return
    common: dict[str, Any] = {"Bucket": bucket, "Key": key, "Body": text.encode(), "ContentType": "application/json"}
    condition: dict[str, Any] = {"IfMatch": content[1]} if content else {"IfNoneMatch": "*"}
    try:
        client.put_object(**common, **condition)
    except Exception as error:
        # S3 answers 404 where the object was deleted since:
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html#conditional-error-response
        if not (errors.is_written_by_another(error) or errors.is_no_object(error)):
            raise
        raise GpufleetError(
            f"s3://{bucket}/{key} changed while it was written",
            why="another person, or stack, changed or deleted it at the same moment",
            next_step="read gpufleet status, then ask again",
        ) from error


def _read(client: S3Client, bucket: str, key: str) -> tuple[str, str] | None:
    try:
        answer = client.get_object(Bucket=bucket, Key=key)
        return answer["Body"].read().decode(errors="replace"), answer["ETag"]
    except Exception as error:
        if errors.is_no_object(error) or errors.is_not_found(error):
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
