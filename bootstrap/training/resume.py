"""Resume: load the newest valid checkpoint into a training state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

import torch

from bootstrap.training.checkpoint import Committed, Manifest, StoredCheckpoints
from bootstrap.training.data_ranks import DataRanks
from bootstrap.training.errors import ConfigurationError, InvalidCheckpoint
from bootstrap.training.loading import READ_THREADS, load_tensors
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.state import MODEL, UNCHANGED, TrainingState, random_state, seed_everything
from bootstrap.training.tensors import from_bytes

logger = logging.getLogger(__name__)


# Loaded step, and the generators' state to restore before the first step.
Resumed = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Load of checkpoints into one run. ``buffer``: host bytes for the reads."""

    checkpoints: StoredCheckpoints
    state: TrainingState
    order: SampleOrder
    ranks: RankGroup
    data_ranks: DataRanks
    buffer: torch.Tensor
    beat: Callable[[str], None]

    def newest(self) -> Resumed | None:
        """Load the newest checkpoint that is valid on every rank; None where the store has none.

        CheckpointError: every checkpoint is damaged. ConfigurationError: the checkpoint belongs to another run.
        """
        committed, broken = self.ranks.broadcast(self.checkpoints.scan() if self.ranks.rank == 0 else ([], []))
        for checkpoint in committed:
            self.beat(f"loading {checkpoint.prefix}")
            problems, resumed = self._load(checkpoint)
            if resumed is not None:
                return resumed
            broken.append(f"{checkpoint.prefix}: {problems}")
            if self.ranks.rank == 0:
                logger.error("checkpoint %s is not valid, trying an older one: %s", checkpoint.prefix, problems)
        self.checkpoints.refuse_damaged(broken)
        logger.info("no checkpoint in %s: starting at step 0", self.checkpoints.store.uri)
        return None

    def _load(self, checkpoint: Committed[Manifest]) -> tuple[str, Resumed | None]:
        """Load a checkpoint: the problem of any rank, or the resumed state."""
        manifest = checkpoint.manifest
        problem, values = self.ranks.broadcast(self._values(checkpoint) if self.ranks.rank == 0 else ("", []))
        if problem:
            return problem, None
        parts = merged([value["parts"] for value in values], self.state.optimizers)
        _refuse_other_run(f"{self.checkpoints.store.uri}/{checkpoint.prefix}", manifest, set(parts), self)
        # Generators and buffers are a rank's own, and a rank may have another's samples now.
        places = self.ranks.gather(astuple(self.data_ranks))
        same_ranks = places == [value.get("data_rank") for value in values]
        buffers_of = self.ranks.rank if same_ranks else 0
        fill, finish = self.state.restore(
            parts, manifest.index.tensors, buffers_of=buffers_of, changes=values[buffers_of].get("changes", UNCHANGED)
        )
        fault = load_tensors(
            self.checkpoints, checkpoint, fill, buffer=self.buffer, device=self.state.device, ranks=self.ranks
        )
        problems = "; ".join(answer for answer in self.ranks.gather(fault) if answer)
        if problems:
            return problems, None
        finish()
        random = values[self.ranks.rank]["random"] if same_ranks else self._new_generators(manifest)
        logger.info("resuming at step %d from %s", manifest.step, checkpoint.prefix)
        return "", (manifest.step, random)

    def _values(self, checkpoint: Committed[Manifest]) -> tuple[str, list[Any]]:
        """Read the plain values: their problem, or the values by rank."""

        def read(extent: Any) -> Any:
            data = bytearray(extent.bytes)
            self.checkpoints.read_extents(checkpoint, [extent], memoryview(data))
            return from_bytes(data)

        try:
            with ThreadPoolExecutor(READ_THREADS) as threads:
                return "", list(threads.map(read, checkpoint.manifest.index.values))
        except InvalidCheckpoint as error:
            return str(error), []

    def _new_generators(self, manifest: Manifest) -> Mapping[str, Any]:
        """Generators of a rank that saved none; ranks with the same samples draw the same numbers."""
        logger.warning(
            "checkpoint of %d ranks, now %d, or of another layout: same samples a step, new random generators",
            manifest.world_size,
            self.ranks.world_size,
        )
        seed_everything(((self.order.seed * 1_000_003 + manifest.step) * 1_000_003 + self.data_ranks.rank) % 2**63)
        return random_state(self.state.device)


def merged(parts_by_rank: list[dict[str, Any]], optimizers: Iterable[str]) -> dict[str, Any]:
    """Parts of rank 0, with the optimizers' states of every rank: ZeroRedundancyOptimizer divides them."""
    parts = parts_by_rank[0]
    for name in optimizers:
        for other in parts_by_rank[1:]:
            if isinstance(other.get(name, {}).get("state"), dict):
                parts[name]["state"] = other[name]["state"] | parts[name]["state"]
    return parts


def _refuse_other_run(place: str, manifest: Manifest, parts: set[str], run: Resume) -> None:
    if different := run.checkpoints.differences(manifest):
        raise ConfigurationError(
            f"{place} is of another run: {different}. Going on would change the model, or the samples of each step: "
            "set it back, or use a new store (bootstrap.trainer begins one from weights by --weights)"
        )
    own = {*run.state.parts, *run.state.optimizers}
    if parts - {MODEL} != own:
        raise ConfigurationError(
            f"{place} holds {sorted(parts)}, and this run has {sorted(own)}: give the same scheduler, scaler and extra "
            "as before"
        )
