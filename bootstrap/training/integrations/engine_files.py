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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from bootstrap.contract.checkpoint import ENGINE_PREFIX, ManifestError, compact_json, torn
from bootstrap.training.checkpoint import AnyManifest, Committed, CommittedFolders, refuse_other_format
from bootstrap.training.checksum import checksum, matches
from bootstrap.training.errors import InvalidCheckpoint

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """One file of the engine's checkpoint, by its path in the checkpoint's folder."""

    name: str
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class EngineManifest(AnyManifest):
    """Contents of an engine's checkpoint.

    ``order``: what the order of the samples follows from (dataset_size, seed), and the model's configuration, as far as
    the callback knows them.
    """

    engine: str
    files: tuple[EngineFile, ...]
    order: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """JSON with a checksum of its own."""
        body = {"format": FORMAT, **asdict(self)}
        document = {"checksum": checksum(memoryview(compact_json(body))), "checkpoint": body}
        return (json.dumps(document, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> EngineManifest:
        """Read ``to_bytes``; ManifestError for changed bytes, CheckpointError for another format."""
        with torn():
            document = json.loads(data)
            body = document["checkpoint"]
            if not matches(memoryview(compact_json(body)), document["checksum"]):
                raise ManifestError("its manifest's checksum is wrong")
            refuse_other_format(body.pop("format"), FORMAT)
            return cls(files=tuple(EngineFile(**file) for file in body.pop("files")), **body)

    @property
    def run_facts(self) -> Mapping[str, Any]:
        """Facts of the run that saved."""
        return {**self.order, "engine": self.engine, "samples_a_step": self.global_batch}


@dataclass(frozen=True, kw_only=True)
class Fetched(Committed[EngineManifest]):
    """A valid checkpoint on this node's disk."""

    folder: Path


class EngineFiles(CommittedFolders[EngineManifest]):
    """An engine's checkpoints in one store. The newest is valid: the process saved it, or resumed from it."""

    kind, pattern, parse = "engine", ENGINE_PREFIX, staticmethod(EngineManifest.from_bytes)

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
                prefix = checkpoint.prefix
                try:
                    self._download(checkpoint, folder / prefix)
                except InvalidCheckpoint as error:
                    problems.append(f"{prefix}: {error}")
                    logger.error("checkpoint %s is not valid, trying an older one: %s", prefix, error)
                    continue
                for old in folder.glob("engine-*"):
                    if old.name != prefix:
                        shutil.rmtree(old, ignore_errors=True)
                return Fetched(prefix=prefix, manifest=checkpoint.manifest, folder=folder / prefix)
        self.refuse_damaged(problems)
        return None

    def _download(self, checkpoint: Committed[EngineManifest], folder: Path) -> None:
        files = checkpoint.manifest.files
        if folder.exists():
            if all(_is_whole(folder / file.name, file) for file in files):
                return
            shutil.rmtree(folder)
        new = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            for file in files:
                name = PurePosixPath(file.name)
                if name.is_absolute() or ".." in name.parts:
                    raise InvalidCheckpoint(f"{file.name} leads out of its folder")
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                data = bytearray(file.bytes)
                try:
                    self.store.read_into(f"{checkpoint.prefix}/files/{file.name}", 0, memoryview(data))
                except FileNotFoundError as error:
                    raise InvalidCheckpoint(f"{file.name} is missing") from error
                if not matches(memoryview(data), file.checksum):
                    raise InvalidCheckpoint(f"{file.name} has another checksum than its manifest says")
                (new / name).write_bytes(data)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


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
