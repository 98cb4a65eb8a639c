"""SpotTolerantRun, the context around a user's loop: resume, steps, stopping on a notice.

An all-reduce after each step (or ``agree_every`` steps) makes all ranks stop or save after the same step.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bootstrap.training.checkpoint import StoredCheckpoints
from bootstrap.training.data_ranks import DataRanks, refuse_other_layout
from bootstrap.training.environment import checkpoint_interval, positive_number
from bootstrap.training.errors import ConfigurationError, Interrupted
from bootstrap.training.facts import facts_of
from bootstrap.training.forms import paced
from bootstrap.training.leaving import Heartbeat, leave_together
from bootstrap.training.ledger import Ledger, process_started_at
from bootstrap.training.loading import Resume
from bootstrap.training.progress import ProgressFile
from bootstrap.training.rank_group import Agreement, RankGroup
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.saver import Saver
from bootstrap.training.share import Share
from bootstrap.training.state import Stateful, TrainingState, restore_random_state
from bootstrap.training.stores import Store, open_store
from bootstrap.training.stragglers import Stragglers
from bootstrap.training.watcher import Watcher

logger = logging.getLogger(__name__)

HANG_VARIABLE = "GPUFLEET_HANG_TIMEOUT_S"
DEFAULT_HANG_TIMEOUT_S = 600.0
# For compilation, autotuning and cold data caches.
FIRST_STEP_FACTOR = 3


class SpotTolerantRun:
    """Context of one training run that may be stopped and started any number of times.

    Entering loads the newest valid checkpoint. A notice raises ``Interrupted`` (exit code 75) out of the loop, with the
    state saved. Make model, wrappers, optimizer and process group first. ``step`` counts completed steps.

    Args:
        model: on its device; plain, compiled, DistributedDataParallel, fully_shard (FSDP2) or with DTensor parameters.
        optimizer: of torch, or with states of the parameters' own layout; ZeroRedundancyOptimizer too.
        dataset_size: samples of one epoch.
        global_batch: samples of one step over all ranks; constant, whatever the number of ranks.
        mesh: all ranks, by dimensions named dp_replicate, dp_shard (ranks with samples of their own), cp, tp and ep
            (ranks of one group see the same samples); without one every rank has samples of its own.
        facts: plain values by name that each start must have again (the architecture, a digest of the data): where a
            checkpoint has another value, the run is refused.
        shares: samples of each data rank, where ranks differ in speed; default: equal. They may differ at each start.
        store: a store or its URI; default: ``GPUFLEET_CHECKPOINT_URI``.
        extra: other objects with ``state_dict`` and ``load_state_dict``, by name, also optimizers and models;
            the same names on every rank. A rank's plain values, small tensors and modules' buffers are its own.
        seed: of the sample order, and of the random generators after the number of ranks changed.
        checkpoint_interval_s: default: ``GPUFLEET_CHECKPOINT_INTERVAL_S``, else 600.
        checkpoint_every: steps between checkpoints instead of seconds.
        agree_every: steps between two agreements, for which a notice waits; default: about one a second.
        rehearsal: one forward and backward pass on any batch, called once on entering. DDP on more than two ranks needs
            it for a bit-equal resume: it lays its gradient buckets, and so the order of sums, out after its first pass.
        save_frozen: checkpoints hold parameters without gradients too; False where each start makes them the same.

    Raises:
        ConfigurationError: states that cannot be saved, a layout other than the plan's, sizes that do not divide, too
            little host memory, no store, a bad variable.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Stateful,
        *,
        mesh: DeviceMesh | None = None,
        dataset_size: int,
        global_batch: int,
        facts: Mapping[str, Any] | None = None,
        shares: Sequence[int] | None = None,
        store: Store | str | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        seed: int = 0,
        checkpoint_interval_s: float | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        agree_every: int | None = None,
        watcher: Watcher | None = None,
        rehearsal: Callable[[], object] | None = None,
        save_frozen: bool = True,
    ) -> None:
        optional = {"scheduler": scheduler, "scaler": scaler}
        optional |= {f"extra.{name}": part for name, part in (extra or {}).items()}
        if any(number is not None and number < 1 for number in (keep, agree_every, checkpoint_every)):
            raise ConfigurationError(
                f"keep {keep}, agree_every {agree_every} and checkpoint_every {checkpoint_every} must be at least 1"
            )
        self._hang_timeout_s = positive_number(HANG_VARIABLE) or DEFAULT_HANG_TIMEOUT_S
        self._order = SampleOrder(dataset_size=dataset_size, global_batch=global_batch, seed=seed)
        self._checkpoints = StoredCheckpoints(
            open_store(store),
            facts_of(self._order, json.loads(json.dumps(dict(facts or {})))),  # as a manifest gives them back
        )
        self._watcher = watcher or Watcher.from_environment()
        self._model = model
        self._is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        self._rehearsal = rehearsal
        self._heartbeat = Heartbeat()
        self._ranks = RankGroup(timeout_s=self._hang_timeout_s * FIRST_STEP_FACTOR)
        self._data = DataRanks.of(mesh, rank=self._ranks.rank, world_size=self._ranks.world_size)
        refuse_other_layout(model, optimizer, mesh, self._data.size)
        self._state = TrainingState(
            model,
            optimizer,
            optional,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            save_frozen=save_frozen,
        )
        self._shares: tuple[int, ...] | None = None
        self.set_shares(shares)  # refuses sizes that do not divide before the first step
        self._progress = ProgressFile(global_batch=global_batch)
        writer_id = self._ranks.broadcast(uuid.uuid4().hex[:12])
        self._ledger = Ledger.open(self._checkpoints.store, self._ranks.rank, writer_id=writer_id)
        self._share = Share(self._state, self._ranks, self._data, self._checkpoints.store)
        self._stragglers = Stragglers()
        self._agreement = Agreement(self._ranks, self._flags, agree_every, saving=lambda: self._saver.is_pending)
        self._saver = Saver(
            checkpoints=self._checkpoints,
            share=self._share,
            order=self._order,
            ranks=self._ranks,
            ledger=self._ledger,
            watcher=self._watcher,
            beat=self._beat,
            writer_id=writer_id,
            interval_s=checkpoint_interval(checkpoint_interval_s),
            every_steps=checkpoint_every,
            keep=keep,
        )
        self._random_state: Mapping[str, Any] | None = None
        self._is_frozen: bool | None = None  # None: undecided
        self._warns = scaler is None and self._ranks.rank == 0 and bool(self._state.steppers)
        self._versions: int | None = None  # sum over the parameters after a step without an optimizer's
        self._look = paced(self._state.look)
        self._is_entered = self._ends = self._is_in_loop = False
        self.step = 0

    @property
    def data_rank(self) -> int:
        """Place of this rank among the ranks with samples of their own."""
        return self._data.rank

    @property
    def data_size(self) -> int:
        """Number of ranks with samples of their own."""
        return self._data.size

    @property
    def gradient_weight(self) -> float:
        """Factor of this rank's mean loss with which the mean over ranks is that over samples; 1 at equal shares."""
        if self._shares is None:
            return 1.0
        return self._shares[self._data.rank] * self._data.size / self._order.global_batch

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        try:
            self._enter()
        except BaseException as error:
            # The process may go on: nothing of a run that was refused ends it later.
            self._close()
            if not isinstance(error, Interrupted):
                self._watcher.close()
            raise
        return self

    def _enter(self) -> None:
        self._watcher.start()
        self._beat("loading a checkpoint", FIRST_STEP_FACTOR)
        self._ledger.start(started_at=process_started_at(), world_size=self._ranks.world_size)
        # torchrun may have restarted this rank on a node that is about to end.
        if self._ranks.maximum(int(self._watcher.stop_notice is not None))[0]:
            self._leave()
        self._rehearse()
        self._share.prepare()
        resumed = Resume(
            checkpoints=self._checkpoints,
            state=self._state,
            order=self._order,
            ranks=self._ranks,
            data_ranks=self._data,
            buffer=self._share.buffer,
            beat=lambda doing: self._beat(doing, FIRST_STEP_FACTOR),
        ).newest()
        if resumed is not None:
            self.step, self._random_state = resumed
            self._saver.saved_step = self.step
        if self._ranks.world_size > 1:
            self._stragglers.watch(self._model, self._state.device)
        for _, hook_state in getattr(self._model, "_comm_hooks", ()) if self._ranks.rank == 0 else ():
            if hook_state is not None and not isinstance(hook_state, torch.distributed.ProcessGroup):
                logger.warning("%s of DDP's communication hook is in no checkpoint", type(hook_state).__name__)
        self._is_entered = True

    def _close(self) -> None:
        self._heartbeat.close()
        self._is_entered = False
        self._share.stager.close()
        self._stragglers.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:  # a forked child, whose parent has the ranks, the ledger and the notice files
            return
        if error is None and self._is_in_loop and self._ranks.rank == 0:
            saved = "no step" if self._saver.saved_step is None else f"step {self._saver.saved_step}"
            logger.warning(
                "the loop was left in step %d, with %s saved; to end early with a checkpoint: run.end_if(condition)",
                self.step,
                saved,
            )
        if self._is_frozen:
            gc.unfreeze()
        self._is_frozen = None
        self._close()
        # An interrupted process is about to exit; a SIGTERM is no fault then.
        if error is None:
            self._ranks.close()
        if not isinstance(error, Interrupted):
            if error is not None:
                self._ledger.end("failed", self.step, f"{type(error).__name__}: {error}"[:200])
            self._watcher.close()

    def steps(self, total: int) -> Iterator[int]:
        """Steps still to do of ``total``; a step ends when the next is asked for. A notice raises ``Interrupted``."""
        if not self._is_entered:
            raise ConfigurationError(
                "the run is not entered, so nothing is loaded and no notice watched: with SpotTolerantRun(...) as run: "
                "for step in run.steps(total)"
            )
        if self._random_state is not None:
            # Not on entering: the user's set-up may draw random numbers in between.
            restore_random_state(self._random_state, self._state.device)
            self._random_state = None
        self._ledger.train(self.step)
        self._saver.start_clock()
        factor = FIRST_STEP_FACTOR
        self._is_in_loop = True
        while self.step < total and not self._ends:
            self._beat(f"step {self.step}", factor)
            factor = 1
            self._share.stager.has_stepped = False
            self._stragglers.begin_step()
            yield self.step
            self.step += 1
            if self._warns:
                self._warn_of_unsaved()
            self._end_step(is_last=self.step >= total or self._ends)
            if self._is_frozen is None:
                self._compare_ranks()
                self._freeze_garbage()
        self._is_in_loop = False
        self._saver.join_pruner()
        self._ledger.end("done", self.step, "all steps done")
        self._beat("what follows the last step", math.inf)

    def sample_indices(self, step: int) -> torch.Tensor:
        """Data set indices this rank trains on in ``step``: int64 of shape (its share,)."""
        return self._order.indices(step, rank=self._data.rank, world_size=self._data.size, shares=self._shares)

    def report_loss(self, step: int, loss: float) -> None:
        """Record the global batch's mean loss in step ``step`` (from 1) in the ledger, which keeps the newest a second.

        Any step, on any rank; rank 0's is recorded. A tensor's ``item()`` waits for the device: report every few steps.
        """
        self._ledger.report_loss(step, loss)

    def goes_on(self) -> bool:
        """Begin the hang timeout anew, within a step that is long for a reason (an evaluation of many batches).

        False on every rank where a notice asks one of them to leave: cut the step short, or the notice's minutes pass
        in it. All ranks call it, equally often; it costs half a millisecond.
        """
        self._beat(f"step {self.step}, some way into it")
        (stop,) = self._ranks.maximum(int(self._watcher.stop_notice is not None))
        return not stop

    def end_if(self, condition: bool) -> bool:
        """End the run after this step, with a checkpoint of it, where ``condition`` holds on any rank.

        True on all ranks then. All ranks call it, equally often; it costs half a millisecond.
        """
        (ends,) = self._ranks.maximum(int(condition))
        self._ends |= bool(ends)
        return bool(ends)

    def set_shares(self, shares: Sequence[int] | None) -> None:
        """Set the samples of each data rank, from the next step on; None: equal. Every rank calls it, with the same.

        The samples of a step stay: ranks take other consecutive parts of them.
        """
        mine = None if shares is None else tuple(shares)
        by_rank = self._ranks.gather(mine)
        if other := next((rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]), 0):
            raise ConfigurationError(
                f"shares are {by_rank[0]} on rank 0 and {by_rank[other]} on rank {other}: samples would be trained on "
                "twice or never; give all ranks the same"
            )
        self._shares = mine
        self.sample_indices(0)

    def _end_step(self, *, is_last: bool) -> None:
        self._ledger.progress(self.step)
        if self._ranks.rank == 0:
            self._progress.update(self.step)
            self._look()
        self._beat(f"agreeing after step {self.step}")
        self._act(self._agreement.exchange(now=is_last), is_last=is_last)
        if is_last:
            self._save_final()
        elif self._saver.is_due(self.step):
            self._saver.begin(self.step)

    def _warn_of_unsaved(self) -> None:
        """Say once that no checkpoint holds gradients or an unknown optimizer; a scaler may leave a step out."""
        before, self._versions = self._versions, None
        if self._share.stager.has_stepped:
            return
        parameters = self._state.saved_parameters().values()
        self._versions = sum(parameter._version for parameter in parameters)
        if before in (None, self._versions) and all(parameter.grad is None for parameter in parameters):
            return
        self._warns = False
        logger.warning(
            "step %d ended with gradients and without optimizer.step, or by the step of an optimizer that the run was "
            "not given. No checkpoint holds either: accumulate within a step; global_batch is the samples of one "
            "optimizer step",
            self.step,
        )

    def _compare_ranks(self) -> None:
        """Say once that ranks have other parameters after a step: those that average them now and then (local SGD)."""
        by_rank = self._ranks.gather_to_first(self._state.norms() if self._ranks.world_size > 1 else {})
        for name in {name: None for norms in by_rank for name in norms}:
            if len({str(norms.get(name)) for norms in by_rank}) > 1:  # a text: no NaN is another's equal
                logger.error(
                    "%s differs between ranks, and a checkpoint has each part of it from another rank: wrap the model "
                    "(DDP, FSDP2), or average gradients; what averages parameters now and then cannot resume",
                    name,
                )
                return

    def _freeze_garbage(self) -> None:
        # A full collection walks all objects of torch and the model: it stopped one rank, and so all, for 0.25 to 0.4 s
        # (tests/benchmarks/results/checkpoint_2xh100_202611.md). After the first step most objects stay to the end.
        # Python 3.12 freezes 375 objects as it starts, so only a program that froze most of its own is left alone.
        # Both counts walk objects too, so they are asked once.
        self._is_frozen = gc.isenabled() and gc.get_freeze_count() < len(gc.get_objects())
        if self._is_frozen:
            gc.collect()
            gc.freeze()

    def _act(self, agreed: list[int] | None, *, is_last: bool) -> None:
        if agreed is None:
            return
        is_due, stop, wanted, any_busy, any_failed = agreed
        if stop and not is_last:
            self._save_final()
            self._leave()
        if is_due and (straggler := self._stragglers.compare(self._ranks)) is not None:
            self._ledger.report_straggler(straggler)
        self._saver.advance(
            self.step, due=bool(wanted) and not is_last, any_busy=bool(any_busy), any_failed=bool(any_failed)
        )

    def _flags(self) -> tuple[int, ...]:
        return (
            int(self._stragglers.is_due),
            int(self._watcher.stop_notice is not None),
            int(self._saver.wants_save()),
            *self._saver.flags,
        )

    def _save_final(self) -> None:
        self._saver.save_final(self.step, limit_s=self._hang_timeout_s * FIRST_STEP_FACTOR)

    def _beat(self, doing: str, factor: float = 1) -> None:
        self._heartbeat.beat(limit_s=self._hang_timeout_s * factor, doing=doing)

    def _leave(self) -> None:
        is_saved = self._saver.saved_step == self.step
        interrupted = leave_together(self._ranks, self._ledger, self._watcher, step=self.step, is_saved=is_saved)
        self._heartbeat.close()
        raise interrupted

    def _rehearse(self) -> None:
        if self._rehearsal is None:
            if self._is_ddp and self._ranks.world_size > 2 and self._ranks.rank == 0:
                logger.warning("without a rehearsal, a resumed DDP run of more than 2 ranks is not bit-equal")
            return
        self._beat("the rehearsal", FIRST_STEP_FACTOR)
        with self._state.unchanged():
            self._rehearsal()
