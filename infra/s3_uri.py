"""S3 URIs of settings."""

from __future__ import annotations

import re


def read_s3_prefix(uri: str) -> tuple[str, str] | None:
    """Bucket and prefix, without slashes at its ends, of an s3:// URI; None for anything else."""
    # Bucket names: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([\w.=+-]+(?:/[\w.=+-]+)*)/?", uri, re.ASCII)
    return (match[1], match[2]) if match else None
