"""Files of an engine's own checkpoint format in a store: uploaded, verified, newest valid first.

engine-00000120-5f3a9c1e.1/files/...        the engine's files, under their own names
engine-00000120-5f3a9c1e.1/manifest.json    size and checksum of each file and of itself, written last
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from bootstrap.contract.checkpoint import ENGINE_PREFIX, compact_json
from bootstrap.training.checkpoint import Committed, CommittedFolders
from bootstrap.training.checksum import checksum, matches
from bootstrap.training.errors import CheckpointError, InvalidCheckpoint

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """One file of the engine's checkpoint, by its path in the checkpoint's folder."""

    name: str
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """Contents of a checkpoint after ``step`` completed steps of ``global_batch`` samples.

    ``order``: what the order of the samples follows from (dataset_size, seed), and the model's configuration, as far as
    the callback knows them.
    """

    engine: str
    step: int
    world_size: int
    global_batch: int
    created_unix_s: float
    files: tuple[EngineFile, ...]
    order: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """JSON with a checksum of its own."""
        body = {"format": FORMAT, **asdict(self)}
        return (json.dumps({"checksum": _digest(body), "checkpoint": body}, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> EngineManifest:
        """Read ``to_bytes``; InvalidCheckpoint for changed bytes, CheckpointError for another format."""
        try:
            document = json.loads(data)
            body = document["checkpoint"]
            if not matches(_view(body), document["checksum"]):
                raise InvalidCheckpoint("its manifest's checksum is wrong")
            if (version := body.pop("format")) != FORMAT:
                raise CheckpointError(f"its manifest has format {version}, and this version reads {FORMAT}")
            return cls(files=tuple(EngineFile(**file) for file in body.pop("files")), **body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"its manifest is torn: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A valid checkpoint on this node's disk."""

    prefix: str
    manifest: EngineManifest
    folder: Path


class EngineFiles(CommittedFolders[EngineManifest]):
    """An engine's checkpoints in one store."""

    pattern = ENGINE_PREFIX

    def parse(self, data: bytes) -> EngineManifest:
        """See ``CommittedFolders``."""
        return EngineManifest.from_bytes(data)

    def facts_in(self, manifest: EngineManifest) -> Mapping[str, Any]:
        """See ``CommittedFolders``."""
        return engine_facts(manifest.engine, manifest.global_batch, manifest.order)

    def is_valid(self, checkpoint: Committed[EngineManifest]) -> bool:
        """True: the process saved the newest, or resumed from it."""
        return True

    def upload(self, prefix: str, folder: Path, names: Sequence[str]) -> list[EngineFile]:
        """Write files of ``folder``; they count once ``commit`` has named them."""
        files = []
        for name in names:
            with _mapped(folder / name) as view:
                self.store.write(f"{prefix}/files/{name}", [view])
                files.append(EngineFile(name=name, bytes=view.nbytes, checksum=checksum(view)))
        return files

    def fetch_newest(self, folder: Path) -> Fetched | None:
        """Copy the newest valid checkpoint into ``folder``, once a node; None where the store has none.

        Raises:
            CheckpointError: all of them are damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        committed, problems = self.scan()
        # The other processes of the node wait here, and find the files.
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for checkpoint in committed:
                prefix, manifest = checkpoint.prefix, checkpoint.manifest
                try:
                    self._download(prefix, manifest, folder / prefix)
                except InvalidCheckpoint as error:
                    problems.append(f"{prefix}: {error}")
                    logger.error("checkpoint %s is not valid, trying an older one: %s", prefix, error)
                    continue
                for old in folder.glob("engine-*"):
                    if old.name != prefix:
                        shutil.rmtree(old, ignore_errors=True)
                return Fetched(prefix=prefix, manifest=manifest, folder=folder / prefix)
        if problems:
            raise CheckpointError(
                f"no valid checkpoint in {self.store.uri}, and these are damaged: {' | '.join(problems)}. Starting "
                "over would throw away what they hold: restore one, or move them away to start over"
            )
        return None

    def _download(self, prefix: str, manifest: EngineManifest, folder: Path) -> None:
        if folder.exists():
            if all(_is_whole(folder / file.name, file) for file in manifest.files):
                return
            shutil.rmtree(folder)
        new = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            for file in manifest.files:
                name = PurePosixPath(file.name)
                if name.is_absolute() or ".." in name.parts:
                    raise InvalidCheckpoint(f"{file.name} leads out of its folder")
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                data = bytearray(file.bytes)
                try:
                    self.store.read_into(f"{prefix}/files/{file.name}", 0, memoryview(data))
                except FileNotFoundError as error:
                    raise InvalidCheckpoint(f"{file.name} is missing") from error
                if not matches(memoryview(data), file.checksum):
                    raise InvalidCheckpoint(f"{file.name} has another checksum than its manifest says")
                (new / name).write_bytes(data)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def engine_facts(engine: str, global_batch: int, order: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that tell two runs in one store apart; ``order``: as EngineManifest's."""
    return {"engine": engine, "global_batch": global_batch, **order}


def prefix_name(step: int, writer_id: str, save_number: int) -> str:
    """Folder of one save in the store."""
    return f"engine-{step:08d}-{writer_id}.{save_number}"


def file_names(folder: Path) -> list[str]:
    """Paths of all files below ``folder``, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def now_unix_s() -> float:
    """Wall time for a manifest."""
    return round(time.time(), 3)


def _is_whole(path: Path, file: EngineFile) -> bool:
    if not path.is_file():
        return False
    with _mapped(path) as view:
        return view.nbytes == file.bytes and matches(view, file.checksum)


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # mmap refuses an empty file
            yield memoryview(b"")
            return
        # Not closed here: a client's threads may hold the view a moment longer than the request, and close would fail.
        yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _view(body: dict[str, Any]) -> memoryview:
    return memoryview(compact_json(body))


def _digest(body: dict[str, Any]) -> str:
    return checksum(_view(body))
