"""Checkpoint format: the ranks' files first, the manifest last, nothing overwritten; the newest valid one is used.

    step-00000120-5f3a9c1e.1/rank-00000.bin   a rank's share: bytes of its tensors' chunks, then its plain values
    step-00000120-5f3a9c1e.1/manifest.json    index: where each chunk lies, checksum of each chunk and of itself

The writer's random id and the save's number keep two writers apart (a node thought dead was only slow). A prefix
without a manifest does not count. ``torch.load`` and ``torch.distributed.checkpoint`` accept a flipped bit. Plain
values (random generators, hyperparameters) are read with ``weights_only=True``: reading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeVar

from bootstrap.contract.checkpoint import (
    MANIFEST_NAME,
    STEP_PREFIX,
    ManifestError,
    checked_body,
    compact_json,
    rank_file_name,
    torn,
)
from bootstrap.training.checksum import matches
from bootstrap.training.errors import CheckpointError, InvalidCheckpoint, tells_full_disk
from bootstrap.training.facts import facts_of, is_same_fact
from bootstrap.training.index import Chunk, Index
from bootstrap.training.stores.base import Store

logger = logging.getLogger(__name__)

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class AnyManifest:
    """Contents of a checkpoint after ``step`` completed steps of ``global_batch`` samples."""

    step: int
    world_size: int
    global_batch: int
    created_unix_s: float

    @property
    def run_facts(self) -> Mapping[str, Any]:
        """Facts of the run that saved."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Manifest(AnyManifest):
    """Contents of a checkpoint of SpotTolerantRun; ``facts`` as of ``StoredCheckpoints``."""

    samples: int
    dataset_size: int
    seed: int
    torch_version: str
    index: Index
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """JSON with a checksum of its own."""
        facts = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "index"}
        body = compact_json({"format": FORMAT, **facts, "index": self.index.to_json()})
        return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","checkpoint":' + body + b"}\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read ``to_bytes``; ManifestError for changed bytes, CheckpointError for another format."""
        with torn():
            body = checked_body(data)
            refuse_other_format(body.pop("format"), FORMAT)
            return cls(index=Index.from_json(body.pop("index")), **body)

    @property
    def run_facts(self) -> Mapping[str, Any]:
        """Facts of the run that saved."""
        return facts_of(self, self.facts)


def refuse_other_format(version: object, known: int) -> None:
    """CheckpointError for a manifest of another version's format."""
    if version != known:
        raise CheckpointError(
            f"its manifest has format {version}, and this version reads {known}: go on with the version of gpufleet "
            "that wrote it, or use a new store"
        )


M = TypeVar("M", bound=AnyManifest)


@dataclass(frozen=True, kw_only=True)
class Committed(Generic[M]):
    """A checkpoint with a valid manifest; its files are not verified yet."""

    prefix: str
    manifest: M


class CommittedFolders(Generic[M]):
    """Committed checkpoints of one store. ``facts``: of the run, which tell its checkpoints from another run's.

    ``kind`` begins the name of each folder; ``parse`` reads a manifest.
    """

    kind: ClassVar[str]
    pattern: ClassVar[re.Pattern[str]]
    parse: Callable[[bytes], M]

    def __init__(self, store: Store, facts: Mapping[str, Any] | None = None) -> None:
        self.store = store
        self.facts = facts or {}

    def prefix_name(self, step: int, writer_id: str, save_number: int) -> str:
        """Folder of one save."""
        return f"{self.kind}-{step:08d}-{writer_id}.{save_number}"

    def is_valid(self, checkpoint: Committed[M]) -> bool:
        """True where a checkpoint's files are as written."""
        return True

    def scan(self) -> tuple[list[Committed[M]], list[str]]:
        """Committed checkpoints, newest first, and the faults of invalid ones; CheckpointError for a newer format."""
        committed, broken = [], []
        for prefix, names in self._names_by_prefix().items():
            if f"{prefix}/{MANIFEST_NAME}" not in names:
                logger.info("%s/%s has no manifest: a save that did not finish", self.store.uri, prefix)
                continue
            try:
                manifest = self.parse(self.store.read(f"{prefix}/{MANIFEST_NAME}"))
                if manifest.step != self._step_of(prefix):
                    raise ManifestError(f"its manifest has step {manifest.step}, and its name another step")
                committed.append(Committed(prefix=prefix, manifest=manifest))
            except (ManifestError, FileNotFoundError) as error:
                broken.append(f"{prefix}: {error}")
                logger.error("checkpoint %s/%s is not valid: %s", self.store.uri, prefix, error)
            except CheckpointError as error:
                raise CheckpointError(f"checkpoint {self.store.uri}/{prefix}: {error}") from error
        committed.sort(key=lambda it: (it.manifest.step, it.manifest.created_unix_s, it.prefix), reverse=True)
        return committed, broken

    def _names_by_prefix(self) -> dict[str, set[str]]:
        names_by_prefix: dict[str, set[str]] = {}
        for name in self.store.names(f"{self.kind}-"):
            prefix, slash, _ = name.partition("/")
            if slash and self.pattern.match(prefix):
                names_by_prefix.setdefault(prefix, set()).add(name)
        return names_by_prefix

    def _step_of(self, prefix: str) -> int:
        return int(prefix.split("-")[1])

    def differences(self, manifest: M) -> str:
        """Name the facts that run and checkpoint both have with different values; empty where all agree."""
        different = [
            f"{name} is {self.facts[name]!r:.100}, and was {value!r:.100}"
            for name, value in manifest.run_facts.items()
            if name in self.facts and not is_same_fact(self.facts[name], value)
        ]
        return ", ".join(different[:3])

    def refuse_damaged(self, problems: Sequence[str]) -> None:
        """CheckpointError where there are checkpoints and none is valid."""
        if problems:
            raise CheckpointError(
                f"no valid checkpoint in {self.store.uri}, and these are damaged: {' | '.join(problems)}. Starting "
                "over would throw away paid work: restore one, or move them away"
            )

    def commit(self, prefix: str, data: bytes) -> None:
        """Write the manifest: from here on the checkpoint counts."""
        self.store.write(f"{prefix}/{MANIFEST_NAME}", [data])

    def clean_up(self, prefix: str, problem: str, *, keep: int) -> None:
        """Delete older checkpoints; after a failed save its files, on a full disk all checkpoints but the newest."""
        try:
            if not problem:
                self.prune(keep=keep, known_valid=prefix)
                return
            self.discard(prefix)
            if tells_full_disk(problem) and (deleted := self.prune(keep=1)):
                names = ", ".join(sorted(deleted))
                logger.warning("%s is full: deleted %s, so that the next checkpoint has room", self.store.uri, names)
        except (CheckpointError, OSError) as error:
            logger.error("old checkpoints are not deleted: %s", error)

    def discard(self, prefix: str) -> None:
        """Delete the files of a save without a manifest; a manifest counts even if its upload got no answer."""
        names = self.store.names(f"{prefix}/")
        if f"{prefix}/{MANIFEST_NAME}" not in names:
            for name in names:
                self.store.delete(name)

    def prune(self, *, keep: int, known_valid: str | None = None) -> list[str]:
        """Delete all checkpoints older than the newest valid one and the ``keep - 1`` before it; return their prefixes.

        Newer invalid ones stay, and those of another run. ``known_valid``, just written, is not read again.
        """
        scanned, _ = self.scan()
        committed = [checkpoint for checkpoint in scanned if not self.differences(checkpoint.manifest)]
        own = {checkpoint.prefix for checkpoint in committed}
        if others := [checkpoint for checkpoint in scanned if checkpoint.prefix not in own]:
            logger.error(
                "%s has checkpoints of another run, which stay: %s, where %s. Where the newest is the other's, no "
                "start of this run goes on: give each run its own store",
                *(self.store.uri, others[0].prefix, self.differences(others[0].manifest)),
            )
        newest = next(
            (i for i, found in enumerate(committed) if found.prefix == known_valid or self.is_valid(found)), None
        )
        if newest is None:
            return []
        kept = {checkpoint.prefix: checkpoint.manifest.step for checkpoint in committed[: newest + keep]}
        deleted = []
        for prefix, names in self._names_by_prefix().items():
            # No save of this run below the oldest kept step is still being written.
            if prefix in kept or self._step_of(prefix) >= min(kept.values()) or (others and prefix not in own):
                continue
            for name in sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST_NAME}")):
                self.store.delete(name)
            deleted.append(prefix)
        return deleted


class StoredCheckpoints(CommittedFolders[Manifest]):
    """Checkpoints of ``SpotTolerantRun``; ``facts``: as ``facts_of`` gives them."""

    kind, pattern, parse = "step", STEP_PREFIX, staticmethod(Manifest.from_bytes)

    def read_chunks(self, checkpoint: Committed[Manifest], chunks: Sequence[Chunk], into: memoryview) -> None:
        """Read neighbouring ``chunks`` of one file and verify each; InvalidCheckpoint where one is not as written."""
        name = rank_file_name(chunks[0].file)
        try:
            self.store.read_into(f"{checkpoint.prefix}/{name}", chunks[0].at, into)
        except FileNotFoundError as error:
            raise InvalidCheckpoint(f"{name} is missing") from error
        for chunk in chunks:
            at = chunk.at - chunks[0].at
            if not matches(into[at : at + chunk.bytes], chunk.checksum):
                raise InvalidCheckpoint(
                    f"{name} has another checksum at bytes {chunk.at} to {chunk.at + chunk.bytes} than its manifest"
                )

    def is_valid(self, checkpoint: Committed[Manifest]) -> bool:
        """See ``CommittedFolders``; reads every byte."""
        try:
            for chunk in checkpoint.manifest.index.chunks():
                self.read_chunks(checkpoint, [chunk], memoryview(bytearray(chunk.bytes)))
        except InvalidCheckpoint as error:
            logger.error("checkpoint %s/%s is not valid: %s", self.store.uri, checkpoint.prefix, error)
            return False
        return True
