"""The checkpoint format: shards first, the manifest last, nothing ever overwritten, and the newest valid one wins.

    step-00000120-5f3a9c1e.1/replicated.pt   model, optimizer, scheduler, scaler: the same on every rank, rank 0 writes
    step-00000120-5f3a9c1e.1/rank-00000.pt   what is each rank's own: random generators, buffers, data position
    step-00000120-5f3a9c1e.1/rank-00001.pt
    step-00000120-5f3a9c1e.1/manifest.json   size and SHA-256 of each shard, and of itself

The prefix carries the writing run's random id and its save's number, so that two writers (a node thought dead that
was only slow) never meet in one prefix. A prefix without a manifest is a save that did not finish and does not count.
Checksums are ours because ``torch.load`` and ``torch.distributed.checkpoint`` accept a flipped bit without complaint.

The manifest names a layout and a kind for each shard, so that sharded states (FSDP2 with DCP) can be added beside
``replicated`` without breaking a reader.
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
from bootstrap.training.stores import Store, file_digest

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST_NAME = "manifest.json"
REPLICATED_NAME = "replicated.pt"
_PREFIX = re.compile(r"^step-(\d{8,})-[0-9a-f]+\.\d+$")

Layout = Literal["replicated"]
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
    """What makes a set of shards a checkpoint.

    Attributes:
        step: completed optimizer steps.
        samples: completed samples, step times global_batch: the data position on any number of ranks.
        created_unix_s: when it was committed.
        torch_version: that wrote the shards.
    """

    step: int
    samples: int
    world_size: int
    global_batch: int
    dataset_size: int
    seed: int
    layout: Layout
    created_unix_s: float
    torch_version: str
    shards: tuple[Shard, ...]

    def to_bytes(self) -> bytes:
        """JSON with a checksum of its own, so that a torn or flipped manifest is found out."""
        body = {"format": FORMAT, **asdict(self)}
        return (json.dumps({"sha256": _digest(body), "checkpoint": body}, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read what ``to_bytes`` wrote.

        Raises:
            InvalidCheckpoint: not the bytes that were written.
            CheckpointError: whole, and of a format this version does not know.
        """
        try:
            outer = json.loads(data)
            body = outer["checkpoint"]
            if _digest(body) != outer["sha256"]:
                raise InvalidCheckpoint("its manifest's checksum is wrong")
            found = body.pop("format")
            if found != FORMAT:
                raise CheckpointError(f"its manifest has format {found}, and this version reads {FORMAT}")
            shards = tuple(Shard(**shard) for shard in body.pop("shards"))
            return cls(**body, shards=shards)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"its manifest is torn: {error}") from error

    def shard(self, name: str) -> Shard:
        """The shard of that name; KeyError if there is none."""
        for shard in self.shards:
            if shard.name == name:
                return shard
        raise KeyError(name)

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.bytes for shard in self.shards)


def rank_shard_name(rank: int) -> str:
    """File of one rank's own state."""
    return f"rank-{rank:05d}.pt"


def prefix_name(step: int, writer_id: str, save_number: int) -> str:
    """Folder of one save; unique, as ``writer_id`` is random and a writer counts its saves."""
    return f"step-{step:08d}-{writer_id}.{save_number}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A committed checkpoint whose manifest reads well; its shards are not yet verified."""

    prefix: str
    manifest: Manifest


class Checkpoints:
    """The committed checkpoints of one store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def scan(self) -> tuple[list[Candidate], list[str]]:
        """Committed checkpoints, newest first, and the reason for each committed one that cannot be read.

        Raises:
            CheckpointError: the store cannot be listed, or a checkpoint is of a newer format.
        """
        found, broken = [], []
        for prefix, names in self._prefixes().items():
            if f"{prefix}/{MANIFEST_NAME}" not in names:
                logger.info("%s/%s has no manifest: a save that did not finish", self.store.uri, prefix)
                continue
            try:
                found.append(Candidate(prefix=prefix, manifest=self._manifest(prefix)))
            except (InvalidCheckpoint, FileNotFoundError) as error:
                broken.append(f"{prefix}: {error}")
                logger.error("checkpoint %s/%s is not valid: %s", self.store.uri, prefix, error)
            except CheckpointError as error:
                raise CheckpointError(f"checkpoint {self.store.uri}/{prefix}: {error}") from error
        found.sort(key=_age, reverse=True)
        return found, broken

    def _prefixes(self) -> dict[str, set[str]]:
        grouped: dict[str, set[str]] = {}
        for name in self.store.names("step-"):
            prefix, slash, _ = name.partition("/")
            if slash and _PREFIX.match(prefix):
                grouped.setdefault(prefix, set()).add(name)
        return grouped

    def _manifest(self, prefix: str) -> Manifest:
        manifest = Manifest.from_bytes(self.store.read(f"{prefix}/{MANIFEST_NAME}"))
        if manifest.step != _step_of(prefix):
            raise InvalidCheckpoint(f"its manifest is of step {manifest.step}, and its name says another")
        return manifest

    @contextmanager
    def verified(self, candidate: Candidate, name: str) -> Iterator[Path]:
        """Local path of one shard whose size and SHA-256 are the manifest's.

        Raises:
            InvalidCheckpoint: missing, truncated or changed.
            CheckpointError: the store cannot be read.
        """
        try:
            shard = candidate.manifest.shard(name)
            with self.store.fetch(f"{candidate.prefix}/{name}") as path:
                found = file_digest(path)
                if found.bytes != shard.bytes:
                    raise InvalidCheckpoint(f"{name} has {found.bytes} bytes, its manifest says {shard.bytes}")
                if found.sha256 != shard.sha256:
                    raise InvalidCheckpoint(f"{name} has another SHA-256 than its manifest says")
                yield path
        except (KeyError, FileNotFoundError) as error:
            raise InvalidCheckpoint(f"{name} is missing") from error

    def verify(self, candidate: Candidate, *, besides: Collection[str] = ()) -> None:
        """Read every shard ``besides`` some and check it; raises as ``verified``."""
        for shard in candidate.manifest.shards:
            if shard.name not in besides:
                with self.verified(candidate, shard.name):
                    pass

    def commit(self, prefix: str, manifest: Manifest) -> None:
        """Write the manifest: from here on the checkpoint counts."""
        data = manifest.to_bytes()
        self.store.write(f"{prefix}/{MANIFEST_NAME}", lambda file: _write(file, data))

    def prune(self, *, keep: int, known_valid: str | None = None) -> list[str]:
        """Delete what is older than the newest valid checkpoint and ``keep - 1`` others before it.

        The newest valid one is found by reading it, unless it is ``known_valid``, which this process just wrote.
        Newer ones that fail are left for a person to look at. Deletes a manifest before its shards, so a checkpoint
        is never half there.

        Args:
            keep: at least 1.
            known_valid: prefix to trust without reading.

        Returns:
            Deleted prefixes.
        """
        if keep < 1:
            raise CheckpointError(f"keep is {keep}; at least the newest valid checkpoint is kept")
        candidates, _ = self.scan()
        newest = next((index for index, one in enumerate(candidates) if self._trust(one, known_valid)), None)
        if newest is None:
            return []
        kept = candidates[: newest + keep]
        kept_prefixes = {one.prefix for one in kept}
        oldest_kept_step = kept[-1].manifest.step
        deleted = []
        for prefix, names in self._prefixes().items():
            # Below the oldest kept step nobody writes any more: old checkpoints, and debris of saves that died.
            if prefix in kept_prefixes or _step_of(prefix) >= oldest_kept_step:
                continue
            for name in sorted(names, key=lambda name: not name.endswith(MANIFEST_NAME)):
                self.store.delete(name)
            deleted.append(prefix)
        return deleted

    def _trust(self, candidate: Candidate, known_valid: str | None) -> bool:
        if candidate.prefix == known_valid:
            return True
        try:
            self.verify(candidate)
        except InvalidCheckpoint as error:
            logger.error("checkpoint %s/%s is not valid: %s", self.store.uri, candidate.prefix, error)
            return False
        return True


def _age(candidate: Candidate) -> tuple[int, float, str]:
    return candidate.manifest.step, candidate.manifest.created_unix_s, candidate.prefix


def _step_of(prefix: str) -> int:
    return int(prefix.split("-")[1])


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write(file: Any, data: bytes) -> None:
    file.write(data)
