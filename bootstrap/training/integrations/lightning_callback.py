"""Callback for Lightning: notices, safe checkpoints, exact resume with the data order, and the ledger.

spot = SpotTolerantCallback()
trainer = Trainer(max_steps=1000, callbacks=[spot], use_distributed_sampler=False)
trainer.fit(model, spot.loader(data, global_batch=64), ckpt_path=spot.checkpoint)
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset, Sampler

from bootstrap.training.errors import ConfigurationError, Interrupted
from bootstrap.training.facts import facts_of
from bootstrap.training.integrations.engine_run import EngineRun, StepDecision
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.state import random_state, restore_random_state, schedule_of

_LIGHTNING_FILE = "lightning.ckpt"


class LightningSpotCallback(Callback):
    """Saves in Lightning's own format when due and on a notice, which ends the process with exit code 75.

    ``options``: as EngineRun takes; ``seed`` is of the order of the samples.
    """

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        self._run = EngineRun("lightning", **options)
        self._seed = seed
        self._random: Mapping[str, Any] | None = None
        self._order: SampleOrder | None = None
        self._due: StepDecision | None = None
        self.trainer: Trainer | None = None

    @property
    def checkpoint(self) -> str | None:
        """Newest valid checkpoint for ``trainer.fit(ckpt_path=...)``; None starts from the beginning."""
        return str(self._run.fetched.folder / _LIGHTNING_FILE) if self._run.fetched else None

    def loader(self, dataset: Dataset[Any], *, global_batch: int, **options: Any) -> DataLoader[Any]:
        """DataLoader that goes on at the exact sample; ``global_batch`` samples over all ranks a forward pass."""
        size = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no length
        self._order = SampleOrder(dataset_size=size, global_batch=global_batch, seed=self._seed)
        if size < global_batch:
            raise ConfigurationError(f"global_batch is {global_batch}, and the data set has {size} samples")
        return _ResumableLoader(dataset, batch_sampler=_Batches(self, self._order), **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the set-up of the data."""
        self.trainer = trainer
        if stage != "fit":
            return
        if self._order is None:
            raise ConfigurationError(
                "the training data is no loader of this callback, so its place cannot be restored: "
                "trainer.fit(model, spot.loader(dataset, global_batch=...), ckpt_path=spot.checkpoint)"
            )
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            raise ConfigurationError(
                "Lightning would replace the callback's order of samples: Trainer(use_distributed_sampler=False)"
            )
        if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigurationError(
                "StochasticWeightAveraging sets itself up at an epoch's start, so a resume within an epoch would go on "
                "without it: use Lightning's WeightAveraging"
            )
        self._run.prepare(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the ranks, and refuse a run that would not go on from its checkpoint."""
        assert self._order is not None
        schedule = ", ".join(schedule_of(config.scheduler) for config in trainer.lr_scheduler_configs)
        restores_groups = any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        self._run.start(
            trainer.global_step,
            global_batch=self._order.global_batch * int(trainer.accumulate_grad_batches),
            order=facts_of(self._order, {"schedule": schedule}),
            optimizers=() if restores_groups else trainer.optimizers,
        )
        fetched = self._run.fetched
        if fetched and (own := fetched.folder / _random_name(trainer.global_rank)).exists():
            self._random = torch.load(own, map_location="cpu", weights_only=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restore the random generators before the first batch (set-up may have drawn numbers), or save what is due.

        The epoch's end and its schedulers come between a batch and the next, and a resume goes on here.
        """
        self._restore(trainer, pl_module)
        due, self._due = self._due, None
        if due is not None:
            loop = trainer.fit_loop.epoch_loop
            early = int(not loop._should_accumulate())  # the loggers' step, which a restart counts at this place
            loop._batches_that_stepped -= early
            self._carry_out(due, trainer, pl_module)
            loop._batches_that_stepped += early

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what is due before a validation, which a resume then begins anew."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        if self._restore(trainer, pl_module):
            progress.total.reset_on_restart()
        due, self._due = self._due, None
        if due is not None:
            # Lightning runs the validation of a checkpoint that was taken in one of its batches.
            before = copy.deepcopy(progress.state_dict())
            progress.increment_ready()
            progress.increment_started()
            self._carry_out(due, trainer, pl_module)
            progress.load_state_dict(before)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree after an optimizer step; save before the next validation or batch, or at once where neither follows."""
        step = trainer.global_step
        if step == self._run.step:  # accumulating
            return
        loop = trainer.fit_loop
        assert loop._data_fetcher is not None
        validates = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        is_last = trainer.max_steps > 0 and step >= trainer.max_steps
        decision = self._run.end_step(step, is_last=is_last)
        if is_last and not validates:
            self._carry_out(decision, trainer, pl_module)
        else:
            self._due = decision

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Restore the random generators where the resume begins; True there."""
        if self._random is None:
            return False
        restore_random_state(self._random, pl_module.device)
        self._random = None
        # Lightning would step no ReduceLROnPlateau at the end of this epoch. Its property stays True in an epoch.
        trainer.fit_loop._restarting = False
        return True

    def _carry_out(self, decision: StepDecision, trainer: Trainer, pl_module: LightningModule) -> None:
        if decision.save:
            self._save(trainer, pl_module, trainer.global_step)
        if decision.stop:
            self._run.finish()

    def _save(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        root = Path(trainer.default_root_dir) / "gpufleet"
        folder = root / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(folder / _LIGHTNING_FILE)
        torch.save(random_state(pl_module.device), folder / _random_name(trainer.global_rank))
        self._run.saved(step, folder)
        if trainer.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # the store has it

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, where the end was not known before it, and close the ledger."""
        if self._run.end_step(trainer.global_step, is_last=True).save:
            self._save(trainer, pl_module, trainer.global_step)
        self._run.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record a failure; an interruption has recorded itself."""
        if not isinstance(exception, Interrupted):
            self._run.fail(exception)


SpotTolerantCallback = LightningSpotCallback  # the name that docs/engines.md imports


class _Batches(Sampler[list[int]]):
    """This rank's samples of each forward pass of one epoch, from the batch that Lightning has come to."""

    def __init__(self, callback: LightningSpotCallback, order: SampleOrder) -> None:
        self._callback = callback
        self._order = order

    def __len__(self) -> int:
        return self._order.dataset_size // self._order.global_batch

    def __iter__(self) -> Iterator[list[int]]:
        trainer = self._callback.trainer
        assert trainer is not None
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
        for number in range(done, (done // len(self) + 1) * len(self)):
            yield self._order.indices(number, rank=trainer.global_rank, world_size=trainer.world_size).tolist()


class _ResumableLoader(DataLoader[Any]):
    """Loader with the state methods that Lightning takes for resumable; the position is its own ``batch_progress``."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.pt"
