"""Staging: an S3 prefix is copied once a node to its local disk, and used again after a restart."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.contract.staging import CONNECTIONS, PROGRESS, PROGRESS_S, RESERVE_BYTES, THREADS
from bootstrap.training.errors import CheckpointError, ConfigurationError, TrainingError
from bootstrap.training.stores.s3 import SCRATCH_VARIABLE, S3Store, make_client

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger(__name__)

# Requests at a time. A large file is read in pieces, each by the CRT in parallel ranges; small files are worth boto3's
# lighter requests.
PIECE_BYTES = 256 * 2**20
SMALL_BYTES = 8 * 2**20
# Beside the files, once all are copied: the torchrun start that copied them, and their sizes and ETags.
COMPLETE = ".staged"
# In place of a start: this node's set-up copied all, so that no start of the workers asks S3 again.
BY_NODE = "node"
# Longest time in which a linked file system shows no further object, s.
LINK_STALL_S = 600.0
# Folder that the set-up copied to (contract/node_env.py).
DATA_VARIABLE = "GPUFLEET_DATA_DIR"

# Name relative to the folder → size and ETag.
Objects = dict[str, tuple[int, str]]


def stage(uri: str, *, suffixes: tuple[str, ...] = ()) -> Path:
    """Local path of a folder, a file or ``s3://BUCKET/PREFIX``.

    Local rank 0 copies from S3 and the node's other ranks wait, so call it on every rank, before the process group is
    made (its timeout is shorter than a large copy). A whole copy of the same objects stays, and data that the node's
    set-up copied is taken as it is.

    Args:
        suffixes: ends of the names to copy; default: all.

    Raises:
        ConfigurationError: nothing there, no access, or too little disk space.
        CheckpointError: S3 does not answer, or the disk does not take the copy.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        path = Path(parts.path if parts.scheme else uri).expanduser()
        if not path.exists():
            raise ConfigurationError(
                f"{uri} does not exist on this node; expected a path that every node has, or s3://…"
            )
        return path
    bucket, prefix, folder = _place(uri)
    if os.environ.get(DATA_VARIABLE) == str(_root_of(folder, prefix)) and _copied_by(folder) == BY_NODE:
        pass
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        _copy(uri, bucket, prefix, folder, suffixes, _session())
    else:
        while _copied_by(folder) != _session():
            time.sleep(0.5)
    return _root_of(folder, prefix)


def wait_for_linked(uri: str, folder: Path) -> Path:
    """Wait until ``folder`` of a file system that AWS links to ``s3://BUCKET/PREFIX`` shows each object with its size.

    FSx lists the objects after it has made the link, so a node could find some of them and train on less:
    https://docs.aws.amazon.com/fsx/latest/LustreGuide/create-dra-linked-data-repo.html

    Raises:
        ConfigurationError: nothing there or no access; or no object appears for LINK_STALL_S, as one that came after
            the link.
        CheckpointError: S3 does not answer.
    """
    bucket, prefix, _ = _place(uri)
    base, objects = _list(uri, make_client(attempts=8, connections=THREADS), bucket, prefix)
    if base != prefix:
        raise ConfigurationError(f"{uri} is one object, and a file system is linked to a prefix: name its folder")
    missing, grew = set(objects), time.monotonic()
    while True:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            sizes = pool.map(lambda name: (name, _size(folder / name)), missing)
            absent = {name for name, size in sizes if size != objects[name][0]}
        logger.info("data: %d of %d files are in %s", len(objects) - len(absent), len(objects), folder)
        if not absent:
            return folder
        if len(absent) < len(missing):
            grew = time.monotonic()
        elif time.monotonic() - grew > LINK_STALL_S:
            raise ConfigurationError(
                f"{uri}: the file system lacks {len(absent)} objects, such as {min(absent)}, and none came for "
                f"{LINK_STALL_S:g} s: remove what is newer than its link, or `gpufleet down` and up again"
            )
        missing = absent
        time.sleep(PROGRESS_S)


def _place(uri: str) -> tuple[str, str, Path]:
    """Bucket and prefix of a URI, and the folder of its copy."""
    parts = urlsplit(uri)
    prefix = parts.path.strip("/")
    if parts.scheme != "s3" or not parts.netloc or not prefix:
        raise ConfigurationError(f"{uri!r}: data comes from a path or s3://BUCKET/PREFIX")
    root = Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir()) / "gpufleet-data"
    return parts.netloc, prefix, root / f"{PurePosixPath(prefix).name}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"


def _root_of(folder: Path, prefix: str) -> Path:
    """Path that the data begins at: the folder, or the one file that the URI names."""
    single = folder / PurePosixPath(prefix).name
    return single if single.is_file() else folder


def _copy(uri: str, bucket: str, prefix: str, folder: Path, suffixes: tuple[str, ...], session: str) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    client = make_client(attempts=8, connections=THREADS)
    base, objects = _list(uri, client, bucket, prefix, suffixes)
    try:
        if _last_copy(folder) != objects or any(_size(folder / name) != size for name, (size, _) in objects.items()):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            needed, free = sum(size for size, _ in objects.values()), shutil.disk_usage(folder).free
            if needed + RESERVE_BYTES > free:
                raise ConfigurationError(
                    f"{uri} needs {needed / 2**30:.1f} GiB and {folder} has {free / 2**30:.1f} GiB free, of which "
                    f"{RESERVE_BYTES / 2**30:.0f} stay free: give workload.data_gib in the request, so that gpufleet "
                    f"recommend takes a type with enough NVMe, or set {SCRATCH_VARIABLE} to a larger disk"
                )
            _fetch(client, S3Store(bucket, base, client=client, connections=CONNECTIONS), bucket, folder, objects)
    except (BotoCoreError, ClientError, CheckpointError, FileNotFoundError) as error:
        if "PreconditionFailed" in str(error) or "Precondition Failed" in str(error):
            raise ConfigurationError(
                f"{uri} changed while it was copied; start again when its writer is done"
            ) from error
        raise _as_ours(uri, error) from error
    except OSError as error:
        raise CheckpointError(  # another node's disk may take it
            f"{uri} cannot be copied to {folder}: {error}; set {SCRATCH_VARIABLE} to a disk with room that takes files"
        ) from error
    os.sync()  # what says that all is there is written after it
    new = folder / f"{COMPLETE}.new"
    new.write_text(f"{session}\n{json.dumps(objects)}", encoding="utf-8")
    new.replace(folder / COMPLETE)


def _as_ours(uri: str, error: Exception) -> TrainingError:
    """Translate an error of S3: a refusal comes again, a busy service and a lost connection may not."""
    status = getattr(error.__cause__, "status", None)
    if response := getattr(error, "response", None):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(error, FileNotFoundError) or (status or 500) // 100 == 4:
        return ConfigurationError(
            f"{uri} cannot be read ({error}); the node's role needs s3:ListBucket and s3:GetObject on it"
        )
    return CheckpointError(f"{uri} could not be read to the end: {error}")


def _session() -> str:
    """This start of the node's workers: the same text in all local ranks, another one after torchrun started again."""
    run, count = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    return f"{run} {count} {os.getppid()}"


def _list(uri: str, client: S3Client, bucket: str, prefix: str, suffixes: tuple[str, ...] = ()) -> tuple[str, Objects]:
    """Folder in the bucket and its objects with ``suffixes``; where ``prefix`` is an object, it and its sidecars."""
    from botocore.exceptions import BotoCoreError, ClientError

    objects, single = {}, {}
    path = PurePosixPath(prefix)
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=str(path.with_suffix("")))
        found = [item for page in pages for item in page.get("Contents", [])]
    except (BotoCoreError, ClientError) as error:
        raise _as_ours(uri, error) from error
    for item in found:
        key, entry = item["Key"], (item["Size"], item["ETag"])
        if key.startswith(prefix + "/") and not key.endswith("/"):
            objects[key.removeprefix(prefix + "/")] = entry
        elif PurePosixPath(key).with_suffix("") == path.with_suffix(""):
            single[PurePosixPath(key).name] = entry
    if not objects and path.name in single:
        prefix, objects = "" if path.parent == PurePosixPath(".") else str(path.parent), single
    objects = {name: entry for name, entry in objects.items() if name.endswith(suffixes or "")}
    if not objects:
        ends = f" that ends with {' or '.join(suffixes)}" if suffixes else ""
        raise ConfigurationError(f"{uri}: no object{ends} under this prefix; see aws s3 ls {uri}/")
    folders = {str(parent) for name in objects for parent in PurePosixPath(name).parents}
    for name in objects:
        if name in folders or str(PurePosixPath("/", name)) != f"/{name}" or ".." in PurePosixPath(name).parts:
            raise ConfigurationError(
                f"{uri} has the object {name!r}, which is no file below a folder of a disk; copy it to another name, "
                "or name a prefix without it"
            )
    return prefix, objects


def _copied_by(folder: Path) -> str:
    """Session of the last copy that came to its end. The list of a million files would take each rank seconds."""
    with suppress(FileNotFoundError), (folder / COMPLETE).open(encoding="utf-8") as file:
        return file.readline().rstrip("\n")
    return ""


def _last_copy(folder: Path) -> Objects:
    """Objects of the last complete copy; an interrupted copy does not count."""
    with suppress(FileNotFoundError, ValueError):
        objects = json.loads((folder / COMPLETE).read_text(encoding="utf-8").partition("\n")[2])
        return {name: (size, etag) for name, (size, etag) in objects.items()}
    return {}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _fetch(client: S3Client, store: S3Store, bucket: str, folder: Path, objects: Objects) -> None:
    base = store.uri.removeprefix(f"s3://{bucket}").removeprefix("/")
    pieces: list[tuple[str, int, int]] = []
    for name, (size, _) in objects.items():
        path = _partial(folder / name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if size > SMALL_BYTES:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and a SIGBUS in the mapping
        pieces += [(name, offset, min(PIECE_BYTES, size - offset)) for offset in range(0, max(size, 1), PIECE_BYTES)]
    left, lock = Counter(name for name, _, _ in pieces), threading.Lock()

    def fetch(name: str, offset: int, length: int) -> tuple[int, bool]:
        path, (size, etag) = _partial(folder / name), objects[name]
        key = f"{base}/{name}" if base else name
        if size <= SMALL_BYTES:  # botocore compares the bytes with S3's checksum
            answer = client.get_object(Bucket=bucket, Key=key, IfMatch=etag, ChecksumMode="ENABLED")
            path.write_bytes(answer["Body"].read())
        else:
            with path.open("r+b") as file:
                store.read_into(name, offset, memoryview(mmap.mmap(file.fileno(), length, offset=offset)))
        with lock:
            left[name] -= 1
            last = not left[name]
        if last:
            if size > SMALL_BYTES:  # still the version that was listed
                client.head_object(Bucket=bucket, Key=key, IfMatch=etag)
            path.replace(folder / name)
        return length, last

    total, copied, files = sum(size for size, _ in objects.values()), 0, 0
    started = logged = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(fetch, *piece) for piece in pieces]
        try:
            for future in concurrent.futures.as_completed(waiting):
                length, last = future.result()
                copied += length
                files += last
                if (now := time.monotonic()) - logged >= PROGRESS_S or files == len(objects):
                    logged = now
                    # Small files wait for requests, large ones for bytes: the slower share tells the time left.
                    share = min(copied / max(total, 1), files / len(objects)) or 1.0
                    seconds = max(now - started, 1e-3)
                    logger.info(
                        PROGRESS,
                        *(copied / 2**30, total / 2**30, files, len(objects), copied / 2**20 / seconds),
                        timedelta(seconds=round(seconds * (1 / share - 1))),
                    )
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def main() -> int:
    """Copy the data of the URI on the command line, or wait for it in a linked folder; print its folder.

    Called by steps/stage-data.sh.
    """
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    try:
        uri, *linked = sys.argv[1:]
        bucket, prefix, folder = _place(uri)
        if not linked and _copied_by(folder) != BY_NODE:
            _copy(uri, bucket, prefix, folder, (), BY_NODE)
        found = wait_for_linked(uri, Path(linked[0])) if linked else _root_of(folder, prefix)
        sys.stdout.write(f"{found}\n")
    except TrainingError as error:
        logger.error("FAIL %s", error)
        return EXIT_AT_FAULT if isinstance(error, ConfigurationError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
