"""Read a stack's measured runs (bootstrap/contract/measured.py) from its bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bootstrap.contract.codec import FormatError
from bootstrap.contract.measured import FOLDER, MeasuredRow, parse, run_prefix

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@dataclass(kw_only=True)
class MeasuredRuns:
    """Rows, oldest first, and why an object is none, by key."""

    rows: list[MeasuredRow] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> MeasuredRow | None:
        """The newest row, if any."""
        return self.rows[-1] if self.rows else None


def read_measured(client: S3Client, bucket: str, checkpoint_prefix: str, *, run_id: str | None = None) -> MeasuredRuns:
    """Read every row of a stack, or those of one run."""
    prefix = f"{checkpoint_prefix}/{FOLDER if run_id is None else run_prefix(run_id)}"
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    runs = MeasuredRuns()
    for key in [item["Key"] for page in pages for item in page.get("Contents", [])]:
        body = client.get_object(Bucket=bucket, Key=key)["Body"].read().decode(errors="replace")
        try:
            runs.rows.append(parse(body, f"s3://{bucket}/{key}"))
        except FormatError as error:
            runs.unread[key] = str(error)
    runs.rows.sort(key=lambda row: row.at)
    return runs
