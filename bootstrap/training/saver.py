"""Saver: copies the state to CPU memory, writes it in the background, commits it once every rank has written."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from bootstrap.training.checkpoint import (
    REPLICATED_NAME,
    Checkpoints,
    Manifest,
    Shard,
    ShardKind,
    prefix_name,
    rank_shard_name,
)
from bootstrap.training.errors import CheckpointError
from bootstrap.training.ledger.writer import Ledger
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.state import TrainingState
from bootstrap.training.watcher import Watcher

logger = logging.getLogger(__name__)

# Longest wait at the end; the next run deletes the rest.
PRUNE_LIMIT_S = 60.0


def young_daly_interval_s(*, stall_s: float, mtbf_s: float, write_s: float = 0.0) -> float:
    """Seconds between checkpoints that lose the least time, √(2·stall·MTBF), and at least ``write_s``.

    J. W. Young, CACM 17(9), 1974, https://doi.org/10.1145/361147.361115; J. T. Daly, FGCS 22(3), 2006,
    https://doi.org/10.1016/j.future.2004.11.016.
    """
    if not (stall_s >= 0 and write_s >= 0 and mtbf_s > 0):
        raise ValueError(f"stall_s {stall_s} and write_s {write_s} must be >= 0 and mtbf_s {mtbf_s} > 0")
    return max(math.sqrt(2 * stall_s * mtbf_s), write_s)


@dataclass
class _Save:
    """Background write of this rank's shards."""

    step: int
    prefix: str
    shards: list[Shard] = field(default_factory=list)
    problem: str | None = None
    write_s: float = 0.0
    thread: threading.Thread | None = None

    @property
    def is_written(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()


@dataclass(kw_only=True)
class Saver:
    """Saves of one rank; all ranks call the same methods after the same step. ``writer_id`` is equal on all ranks."""

    checkpoints: Checkpoints
    state: TrainingState
    order: SampleOrder
    ranks: RankGroup
    ledger: Ledger
    watcher: Watcher
    beat: Callable[[str], None]
    writer_id: str
    interval_s: float
    mtbf_s: float | None
    every_steps: int | None
    keep: int
    saved_step: int | None = None
    last_stall_s: float | None = None
    _pending: _Save | None = None
    _pruner: threading.Thread | None = None
    _saves: int = 0
    _last_save: float = 0.0

    def start_clock(self) -> None:
        """Begin the first interval."""
        self._last_save = time.monotonic()

    def is_due(self, step: int) -> bool:
        """True where this rank wants a checkpoint after ``step``."""
        if self.watcher.save_notice is not None:
            return True
        if self.every_steps is not None:
            return step % self.every_steps == 0
        # Only rank 0's clock counts; the ranks' clocks would ask one after the other.
        return self.ranks.rank == 0 and time.monotonic() - self._last_save >= self.interval_s

    @property
    def is_writing(self) -> bool:
        """True while this rank writes its shards."""
        return self._pending is not None and not self._pending.is_written

    def advance(self, step: int, *, due: bool, any_writing: bool) -> None:
        """Commit a save that every rank has written, then begin a due one; all ranks pass the same arguments."""
        if self._pending is not None and not any_writing:
            self._commit(step)
        if due and self._pending is None:
            self._begin(step)

    def save_final(self, step: int, limit_s: float) -> None:
        """Save exactly ``step`` and wait until it is committed, at most ``limit_s`` or the time of the notice."""
        self.ledger.progress(step, force=True)
        deadline = time.monotonic() + limit_s
        self._finish_pending(step, deadline)
        if self.saved_step != step:
            self._begin(step)
            self._finish_pending(step, deadline)

    def join_pruner(self) -> None:
        """Wait for deletions."""
        if self._pruner is not None:
            self._pruner.join(timeout=PRUNE_LIMIT_S)

    def _begin(self, step: int) -> None:
        if self.saved_step == step:
            return
        self.beat(f"copying the state of step {step}")
        self.ledger.progress(step, force=True)
        started = time.monotonic()
        self._saves += 1
        save = _Save(step=step, prefix=prefix_name(step, self.writer_id, self._saves))
        own = {**self.state.rank_own(), "step": step}
        shards: list[tuple[str, ShardKind, Any]] = [(rank_shard_name(self.ranks.rank), "rank", own)]
        if self.ranks.rank == 0:
            shards.append((REPLICATED_NAME, "replicated", self.state.replicated()))
        save.thread = threading.Thread(target=self._write, args=(save, shards), name="checkpoint-writer", daemon=True)
        save.thread.start()
        self._pending = save
        self._last_save = time.monotonic()
        self.last_stall_s = self._last_save - started
        self.watcher.save_done()
        self.ledger.stall(step)

    def _write(self, save: _Save, shards: list[tuple[str, ShardKind, Any]]) -> None:
        started = time.monotonic()
        try:
            for name, kind, value in shards:
                digest = self.checkpoints.store.write(f"{save.prefix}/{name}", partial(torch.save, value))
                save.shards.append(Shard(name=name, kind=kind, rank=self.ranks.rank, **asdict(digest)))
        except Exception as error:  # noqa: BLE001 - the commit reports it to every rank
            save.problem = f"rank {self.ranks.rank}: {type(error).__name__}: {error}"
        save.write_s = time.monotonic() - started

    def _finish_pending(self, step: int, deadline: float) -> None:
        """Commit once every rank has written, at the latest at ``deadline`` or the earliest notice's ``save_by``."""
        if (save := self._pending) is None:
            return
        assert save.thread is not None
        while True:
            self.beat("the final save")
            left_s = deadline - time.monotonic()
            if self.watcher.stop_notice is not None:
                left_s = min(left_s, self.watcher.stop_notice.save_by - time.time())
            any_writing, minus_left_s = self.ranks.maximum(int(self.is_writing), -max(0, math.ceil(left_s)))
            if not any_writing or minus_left_s == 0:
                break
            save.thread.join(timeout=1.0)
        self._commit(step)

    def _commit(self, step: int) -> None:
        save, self._pending = self._pending, None
        assert save is not None
        self.ledger.progress(step, force=True)
        problem = save.problem if save.is_written else f"rank {self.ranks.rank}: not written in time"
        answers = self.ranks.gather((problem, [] if problem else save.shards))
        problems = [one for one, _ in answers if one]
        if not problems and self.ranks.rank == 0:
            problems = self._write_manifest(save, tuple(shard for _, shards in answers for shard in shards))
        problems = self.ranks.broadcast(problems)
        if problems:
            logger.error("checkpoint of step %d is NOT saved, training goes on: %s", save.step, "; ".join(problems))
        else:
            self.saved_step = save.step
            if self.mtbf_s is not None and self.last_stall_s is not None:
                self.interval_s = young_daly_interval_s(
                    stall_s=self.last_stall_s, mtbf_s=self.mtbf_s, write_s=save.write_s
                )
        self.ledger.stall(step)
        self.ledger.flush()

    def _write_manifest(self, save: _Save, shards: tuple[Shard, ...]) -> list[str]:
        manifest = Manifest(
            step=save.step,
            samples=save.step * self.order.global_batch,
            world_size=self.ranks.world_size,
            global_batch=self.order.global_batch,
            dataset_size=self.order.dataset_size,
            seed=self.order.seed,
            layout="replicated",
            created_unix_s=round(time.time(), 3),
            torch_version=str(torch.__version__),
            shards=shards,
        )
        try:
            self.checkpoints.commit(save.prefix, manifest)
        except (CheckpointError, OSError) as error:
            return [f"manifest: {error}"]
        logger.info("checkpoint of step %d committed: %s", save.step, save.prefix)
        self.ledger.commit(
            save.step, prefix=save.prefix, bytes=sum(shard.bytes for shard in shards), write_s=round(save.write_s, 3)
        )
        self._pruner = threading.Thread(target=self._prune, args=(save.prefix,), name="checkpoint-pruner", daemon=True)
        self._pruner.start()
        return []

    def _prune(self, known_valid: str) -> None:
        try:
            self.checkpoints.prune(keep=self.keep, known_valid=known_valid)
        except (CheckpointError, OSError) as error:
            logger.error("old checkpoints are not deleted: %s", error)
