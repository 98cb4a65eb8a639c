"""Read and write the objects under ``control/`` in the stack's bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from bootstrap.contract import report, request, state
from bootstrap.contract.codec import FormatError, to_text
from bootstrap.contract.report import NodeReport, read_report
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.shared_ceiling import SharedSpend, StackRow, read_shared_spend
from bootstrap.contract.state import ControllerState, NewerStateError
from bootstrap.controller.clients import Clients, error_code, log, to_seconds
from bootstrap.controller.observation import Tick

# A report has some hundred bytes; a hostile object would take the tick its memory.
REPORT_BYTES = 16 * 1024
# A thousand nodes report that they train in the same minute. A read takes 2.5 ms of a core, of which the function has a
# seventh (https://docs.aws.amazon.com/lambda/latest/dg/configuration-memory.html), and the later ticks read the others.
MOST_REPORTS = 200


class StateError(RuntimeError):
    """control/state.json cannot be trusted, so the spend is unknown."""


class ConflictError(RuntimeError):
    """Another tick wrote the state since this one read it."""


def load_settings(clients: Clients, uri: str) -> ControllerSettings:
    """Read the settings at ``s3://BUCKET/KEY``; FormatError: they are at fault."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    body = clients.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    return ControllerSettings.from_text(body.decode(errors="replace"), uri)


def load_state(clients: Clients, settings: ControllerSettings) -> tuple[ControllerState | None, str | None]:
    """Read the state and its ETag, both None before the first tick, or raise NewerStateError or StateError."""
    key = _key(settings, state.FILE)
    place = f"s3://{settings.bucket}/{key}"
    help_ = "bring an earlier version back; until then no node is started, and running ones are ended"
    deleted = StateError(f"{place} was deleted, and with it what was spent: {help_}")
    text, etag = _get(clients, settings.bucket, key, deleted)
    if text is None:
        return None, None
    try:
        return state.read_state(text, place), etag
    except NewerStateError:
        # The object ages, and the nodes' lease bounds the cost.
        raise
    except FormatError as error:
        raise StateError(f"{error}: {help_}") from error


def save_state(clients: Clients, settings: ControllerSettings, new: ControllerState, etag: str | None) -> str:
    """Write the state and return its ETag, or raise ConflictError where ``etag`` changed (None: did not exist).

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
    """
    return _put(clients, settings.bucket, _key(settings, state.FILE), to_text(new), etag)


def _get(
    clients: Clients, bucket: str, key: str, deleted: Exception | None = None
) -> tuple[str, str] | tuple[None, None]:
    """Read an object's text and ETag, both None where there is none; ``deleted`` is raised where there was one."""
    try:
        answer = clients.s3.get_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error_code(error) not in ("NoSuchKey", "404"):
            raise
        if deleted and error.response["ResponseMetadata"]["HTTPHeaders"].get("x-amz-delete-marker") == "true":
            raise deleted from error
        return None, None
    return answer["Body"].read().decode(errors="replace"), answer["ETag"]


def _put(clients: Clients, bucket: str, key: str, text: str, etag: str | None) -> str:
    condition: dict[str, Any] = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    try:
        answer = clients.s3.put_object(
            Bucket=bucket, Key=key, Body=text.encode(), ContentType="application/json", **condition
        )
    except ClientError as error:
        # 404: the object was deleted since it was read.
        if error_code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409", "NoSuchKey", "404"):
            raise ConflictError(f"{key} was written by another tick") from error
        raise
    return answer["ETag"]


def load_rows(clients: Clients, tick: Tick) -> Tick:
    """Return the tick with the rows under the shared ceiling, or raise a FormatError."""
    if tick.settings.shared is None:
        return tick
    bucket, key = tick.settings.shared.bucket, tick.settings.shared.key
    place, rows = f"s3://{bucket}/{key}", dict[str, StackRow]()
    text, etag = _get(clients, bucket, key, FormatError(f"{place} was deleted: bring an earlier version back"))
    if text is not None:
        rows = read_shared_spend(text, place).rows
    elif not clients.s3.get_bucket_versioning(Bucket=bucket).get("Status"):
        # The rows may have been there: https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetBucketVersioning.html
        raise FormatError(
            f"{place} does not exist, and its bucket keeps no versions, so nobody would see its deletion: "
            f"aws s3api put-bucket-versioning --bucket {bucket} --versioning-configuration Status=Enabled"
        )
    return replace(tick, seen=replace(tick.seen, rows=rows, rows_etag=etag))


def save_row(clients: Clients, tick: Tick, meter: str, row: StackRow) -> Tick:
    """Write the stack's row where no other stack wrote since ``tick`` read, or raise ConflictError."""
    shared, seen = tick.settings.shared, tick.seen
    if shared is None:
        return tick
    rows = {**seen.rows, meter: row}
    etag = _put(clients, shared.bucket, shared.key, to_text(SharedSpend(rows=rows)), seen.rows_etag)
    return replace(tick, seen=replace(seen, rows=rows, rows_etag=etag))


def load_request(clients: Clients, settings: ControllerSettings) -> PersonRequest | None:
    """Read the last person's request, if any, or raise a FormatError."""
    key = _key(settings, request.FILE)
    text, _ = _get(clients, settings.bucket, key)
    return None if text is None else request.read_request(text, f"s3://{settings.bucket}/{key}")


def load_reports(
    clients: Clients, settings: ControllerSettings, known: Mapping[str, datetime | None]
) -> dict[str, NodeReport]:
    """Read the reports that the nodes in ``known`` wrote since that time; a bad object must not stop the meter."""
    prefix = f"{_key(settings, report.FOLDER)}/"
    reports: dict[str, NodeReport] = {}
    # The folder has a report of each node that ever ran; S3 lists a thousand a page.
    pages = clients.s3.get_paginator("list_objects_v2").paginate(Bucket=settings.bucket, Prefix=prefix)
    for entry in (entry for page in pages for entry in page.get("Contents", [])):
        instance_id = report.instance_of(entry["Key"])
        modified_at = to_seconds(entry["LastModified"])
        if instance_id not in known or known[instance_id] == modified_at or len(reports) == MOST_REPORTS:
            continue
        place = f"s3://{settings.bucket}/{entry['Key']}"
        try:
            body = clients.s3.get_object(Bucket=settings.bucket, Key=entry["Key"])["Body"].read(REPORT_BYTES + 1)
            if len(body) > REPORT_BYTES:
                raise FormatError(f"the object has more than {REPORT_BYTES} bytes")
            reports[instance_id] = read_report(body.decode(), modified_at, place)
        except (ValueError, RecursionError, ClientError) as error:
            log("unreadable", reason=f"{place} is not a report: {str(error)[:200]}")
    return reports


def _key(settings: ControllerSettings, name: str) -> str:
    return f"{settings.control_prefix}/{name}"
