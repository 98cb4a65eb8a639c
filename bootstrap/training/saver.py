"""Saver: copies this rank's share, writes it in the background, commits the checkpoint once every rank has written."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from bootstrap.contract.checkpoint import rank_file_name
from bootstrap.training.checkpoint import Manifest, StoredCheckpoints
from bootstrap.training.checksum import checksum
from bootstrap.training.errors import CheckpointError
from bootstrap.training.index import Chunk, Index
from bootstrap.training.ledger import Ledger
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.share import Share
from bootstrap.training.stores import LocalStore
from bootstrap.training.stores.base import in_threads
from bootstrap.training.tensors import to_bytes
from bootstrap.training.watcher import Watcher

logger = logging.getLogger(__name__)

# Longest wait at the end; the next run deletes the rest.
PRUNE_LIMIT_S = 60.0
# Attempts to save the last checkpoint, which no later one replaces; a busy service may answer the second or third.
FINAL_ATTEMPTS = 3


@dataclass(kw_only=True)
class _Save:
    """One save of this rank: first its file is written, then, by rank 0, the manifest."""

    step: int
    prefix: str
    checksums: list[str] = field(default_factory=list)
    values: Chunk | None = None
    problem: str | None = None
    write_s: float = 0.0
    is_collected: bool = False
    has_manifest: bool = False  # or may have: the answer was lost
    bytes: int = 0
    thread: threading.Thread | None = None


@dataclass(kw_only=True)
class Saver:
    """Saves of one rank; all ranks call the same methods after the same step. ``writer_id`` is equal on all ranks."""

    checkpoints: StoredCheckpoints
    share: Share
    order: SampleOrder
    ranks: RankGroup
    ledger: Ledger
    watcher: Watcher
    beat: Callable[[str], None]
    writer_id: str
    interval_s: float
    every_steps: int | None
    keep: int
    saved_step: int | None = None
    _pending: _Save | None = None
    _pruner: threading.Thread | None = None
    _saves: int = 0
    _last_save: float = 0.0

    def start_clock(self) -> None:
        """Begin the first interval."""
        self._last_save = time.monotonic()

    def wants_save(self) -> bool:
        """True where this rank asks for a checkpoint now; the ranks agree."""
        if self.watcher.save_notice is not None:
            return True
        # Only rank 0's clock decides: by clocks of their own, the ranks would ask at different steps.
        is_clock = self.every_steps is None and self.ranks.rank == 0
        return is_clock and time.monotonic() - self._last_save >= self.interval_s

    def is_due(self, step: int) -> bool:
        """True on all ranks where ``checkpoint_every`` says so."""
        return self.every_steps is not None and step % self.every_steps == 0

    @property
    def is_pending(self) -> bool:
        """True while a save is not committed; at the same steps on every rank."""
        return self._pending is not None

    @property
    def flags(self) -> tuple[int, int]:
        """1 where this rank writes its file or the manifest, and 1 where it knows that the pending save failed."""
        save = self._pending
        if save is None:
            return 0, 0
        return int(save.thread is not None and save.thread.is_alive()), int(save.problem is not None)

    def advance(self, step: int, *, due: bool, any_busy: bool, any_failed: bool) -> None:
        """Take a save further once no rank is busy, then begin a due one; all ranks pass the same arguments."""
        if self._pending is not None and not any_busy:
            self._take_further(step, any_failed=any_failed)
        if due:
            self.begin(step)

    def begin(self, step: int) -> None:
        """Begin a save, unless one is pending or ``step`` is saved."""
        if self._pending is None and self.saved_step != step:
            self._begin(step)

    def save_final(self, step: int, limit_s: float) -> None:
        """Save exactly ``step`` and wait until it is committed, at most ``limit_s`` or the time of the notice."""
        self.ledger.progress(step, force=True)
        deadline = time.monotonic() + limit_s
        attempts = 0
        while self._finish_pending(step, deadline) and self.saved_step != step and attempts < FINAL_ATTEMPTS:
            if attempts:
                self.join_pruner()  # it may make room
            attempts += 1
            self._begin(step)
            self.share.stager.wait()

    def join_pruner(self) -> None:
        """Wait for deletions."""
        if self._pruner is not None:
            self._pruner.join(timeout=PRUNE_LIMIT_S)

    def _begin(self, step: int) -> None:
        self.beat(f"copying the state of step {step}")
        self.ledger.progress(step, force=True)
        self._saves += 1
        save = _Save(step=step, prefix=self.checkpoints.prefix_name(step, self.writer_id, self._saves))
        values = self.share.begin_copy()
        save.thread = threading.Thread(target=self._write, args=(save, values), name="checkpoint-writer", daemon=True)
        save.thread.start()
        self._pending = save
        self._last_save = time.monotonic()
        self.watcher.save_notice = None
        self.ledger.save("stall", step)

    def _write(self, save: _Save, values: dict[str, Any]) -> None:
        started = time.monotonic()
        try:
            self.share.stager.finish()
            rank, memory, tail = self.ranks.rank, self.share.memory, to_bytes(values)
            with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-checksum") as thread:
                checksums = thread.submit(in_threads, checksum, self.share.pieces())
                self.checkpoints.store.write(f"{save.prefix}/{rank_file_name(rank)}", [memory, tail])
                save.checksums = checksums.result()
            save.values = Chunk((), (), rank, memory.nbytes, len(tail), checksum(memoryview(tail)))
        except Exception as error:  # noqa: BLE001 - the manifest's writer reports it to every rank
            save.problem = f"rank {self.ranks.rank}: {type(error).__name__}: {error}"
        save.write_s = time.monotonic() - started

    def _finish_pending(self, step: int, deadline: float) -> bool:
        """Commit the pending save, at the latest at ``deadline`` or a notice's ``save_by``; False: too late."""
        while (save := self._pending) is not None:
            self.beat("the final save")
            left_s = deadline - time.monotonic()
            if self.watcher.stop_notice is not None:
                left_s = min(left_s, self.watcher.stop_notice.save_by - time.time())
            any_busy, any_failed, minus_left_s = self.ranks.maximum(*self.flags, -max(0, math.ceil(left_s)))
            if not any_busy:
                self._take_further(step, any_failed=bool(any_failed))
            elif minus_left_s == 0:
                logger.error("checkpoint of step %d is NOT saved: not written in time", save.step)
                self._pending = None
                return False
            elif save.thread is not None:
                save.thread.join(timeout=1.0)
        return True

    def _take_further(self, step: int, *, any_failed: bool) -> None:
        """After every rank's file comes the manifest, and after the manifest the checkpoint counts."""
        save = self._pending
        assert save is not None
        if not save.is_collected:
            save.is_collected = True
            if self.share.stager.is_torn:
                save.problem = f"rank {self.ranks.rank}: a parameter changed outside optimizer.step while it was copied"
            answers = self.ranks.gather_to_first((save.problem, save.checksums, save.values, save.write_s))
            if self.ranks.rank == 0:
                save.problem = "; ".join(problem for problem, *_ in answers if problem) or None
                save.write_s = max(seconds for *_, seconds in answers)
                if save.problem is None:
                    arguments = (save, [sums for _, sums, _, _ in answers], [values for _, _, values, _ in answers])
                    save.thread = threading.Thread(
                        target=self._write_manifest, args=arguments, name="checkpoint-writer", daemon=True
                    )
                    save.thread.start()
            return
        self._pending = None
        if any_failed:
            problem = save.problem or "another rank's log has the reason"
            logger.error("checkpoint of step %d is NOT saved, training goes on: %s", save.step, problem)
            if self.ranks.rank == 0 and not save.has_manifest:
                self._clean_up(save.prefix, problem)
            return
        self.ledger.progress(step, force=True)
        self.saved_step = save.step
        if self.ranks.rank == 0:
            self.ledger.save("commit", save.step, prefix=save.prefix, bytes=save.bytes, write_s=round(save.write_s, 3))
            self._clean_up(save.prefix)

    def _write_manifest(self, save: _Save, checksums: list[list[str]], values: list[Chunk]) -> None:
        try:
            index = Index.of(self.share.files, checksums, values)
            save.bytes = sum(chunk.bytes for chunk in index.chunks())
            manifest = Manifest(
                step=save.step,
                samples=save.step * self.order.global_batch,
                world_size=self.ranks.world_size,
                global_batch=self.order.global_batch,
                dataset_size=self.order.dataset_size,
                seed=self.order.seed,
                created_unix_s=round(time.time(), 3),
                torch_version=str(torch.__version__),
                index=index,
                facts=self.checkpoints.facts,
            )
            self._refuse_unshared(save.prefix)
            save.has_manifest = True
            self.checkpoints.commit(save.prefix, manifest.to_bytes())
            logger.info("checkpoint of step %d committed: %s", save.step, save.prefix)
        except Exception as error:  # noqa: BLE001 - the ranks learn it from the next agreement
            save.problem = f"manifest: {type(error).__name__}: {error}"

    def _refuse_unshared(self, prefix: str) -> None:
        """Refuse a folder that each node has for itself: no start could read the other nodes' files."""
        store = self.checkpoints.store
        if not isinstance(store, LocalStore):
            return
        names = [f"{prefix}/{rank_file_name(rank)}" for rank in range(self.ranks.world_size)]
        if missing := [name for name in names if not (store.root / name).exists()]:
            raise CheckpointError(
                f"{missing[0]} is not in {store.uri} on rank 0's node ({len(missing)} of {len(names)} files): "
                "GPUFLEET_CHECKPOINT_URI must be a folder that all nodes share, or s3://BUCKET/PREFIX"
            )

    def _clean_up(self, prefix: str, problem: str = "") -> None:
        self._pruner = threading.Thread(
            target=self.checkpoints.clean_up, args=(prefix, problem), kwargs={"keep": self.keep}, daemon=True
        )
        self._pruner.start()
