"""Resume: load the newest valid checkpoint into a training state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bootstrap.training.checkpoint import REPLICATED_NAME, Checkpoints, Committed, Manifest, rank_shard_name
from bootstrap.training.errors import CheckpointError, ConfigurationError, InvalidCheckpoint
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.state import TrainingState, random_state, restore_buffers, seed_everything

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Loaded step, and the generators' state to restore before the first step."""

    step: int
    random: Mapping[str, Any]


def load_newest(
    checkpoints: Checkpoints, state: TrainingState, order: SampleOrder, ranks: RankGroup, beat: Callable[[str], None]
) -> Resumed | None:
    """Load the newest checkpoint that is valid on every rank; None where the store has none.

    CheckpointError: every checkpoint is damaged. ConfigurationError: the checkpoint belongs to another run.
    """
    uri = checkpoints.store.uri
    committed, broken = ranks.broadcast(checkpoints.scan() if ranks.rank == 0 else ([], []))
    for checkpoint in committed:
        beat(f"loading {checkpoint.prefix}")
        problem, replicated, own = _read(checkpoints, checkpoint, ranks)
        problems = "; ".join(one for one in ranks.gather(problem) if one)
        if not problems:
            _refuse_other_run(f"{uri}/{checkpoint.prefix}", checkpoint.manifest, set(replicated), state, order)
            return _adopt(checkpoint, replicated, own, state, order, ranks)
        broken.append(f"{checkpoint.prefix}: {problems}")
        if ranks.rank == 0:
            logger.error("checkpoint %s is not valid, trying an older one: %s", checkpoint.prefix, problems)
    if broken:
        raise CheckpointError(
            f"no valid checkpoint in {uri}, and these are damaged: {' | '.join(broken)}. Starting over would throw "
            "away what they hold: restore one, or move them away to start over"
        )
    logger.info("no checkpoint in %s: starting at step 0", uri)
    return None


def _read(checkpoints: Checkpoints, checkpoint: Committed, ranks: RankGroup) -> tuple[str, Any, Any]:
    """Problem, replicated shard, this rank's own shard (None after a change of the number of ranks)."""
    names = [REPLICATED_NAME]
    if checkpoint.manifest.world_size == ranks.world_size:
        names.append(rank_shard_name(ranks.rank))
    shards = []
    try:
        for name in names:
            with checkpoints.verified(checkpoint, name) as path:
                shards.append(torch.load(path, map_location="cpu", weights_only=True))
        if ranks.rank == 0:  # verifies the other ranks' shards too
            checkpoints.verify(checkpoint, skip=names)
    except InvalidCheckpoint as error:
        return str(error), None, None
    return "", shards[0], shards[1] if len(shards) > 1 else None


def _refuse_other_run(
    place: str, manifest: Manifest, parts: set[str], state: TrainingState, order: SampleOrder
) -> None:
    for name in ("global_batch", "dataset_size", "seed"):
        value, saved = getattr(order, name), getattr(manifest, name)
        if value != saved:
            raise ConfigurationError(
                f"{name} is {value}, and {place} was trained with {saved}: going on would change the samples of each "
                f"step; set {name} back, or use a new store"
            )
    if parts != set(state.parts):
        raise ConfigurationError(
            f"{place} holds {sorted(parts)}, and this run has {sorted(state.parts)}: give the same scheduler, scaler "
            "and extra as before"
        )


def _adopt(
    checkpoint: Committed, replicated: Any, own: Any, state: TrainingState, order: SampleOrder, ranks: RankGroup
) -> Resumed:
    step = checkpoint.manifest.step
    for name, part in state.parts.items():
        part.load_state_dict(replicated[name])
    if own is not None:
        restore_buffers(state.model, own["buffers"])
        random = own["random"]
    else:
        # No saved generator belongs to this rank.
        logger.warning(
            "checkpoint of %d ranks, now %d: same samples a step, new random generators",
            checkpoint.manifest.world_size,
            ranks.world_size,
        )
        seed_everything(((order.seed * 1_000_003 + step) * 1_000_003 + ranks.rank) % 2**63)
        random = random_state(state.device)
    logger.info("resuming at step %d from %s", step, checkpoint.prefix)
    return Resumed(step=step, random=random)
