"""Checkpoint stores: a directory or an S3 prefix behind one contract (``base.Store``)."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from bootstrap.training.errors import ConfigurationError
from bootstrap.training.stores.base import Store
from bootstrap.training.stores.local import LocalStore
from bootstrap.training.stores.s3 import S3Store

__all__ = ["LocalStore", "S3Store", "Store", "open_store"]

URI_VARIABLE = "GPUFLEET_CHECKPOINT_URI"
KMS_KEY_VARIABLE = "GPUFLEET_KMS_KEY_ARN"


def open_store(uri: Store | str | None = None) -> Store:
    """Store at ``s3://bucket/prefix`` or in a directory, or the given one; default: ``GPUFLEET_CHECKPOINT_URI``."""
    if uri is not None and not isinstance(uri, str):
        return uri
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
