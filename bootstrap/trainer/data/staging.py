"""Staging: an S3 prefix is copied once a node to its local disk, and used again after a restart."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bootstrap.training.errors import CheckpointError, ConfigurationError
from bootstrap.training.stores.s3 import SCRATCH_VARIABLE, S3Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger(__name__)

# Requests at a time. A large file is read in pieces, each by the CRT in parallel ranges; small files are worth boto3's
# lighter requests.
THREADS = 32
PIECE_BYTES = 256 * 2**20
SMALL_BYTES = 8 * 2**20
PROGRESS_INTERVAL_S = 10.0
# Disk space that stays free for checkpoints on their way and logs.
RESERVE_BYTES = 2 * 2**30
# Beside the files: one line a complete file, and the torchrun start for which all files are complete.
JOURNAL = ".staged.jsonl"
COMPLETE = ".staged"

# Name relative to the folder → size and ETag.
Objects = dict[str, tuple[int, str]]


def stage(uri: str, *, suffixes: tuple[str, ...] = ()) -> Path:
    """Local path of a folder, a file or ``s3://BUCKET/PREFIX``.

    Local rank 0 copies from S3 and the node's other ranks wait, so call it on every rank, before the process group is
    made (its timeout is shorter than a large copy). A file whose size and ETag are those of the last copy stays.

    Args:
        suffixes: ends of the names to copy; default: all.

    Raises:
        ConfigurationError: nothing there, no access, or too little disk space.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        path = Path(parts.path if parts.scheme else uri).expanduser()
        if not path.exists():
            raise ConfigurationError(
                f"{uri} does not exist on this node; expected a path that every node has, or s3://…"
            )
        return path
    if parts.scheme != "s3" or not parts.netloc or not parts.path.strip("/"):
        raise ConfigurationError(f"{uri!r}: data comes from a path or s3://BUCKET/PREFIX")
    prefix = parts.path.strip("/")
    root = Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir()) / "gpufleet-data"
    folder = root / f"{PurePosixPath(prefix).name}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _copy(uri, parts.netloc, prefix, folder, suffixes)
    else:
        while _read(folder / COMPLETE) != _session():
            time.sleep(0.5)
    single = folder / PurePosixPath(prefix).name
    return single if single.is_file() else folder


def _copy(uri: str, bucket: str, prefix: str, folder: Path, suffixes: tuple[str, ...]) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = _client()
        base, listed = _list(client, bucket, prefix)
        objects = {name: entry for name, entry in listed.items() if name.endswith(suffixes or "")}
        if not objects:
            ends = f" that ends with {' or '.join(suffixes)}" if suffixes else ""
            raise ConfigurationError(f"{uri}: no object{ends} under this prefix; see aws s3 ls {uri}/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / COMPLETE).unlink(missing_ok=True)
        done = _complete_files(folder)
        for name in done.keys() - objects.keys():
            (folder / name).unlink(missing_ok=True)
        missing = {name: entry for name, entry in objects.items() if done.get(name) != entry}
        _check_space(uri, folder, missing)
        _fetch(client, S3Store(bucket, base, client=client), bucket, folder, missing)
    except (BotoCoreError, ClientError, CheckpointError, FileNotFoundError) as error:
        if "PreconditionFailed" in str(error) or "Precondition Failed" in str(error):
            raise ConfigurationError(
                f"{uri} changed while it was copied; start again when its writer is done"
            ) from error
        raise ConfigurationError(
            f"{uri} cannot be read ({error}); the node's role needs s3:ListBucket and s3:GetObject on it"
        ) from error
    temporary = folder / f"{COMPLETE}.new"
    temporary.write_text(_session(), encoding="utf-8")
    temporary.replace(folder / COMPLETE)


def _session() -> str:
    """This start of the node's workers: the same text in all local ranks, another one after torchrun started again."""
    run, count = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    return f"{run} {count} {os.getppid()}"


def _client() -> S3Client:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigurationError("data on S3 needs boto3: pip install boto3") from error
    config = Config(max_pool_connections=THREADS, retries={"mode": "standard", "max_attempts": 8})
    return boto3.client("s3", config=config, region_name=os.environ.get("GPUFLEET_REGION") or None)


def _list(client: S3Client, bucket: str, prefix: str) -> tuple[str, Objects]:
    """Folder in the bucket and its objects; where ``prefix`` is an object, that one and its sidecars."""
    objects, single = {}, {}
    path = PurePosixPath(prefix)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=str(path.with_suffix("")))
    for page in pages:
        for item in page.get("Contents", []):
            key, entry = item["Key"], (item["Size"], item["ETag"])
            if key.startswith(prefix + "/") and not key.endswith("/"):
                objects[key.removeprefix(prefix + "/")] = entry
            elif PurePosixPath(key).with_suffix("") == path.with_suffix(""):
                single[PurePosixPath(key).name] = entry
    if objects or path.name not in single:
        return prefix, objects
    return "" if path.parent == PurePosixPath(".") else str(path.parent), single


def _complete_files(folder: Path) -> Objects:
    """Journal of complete files that are still there with their size; a torn last line does not count."""
    done: Objects = {}
    for line in _read(folder / JOURNAL).splitlines():
        try:
            name, size, etag = json.loads(line)
        except ValueError:
            continue
        path = folder / name
        if path.is_file() and path.stat().st_size == size:
            done[name] = (size, etag)
    return done


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _check_space(uri: str, folder: Path, missing: Objects) -> None:
    needed, free = sum(size for size, _ in missing.values()), shutil.disk_usage(folder).free
    if needed + RESERVE_BYTES > free:
        raise ConfigurationError(
            f"{uri} still needs {needed / 2**30:.1f} GiB and {folder} has {free / 2**30:.1f} GiB free, of which "
            f"{RESERVE_BYTES / 2**30:.0f} stay free; set {SCRATCH_VARIABLE} to a larger disk, or choose an "
            "instance type with more NVMe"
        )


def _fetch(client: S3Client, store: S3Store, bucket: str, folder: Path, missing: Objects) -> None:
    progress = _Progress(sum(size for size, _ in missing.values()))
    base = store.uri.removeprefix(f"s3://{bucket}").removeprefix("/")

    def fetch(name: str, offset: int, length: int) -> tuple[str, int]:
        path, (size, etag) = _partial(folder / name), missing[name]
        key = f"{base}/{name}" if base else name
        if size <= SMALL_BYTES:
            path.write_bytes(client.get_object(Bucket=bucket, Key=key, IfMatch=etag)["Body"].read())
        else:
            with path.open("r+b") as file:
                store.read_into(name, offset, memoryview(mmap.mmap(file.fileno(), length, offset=offset)))
            client.head_object(Bucket=bucket, Key=key, IfMatch=etag)  # still the version that was listed
        return name, length

    pieces: list[tuple[str, int, int]] = []
    for name, (size, _) in missing.items():
        path = _partial(folder / name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if size > SMALL_BYTES:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and a SIGBUS in the mapping
        pieces += [(name, offset, min(PIECE_BYTES, size - offset)) for offset in range(0, max(size, 1), PIECE_BYTES)]
    left = Counter(name for name, _, _ in pieces)
    with (
        (folder / JOURNAL).open("a", encoding="utf-8") as journal,
        concurrent.futures.ThreadPoolExecutor(THREADS) as pool,
    ):
        waiting = [pool.submit(fetch, *piece) for piece in pieces]
        try:
            for future in concurrent.futures.as_completed(waiting):
                name, length = future.result()
                left[name] -= 1
                if not left[name]:
                    _partial(folder / name).replace(folder / name)
                    # The line break comes first: it ends a line that a killed process left torn.
                    journal.write("\n" + json.dumps([name, *missing[name]]))
                    journal.flush()
                progress.add(length)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


class _Progress:
    """A log line every ``PROGRESS_INTERVAL_S``."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._started = self._logged = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._logged >= PROGRESS_INTERVAL_S or self._done == self._total:
            self._logged = now
            speed = self._done / 2**20 / max(now - self._started, 1e-3)
            logger.info("data: %.2f of %.2f GiB copied, %.0f MiB/s", self._done / 2**30, self._total / 2**30, speed)
