"""Checkpoint format: shards first, the manifest last, nothing overwritten; the newest valid checkpoint is used.

    step-00000120-5f3a9c1e.1/replicated.pt   model, optimizer, scheduler, scaler: the same on every rank, rank 0 writes
    step-00000120-5f3a9c1e.1/rank-00000.pt   each rank's own: random generators, buffers
    step-00000120-5f3a9c1e.1/manifest.json   size and SHA-256 of each shard, and of itself

The writer's random id and the save's number keep two writers apart (a node thought dead was only slow). A prefix
without a manifest does not count. ``torch.load`` and ``torch.distributed.checkpoint`` accept a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bootstrap.training.errors import CheckpointError, InvalidCheckpoint
from bootstrap.training.stores.base import Store, file_digest

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST_NAME = "manifest.json"
REPLICATED_NAME = "replicated.pt"
_PREFIX = re.compile(r"^step-(\d{8,})-[0-9a-f]+\.\d+$")

ShardKind = Literal["replicated", "rank"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a checkpoint."""

    name: str
    kind: ShardKind
    rank: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint; ``step`` and ``samples`` are completed."""

    step: int
    samples: int
    world_size: int
    global_batch: int
    dataset_size: int
    seed: int
    layout: Literal["replicated"]
    created_unix_s: float
    torch_version: str
    shards: tuple[Shard, ...]

    def to_bytes(self) -> bytes:
        """JSON with a checksum of its own."""
        body = {"format": FORMAT, **asdict(self)}
        return (json.dumps({"sha256": _digest(body), "checkpoint": body}, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read ``to_bytes``; InvalidCheckpoint for changed bytes, CheckpointError for another format."""
        try:
            document = json.loads(data)
            body = document["checkpoint"]
            if _digest(body) != document["sha256"]:
                raise InvalidCheckpoint("its manifest's checksum is wrong")
            if (version := body.pop("format")) != FORMAT:
                raise CheckpointError(f"its manifest has format {version}, and this version reads {FORMAT}")
            return cls(shards=tuple(Shard(**shard) for shard in body.pop("shards")), **body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"its manifest is torn: {error}") from error


def rank_shard_name(rank: int) -> str:
    """File of one rank's own state."""
    return f"rank-{rank:05d}.pt"


def prefix_name(step: int, writer_id: str, save_number: int) -> str:
    """Folder of one save."""
    return f"step-{step:08d}-{writer_id}.{save_number}"


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A checkpoint with a valid manifest; its shards are not verified yet."""

    prefix: str
    manifest: Manifest


class Checkpoints:
    """Committed checkpoints of one store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def scan(self) -> tuple[list[Committed], list[str]]:
        """Committed checkpoints, newest first, and the faults of invalid ones; CheckpointError for a newer format."""
        committed, broken = [], []
        for prefix, names in self._names_by_prefix().items():
            if f"{prefix}/{MANIFEST_NAME}" not in names:
                logger.info("%s/%s has no manifest: a save that did not finish", self.store.uri, prefix)
                continue
            try:
                committed.append(Committed(prefix=prefix, manifest=self._read_manifest(prefix)))
            except (InvalidCheckpoint, FileNotFoundError) as error:
                broken.append(f"{prefix}: {error}")
                logger.error("checkpoint %s/%s is not valid: %s", self.store.uri, prefix, error)
            except CheckpointError as error:
                raise CheckpointError(f"checkpoint {self.store.uri}/{prefix}: {error}") from error
        committed.sort(key=lambda one: (one.manifest.step, one.manifest.created_unix_s, one.prefix), reverse=True)
        return committed, broken

    def _names_by_prefix(self) -> dict[str, set[str]]:
        names_by_prefix: dict[str, set[str]] = {}
        for name in self.store.names("step-"):
            prefix, slash, _ = name.partition("/")
            if slash and _PREFIX.match(prefix):
                names_by_prefix.setdefault(prefix, set()).add(name)
        return names_by_prefix

    def _read_manifest(self, prefix: str) -> Manifest:
        manifest = Manifest.from_bytes(self.store.read(f"{prefix}/{MANIFEST_NAME}"))
        if manifest.step != _step_of(prefix):
            raise InvalidCheckpoint(f"its manifest has step {manifest.step}, and its name another step")
        return manifest

    @contextmanager
    def verified(self, checkpoint: Committed, name: str) -> Iterator[Path]:
        """Local path of one shard; InvalidCheckpoint where it is missing, truncated or changed."""
        shard = next((shard for shard in checkpoint.manifest.shards if shard.name == name), None)
        try:
            if shard is None:
                raise FileNotFoundError(name)
            with self.store.fetch(f"{checkpoint.prefix}/{name}") as path:
                actual = file_digest(path)
                if actual.bytes != shard.bytes:
                    raise InvalidCheckpoint(f"{name} has {actual.bytes} bytes, its manifest says {shard.bytes}")
                if actual.sha256 != shard.sha256:
                    raise InvalidCheckpoint(f"{name} has another SHA-256 than its manifest says")
                yield path
        except FileNotFoundError as error:
            raise InvalidCheckpoint(f"{name} is missing") from error

    def verify(self, checkpoint: Committed, *, skip: Collection[str] = ()) -> None:
        """Read and check every shard but those named in ``skip``; raises as ``verified``."""
        for shard in checkpoint.manifest.shards:
            if shard.name not in skip:
                with self.verified(checkpoint, shard.name):
                    pass

    def commit(self, prefix: str, manifest: Manifest) -> None:
        """Write the manifest: from here on the checkpoint counts."""
        self.store.write(f"{prefix}/{MANIFEST_NAME}", lambda file: file.write(manifest.to_bytes()))

    def prune(self, *, keep: int, known_valid: str | None = None) -> list[str]:
        """Delete all checkpoints older than the newest valid one and the ``keep - 1`` before it; return their prefixes.

        Newer invalid ones stay. ``known_valid``, just written, is not read again.
        """
        if keep < 1:
            raise CheckpointError(f"keep is {keep}; at least the newest valid checkpoint is kept")
        committed, _ = self.scan()
        newest = next((i for i, one in enumerate(committed) if one.prefix == known_valid or self._is_valid(one)), None)
        if newest is None:
            return []
        kept = {one.prefix: one.manifest.step for one in committed[: newest + keep]}
        deleted = []
        for prefix, names in self._names_by_prefix().items():
            # No save below the oldest kept step is still being written.
            if prefix in kept or _step_of(prefix) >= min(kept.values()):
                continue
            for name in sorted(names, key=lambda name: not name.endswith(MANIFEST_NAME)):
                self.store.delete(name)
            deleted.append(prefix)
        return deleted

    def _is_valid(self, checkpoint: Committed) -> bool:
        try:
            self.verify(checkpoint)
        except InvalidCheckpoint as error:
            logger.error("checkpoint %s/%s is not valid: %s", self.store.uri, checkpoint.prefix, error)
            return False
        return True


def _step_of(prefix: str) -> int:
    return int(prefix.split("-")[1])


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
