"""SpotTolerantRun: the few lines around a user's loop.

Every rank asks the same question after every step (or every ``agree_every`` steps): does any rank want to stop or to
save? The answer is an all-reduce, so all ranks stop or save after the same step, and what they save fits together.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from bootstrap.training import data
from bootstrap.training.checkpoint import (
    REPLICATED_NAME,
    Candidate,
    Checkpoints,
    Manifest,
    Shard,
    ShardKind,
    prefix_name,
    rank_shard_name,
)
from bootstrap.training.control import Control
from bootstrap.training.environment import seconds_from_environment
from bootstrap.training.errors import CheckpointError, ConfigurationError, Interrupted, InvalidCheckpoint
from bootstrap.training.heartbeat import Heartbeat
from bootstrap.training.interval import young_daly_interval_s
from bootstrap.training.ledger import Ledger, process_started_at
from bootstrap.training.progress import Progress
from bootstrap.training.state import (
    Stateful,
    bare,
    own_buffers,
    random_state,
    refuse_sharded,
    restore_buffers,
    restore_random_state,
    seed_everything,
    to_cpu,
)
from bootstrap.training.stores import Store, open_store
from bootstrap.training.watcher import Watcher

logger = logging.getLogger(__name__)

INTERVAL_VARIABLE = "GPUFLEET_CHECKPOINT_INTERVAL_S"
MTBF_VARIABLE = "GPUFLEET_MTBF_S"
HANG_VARIABLE = "GPUFLEET_HANG_TIMEOUT_S"
# Ranks that hold different parts of one model see the same samples; this runtime gives each rank its own.
SPLITS = (
    "GPUFLEET_TENSOR_PARALLEL",
    "GPUFLEET_PIPELINE_PARALLEL",
    "GPUFLEET_CONTEXT_PARALLEL",
    "GPUFLEET_EXPERT_PARALLEL",
)
# Without a plan's interval; the fleet plan normally sets it.
DEFAULT_INTERVAL_S = 600.0
# Longer than any sane step or evaluation inside one, shorter than anyone would pay for a hung fleet.
DEFAULT_HANG_TIMEOUT_S = 600.0
# Compilation, autotuning and cold data caches make the first step the slow one.
FIRST_STEP_FACTOR = 3
# Deleting old checkpoints may hold up the end this long; what is left is deleted by the next run.
PRUNE_LIMIT_S = 60.0


@dataclass
class _Save:
    """One save on its way: this rank's shards are being written in the background."""

    step: int
    prefix: str
    shards: list[Shard] = field(default_factory=list)
    problem: str | None = None
    write_s: float = 0.0
    thread: threading.Thread | None = None

    @property
    def written(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()


def refuse_splits() -> None:
    """Refuse a plan whose model is split over ranks: samples and checkpoints would be wrong, and nothing would tell.

    Raises:
        ConfigurationError: a variable of SPLITS is not 1.
    """
    split = {name: value for name in SPLITS if (value := os.environ.get(name, "").strip() or "1") != "1"}
    if split:
        raise ConfigurationError(
            f"the plan has {', '.join(f'{name}={value}' for name, value in split.items())}, and SpotTolerantRun is "
            "data-parallel: it gives every rank its own samples and takes every rank for a replica. Use a framework "
            "that splits models, and its own checkpoints, or a plan without it (gpufleet recommend --parallelism data)"
        )


class SpotTolerantRun:
    """Context of one training run that may be stopped and started any number of times.

    Entering loads the newest valid checkpoint into ``model``, ``optimizer`` and the rest. Leaving on a notice raises
    ``Interrupted`` (exit code 75) out of the loop with the state saved. Make model, wrappers, optimizer and process
    group first.

    Args:
        model: on its device; plain, DistributedDataParallel or compiled.
        optimizer: of the model's parameters.
        dataset_size: samples of one epoch.
        global_batch: samples of one step over all ranks; constant for the run, whatever the number of ranks.
        store: a store or its URI; ``GPUFLEET_CHECKPOINT_URI`` if not given.
        scheduler: learning-rate scheduler.
        scaler: gradient scaler.
        extra: anything else with ``state_dict`` and ``load_state_dict``, by name; the same on every rank.
        tokens_per_sample: for the published tokens per second; ``GPUFLEET_SEQ_LEN`` of the plan if not given.
        seed: of the sample order, and of the random generators where the number of ranks changed.
        shuffle: False to read the data set in its own order.
        checkpoint_interval_s: seconds between checkpoints; ``GPUFLEET_CHECKPOINT_INTERVAL_S``, else 600. With
            ``GPUFLEET_MTBF_S`` set, the measured stall refines it to √(2·stall·MTBF).
        checkpoint_every: steps between checkpoints instead of seconds.
        keep: checkpoints kept.
        agree_every: steps between two agreements; a notice waits for the next one.
        hang_timeout_s: a step longer than this ends the process (three times as much for the first);
            ``GPUFLEET_HANG_TIMEOUT_S``, else 600.
        watcher: source of notices; ``Watcher.from_environment()`` if not given.
        rehearsal: runs one forward and backward pass on any batch, without an optimizer step; called once on entering.
            DistributedDataParallel on more than two ranks needs it for a bit-equal resume: DDP lays its gradient
            buckets out anew after its first backward pass, and the order of a sum over ranks depends on the layout.
            Without it the first step of each start would use another layout than an undisturbed run.

    Raises:
        ConfigurationError: sharded states, a plan that splits the model, sizes that do not divide, a store without a
            place, a bad variable.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Stateful,
        *,
        dataset_size: int,
        global_batch: int,
        store: Store | str | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        tokens_per_sample: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        checkpoint_interval_s: float | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        agree_every: int = 1,
        hang_timeout_s: float | None = None,
        watcher: Watcher | None = None,
        rehearsal: Callable[[], object] | None = None,
    ) -> None:
        refuse_splits()
        self._wrapped = model
        self._model = bare(model)
        refuse_sharded(self._model, optimizer)
        self._parts: dict[str, Stateful] = {"model": self._model, "optimizer": optimizer}
        optional = {"scheduler": scheduler, "scaler": scaler}
        optional |= {f"extra.{name}": part for name, part in (extra or {}).items()}
        self._parts |= {name: part for name, part in optional.items() if part is not None}
        if keep < 1 or agree_every < 1 or (checkpoint_every is not None and checkpoint_every < 1):
            raise ConfigurationError(
                f"keep {keep}, agree_every {agree_every} and checkpoint_every {checkpoint_every} must be at least 1"
            )
        self._hang_timeout_s = hang_timeout_s or seconds_from_environment(HANG_VARIABLE) or DEFAULT_HANG_TIMEOUT_S
        self._interval_s = checkpoint_interval_s or seconds_from_environment(INTERVAL_VARIABLE) or DEFAULT_INTERVAL_S
        self._mtbf_s = seconds_from_environment(MTBF_VARIABLE)
        self._checkpoint_every = checkpoint_every
        self._agree_every = agree_every
        self._keep = keep
        self._seed, self._shuffle = seed, shuffle
        self._dataset_size, self._global_batch = dataset_size, global_batch
        self._checkpoints = Checkpoints(
            store if store is not None and not isinstance(store, str) else open_store(store)
        )
        self._watcher = watcher or Watcher.from_environment()
        parameter = next(self._model.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._rehearsal = rehearsal
        self._heartbeat = Heartbeat()
        self._control = Control(timeout_s=self._hang_timeout_s * FIRST_STEP_FACTOR)
        self.sample_indices(0)  # says now, not at the first step, that the sizes do not divide
        self._progress = Progress.from_environment(global_batch=global_batch, tokens_per_sample=tokens_per_sample)
        self._ledger: Ledger | None = None
        self._writer_id = ""
        self._pending: _Save | None = None
        self._pruner: threading.Thread | None = None
        self._saves = 0
        self._saved_step: int | None = None
        self._last_save = 0.0
        self._random_state: Mapping[str, Any] | None = None
        #: Completed steps.
        self.step = 0
        #: Seconds training stood still for the last checkpoint.
        self.last_stall_s: float | None = None

    # What a user's loop calls.

    def __enter__(self) -> Self:
        self._watcher.start()
        self._beat("loading a checkpoint", FIRST_STEP_FACTOR)
        self._writer_id = self._control.from_first(uuid.uuid4().hex[:12])
        if self._control.rank == 0:
            self._ledger = Ledger.open(self._checkpoints.store, writer_id=self._writer_id)
            self._ledger.start(started_at=process_started_at(), world_size=self._control.world_size)
        self._leave_if_already_told()
        self._rehearse()
        self._resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._heartbeat.close()
        if error is not None and not isinstance(error, Interrupted) and self._ledger is not None:
            self._ledger.end("failed", self.step, f"{type(error).__name__}: {error}"[:200])
        if not isinstance(error, Interrupted):
            # After an interruption the process is about to exit, and a SIGTERM for a rank that is done is no fault.
            self._watcher.close()

    def steps(self, total: int) -> Iterator[int]:
        """Steps still to do, from the one the checkpoint left off at; a step is done when the next one is asked for.

        Args:
            total: optimizer steps of the whole run.

        Raises:
            Interrupted: told to stop; the state is saved.
        """
        if self._random_state is not None:
            # Here and not on entering: what the user's set-up draws in between must not shift the sequence.
            restore_random_state(self._random_state, self._device)
            self._random_state = None
        if self._ledger is not None:
            self._ledger.train(self.step)
        self._last_save = time.monotonic()
        first = True
        while self.step < total:
            self._beat(f"step {self.step}", FIRST_STEP_FACTOR if first else 1)
            first = False
            yield self.step
            self.step += 1
            self._boundary(is_last=self.step >= total)
        if self._pruner is not None:
            self._pruner.join(timeout=PRUNE_LIMIT_S)
        if self._ledger is not None:
            self._ledger.end("done", self.step, "all steps done")
        self._beat("what follows the last step", math.inf)

    def sample_indices(self, step: int) -> torch.Tensor:
        """Data set indices this rank trains on in ``step``: int64 of shape (global_batch / world_size,)."""
        return data.sample_indices(
            step,
            dataset_size=self._dataset_size,
            global_batch=self._global_batch,
            seed=self._seed,
            rank=self._control.rank,
            world_size=self._control.world_size,
            shuffle=self._shuffle,
        )

    # Step boundaries.

    def _boundary(self, *, is_last: bool) -> None:
        if self._ledger is not None:
            self._ledger.progress(self.step)
            self._progress.update(self.step)
        if not is_last and self.step % self._agree_every:
            return
        self._beat(f"agreeing after step {self.step}")
        pending = self._pending
        stop, save, unwritten = self._control.maximum(
            [
                int(self._watcher.stop_notice is not None),
                int(self._wants_checkpoint()),
                int(pending is not None and not pending.written),
            ]
        )
        if stop or is_last:
            self._final_save()
            if stop and not is_last:
                self._leave()
            return
        if pending is not None and not unwritten:
            self._commit()
        if save and self._pending is None:
            self._begin_save()

    def _wants_checkpoint(self) -> bool:
        if self._watcher.save_notice is not None:
            return True
        if self._checkpoint_every is not None:
            return self.step % self._checkpoint_every == 0
        # Rank 0's clock alone decides, or each rank would ask in turn.
        return self._control.rank == 0 and time.monotonic() - self._last_save >= self._interval_s

    def _beat(self, doing: str, factor: float = 1) -> None:
        self._heartbeat.beat(limit_s=self._hang_timeout_s * factor, doing=doing)

    # Saving.

    def _begin_save(self) -> None:
        """Copy the state to CPU memory, and write it in the background."""
        if self._saved_step == self.step:
            return
        self._beat(f"copying the state of step {self.step}")
        if self._ledger is not None:
            self._ledger.progress(self.step, force=True)
        started = time.monotonic()
        self._saves += 1
        save = _Save(step=self.step, prefix=prefix_name(self.step, self._writer_id, self._saves))
        parts: list[tuple[str, ShardKind, Any]] = [(rank_shard_name(self._control.rank), "rank", self._own_state())]
        if self._control.rank == 0:
            replicated = {name: to_cpu(part.state_dict()) for name, part in self._parts.items()}
            parts.append((REPLICATED_NAME, "replicated", replicated))
        save.thread = threading.Thread(target=self._write, args=(save, parts), name="checkpoint-writer", daemon=True)
        save.thread.start()
        self._pending = save
        self._last_save = time.monotonic()
        self.last_stall_s = self._last_save - started
        self._watcher.save_done()
        if self._ledger is not None:
            self._ledger.stall(self.step)

    def _own_state(self) -> dict[str, Any]:
        return {"random": random_state(self._device), "buffers": to_cpu(own_buffers(self._model)), "step": self.step}

    def _write(self, save: _Save, parts: list[tuple[str, ShardKind, Any]]) -> None:
        started = time.monotonic()
        try:
            for name, kind, value in parts:
                written = self._checkpoints.store.write(
                    f"{save.prefix}/{name}",
                    lambda file, value=value: torch.save(value, file),  # type: ignore[misc]
                )
                save.shards.append(
                    Shard(name=name, kind=kind, rank=self._control.rank, bytes=written.bytes, sha256=written.sha256)
                )
        except Exception as error:  # noqa: BLE001 - it is reported to every rank at the commit
            save.problem = f"rank {self._control.rank}: {type(error).__name__}: {error}"
        save.write_s = time.monotonic() - started

    def _commit(self) -> bool:
        """Collect every rank's shards and write the manifest; a failure is logged and leaves the older checkpoints."""
        save, self._pending = self._pending, None
        assert save is not None
        if self._ledger is not None:
            self._ledger.progress(self.step, force=True)
        problem = save.problem if save.written else f"rank {self._control.rank}: not written in time"
        everyone = self._control.gather((problem, [] if problem else save.shards))
        problems = [found for found, _ in everyone if found]
        if not problems and self._control.rank == 0:
            manifest = Manifest(
                step=save.step,
                samples=save.step * self._global_batch,
                world_size=self._control.world_size,
                global_batch=self._global_batch,
                dataset_size=self._dataset_size,
                seed=self._seed,
                layout="replicated",
                created_unix_s=round(time.time(), 3),
                torch_version=str(torch.__version__),
                shards=tuple(shard for _, shards in everyone for shard in shards),
            )
            try:
                self._checkpoints.commit(save.prefix, manifest)
            except (CheckpointError, OSError) as error:
                problems = [f"manifest: {error}"]
            else:
                logger.info("checkpoint of step %d committed: %s", save.step, save.prefix)
                if self._ledger is not None:
                    self._ledger.commit(
                        save.step, prefix=save.prefix, bytes=manifest.bytes, write_s=round(save.write_s, 3)
                    )
                self._pruner = threading.Thread(
                    target=self._prune, args=(save.prefix,), name="checkpoint-pruner", daemon=True
                )
                self._pruner.start()
        problems = self._control.from_first(problems)
        if problems:
            logger.error("checkpoint of step %d is NOT saved, training goes on: %s", save.step, "; ".join(problems))
        else:
            self._saved_step = save.step
            self._refine_interval(save)
        if self._ledger is not None:
            self._ledger.stall(self.step)
            self._ledger.flush()
        return not problems

    def _prune(self, known_valid: str) -> None:
        try:
            self._checkpoints.prune(keep=self._keep, known_valid=known_valid)
        except (CheckpointError, OSError) as error:
            logger.error("old checkpoints are not deleted: %s", error)

    def _refine_interval(self, save: _Save) -> None:
        if self._mtbf_s is not None and self.last_stall_s is not None:
            self._interval_s = young_daly_interval_s(
                stall_s=self.last_stall_s, mtbf_s=self._mtbf_s, write_s=save.write_s
            )

    def _final_save(self) -> None:
        """Save this very step and wait until it is committed, or the time is up."""
        if self._ledger is not None:
            self._ledger.progress(self.step, force=True)
        deadline = time.monotonic() + self._hang_timeout_s * FIRST_STEP_FACTOR
        self._finish_pending(deadline)
        if self._saved_step != self.step:
            self._begin_save()
            self._finish_pending(deadline)

    def _finish_pending(self, deadline: float) -> None:
        """Commit the save on its way once every rank has written its share.

        The rank whose machine leaves first bounds it for all, also where its notice comes while they wait; without any
        notice the hang timeout does.
        """
        save = self._pending
        if save is None:
            return
        assert save.thread is not None
        while True:
            self._beat("the final save")
            left_s = deadline - time.monotonic()
            if self._watcher.stop_notice is not None:
                left_s = min(left_s, self._watcher.stop_notice.save_by - time.time())
            unwritten, minus_left_s = self._control.maximum([int(not save.written), -max(0, math.ceil(left_s))])
            if not unwritten or minus_left_s == 0:
                break
            save.thread.join(timeout=1.0)
        self._commit()

    # Stopping.

    def _leave_if_already_told(self) -> None:
        """A rank that torchrun restarted on a machine that is leaving has nothing to begin."""
        if self._control.maximum([int(self._watcher.stop_notice is not None)])[0]:
            self._leave()

    def _leave(self) -> None:
        reasons = [str(self._watcher.stop_notice)] if self._watcher.stop_notice is not None else []
        everyone = self._control.gather(reasons)
        reason = next((reasons[0] for reasons in everyone if reasons), "a notice")
        interrupted = Interrupted(reason=reason, step=self.step, saved=self._saved_step == self.step)
        if self._control.rank == 0:
            logger.warning("%s", interrupted)
        if self._ledger is not None:
            self._ledger.end("stop", self.step, reason)
        # Rank 0 writes the ledger before any rank may leave: torchrun ends the rest when the first one exits.
        self._control.maximum([0])
        if self._control.local_rank == 0:
            self._watcher.announce_saved()
        self._heartbeat.close()
        raise interrupted

    # Resuming.

    def _rehearse(self) -> None:
        if self._rehearsal is None:
            is_ddp = isinstance(self._wrapped, nn.parallel.DistributedDataParallel)
            if is_ddp and self._control.world_size > 2 and self._control.rank == 0:
                logger.warning("without a rehearsal, a resumed DDP run of more than 2 ranks is not bit-equal")
            return
        self._beat("the rehearsal", FIRST_STEP_FACTOR)
        generators, buffers = random_state(self._device), to_cpu(own_buffers(self._model))
        self._rehearsal()
        for parameter in self._model.parameters():
            parameter.grad = None
        restore_buffers(self._model, buffers)
        restore_random_state(generators, self._device)

    def _resume(self) -> None:
        candidates: list[Candidate] = []
        broken: list[str] = []
        if self._control.rank == 0:
            candidates, broken = self._checkpoints.scan()
        candidates, broken = self._control.from_first((candidates, broken))
        for candidate in candidates:
            reason, replicated, own = self._load(candidate)
            reasons = [found for found in self._control.gather(reason) if found]
            if not reasons:
                self._adopt(candidate, replicated, own)
                return
            broken.append(f"{candidate.prefix}: {'; '.join(reasons)}")
            if self._control.rank == 0:
                logger.error(
                    "checkpoint %s is not valid, trying an older one: %s", candidate.prefix, "; ".join(reasons)
                )
        if broken:
            raise CheckpointError(
                f"no valid checkpoint in {self._checkpoints.store.uri}, and these are damaged: {' | '.join(broken)}. "
                "Starting over would throw away what they hold: restore one, or move them away to start over"
            )
        logger.info("no checkpoint in %s: starting at step 0", self._checkpoints.store.uri)

    def _load(self, candidate: Candidate) -> tuple[str | None, Any, Any]:
        """Verify and read this rank's files; rank 0 verifies everybody's."""
        self._beat(f"loading {candidate.prefix}", FIRST_STEP_FACTOR)
        same_ranks = candidate.manifest.world_size == self._control.world_size
        names = [REPLICATED_NAME, *([rank_shard_name(self._control.rank)] if same_ranks else [])]
        loaded = []
        try:
            for name in names:
                with self._checkpoints.verified(candidate, name) as path:
                    loaded.append(torch.load(path, map_location="cpu", weights_only=True))
            if self._control.rank == 0:
                self._checkpoints.verify(candidate, besides=names)
        except InvalidCheckpoint as error:
            return str(error), None, None
        return None, loaded[0], loaded[1] if same_ranks else None

    def _adopt(self, candidate: Candidate, replicated: Any, own: Any) -> None:
        manifest = candidate.manifest
        for name, mine, saved in (
            ("global_batch", self._global_batch, manifest.global_batch),
            ("dataset_size", self._dataset_size, manifest.dataset_size),
            ("seed", self._seed, manifest.seed),
        ):
            if mine != saved:
                raise ConfigurationError(
                    f"{name} is {mine}, and {self._checkpoints.store.uri}/{candidate.prefix} was trained with {saved}: "
                    f"going on would change which samples a step sees; set {name} back, or use a new store"
                )
        if set(replicated) != set(self._parts):
            raise ConfigurationError(
                f"{candidate.prefix} holds {sorted(replicated)}, and this run has {sorted(self._parts)}: give the same "
                "scheduler, scaler and extra as before"
            )
        for name, part in self._parts.items():
            part.load_state_dict(replicated[name])
        if own is not None:
            restore_buffers(self._model, own["buffers"])
            self._random_state = own["random"]
        else:
            # Other ranks than before: no old state is right for this one, and equal ones on all would be wrong.
            logger.warning(
                "checkpoint of %d ranks, now %d: same samples a step, new random generators",
                manifest.world_size,
                self._control.world_size,
            )
            seed_everything(((self._seed * 1_000_003 + manifest.step) * 1_000_003 + self._control.rank) % 2**63)
            self._random_state = random_state(self._device)
        self.step = manifest.step
        self._saved_step = manifest.step
        logger.info("resuming at step %d from %s", self.step, candidate.prefix)
