"""Layout of checkpoints below a prefix, which `gpufleet move` reads without torch.

step-00000120-5f3a9c1e.1/rank-00000.bin     written by bootstrap/training/checkpoint.py
step-00000120-5f3a9c1e.1/manifest.json
engine-00000120-5f3a9c1e.1/files/NAME       written by bootstrap/training/integrations/engine_files.py
engine-00000120-5f3a9c1e.1/manifest.json
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Folder of the checkpoints in a stack's bucket.
FOLDER = "checkpoints"
MANIFEST_NAME = "manifest.json"
# Tag of what training deletes because newer checkpoints replace it: S3 keeps it for a day, and what is deleted without
# the tag for gpufleet:undoDays (infra/storage.py).
PRUNED_TAG, PRUNED = "gpufleet-pruned", "true"
# Days that they stay, S3's shortest: training writes one after the other, and all are billed.
PRUNED_DAYS = 1
STEP_PREFIX = re.compile(r"^step-(\d{8,})-[0-9a-f]+\.\d+$")
ENGINE_PREFIX = re.compile(r"^engine-(\d{8,})-[0-9a-f]+\.\d+$")


class ManifestError(ValueError):
    """A manifest that is torn or changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A manifest's step, time of writing, and size of each file below the prefix, bytes."""

    step: int
    created_unix_s: float
    files: dict[str, int]


def rank_file_name(rank: int) -> str:
    """File of one rank."""
    return f"rank-{rank:05d}.bin"


def compact_json(value: Any) -> bytes:
    """JSON in the form that checksums are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def checked_body(data: bytes) -> dict[str, Any]:
    """Return the step's manifest if its SHA-256 matches; raise ManifestError for other bytes."""
    with torn():
        document = json.loads(data)
        body = document["checkpoint"]
        if hashlib.sha256(compact_json(body)).hexdigest() != document["sha256"]:
            raise ManifestError("its manifest's checksum is wrong")
        return dict(body)


def read_contents(prefix: str, data: bytes) -> Contents | None:
    """Read the manifest of a checkpoint's prefix; None for the prefix of no checkpoint, ManifestError for a torn one.

    The checksum of an engine's manifest is left to the node, which has its algorithm.
    """
    if not STEP_PREFIX.match(prefix) and not ENGINE_PREFIX.match(prefix):
        return None
    with torn():
        if STEP_PREFIX.match(prefix):
            body = checked_body(data)
            files = _rank_files(body["index"])
        else:
            body = json.loads(data)["checkpoint"]
            files = {f"files/{file['name']}": int(file["bytes"]) for file in body["files"]}
        return Contents(step=int(body["step"]), created_unix_s=float(body["created_unix_s"]), files=files)


@contextmanager
def torn() -> Iterator[None]:
    """Raise ManifestError for what a reader of JSON raises."""
    try:
        yield
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"its manifest is torn: {error}") from error


def _rank_files(index: dict[str, Any]) -> dict[str, int]:
    """Size of each rank's file: its extents are every byte of it."""
    extents = [chunk[2:] for tensor in index["tensors"].values() for chunk in tensor["chunks"]] + index["values"]
    files: dict[str, int] = {}
    for rank, at, size, _ in extents:
        name = rank_file_name(rank)
        files[name] = max(files.get(name, 0), at + size)
    return files
