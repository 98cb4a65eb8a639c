"""Callback for transformers' Trainer: notices, safe checkpoints, exact resume and the ledger.

spot = SpotTolerantCallback()
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[spot])
trainer.train(resume_from_checkpoint=spot.checkpoint)
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bootstrap.training.errors import ConfigurationError
from bootstrap.training.facts import config_facts
from bootstrap.training.integrations.engine_run import EngineRun
from bootstrap.training.state import schedule_of

logger = logging.getLogger(__name__)


class TransformersSpotCallback(TrainerCallback):
    """Saves in Trainer's own format when due and on a notice, which ends the process with exit code 75.

    Trainer's other saves (``save_strategy``) are made safe too. ``options``: as EngineRun takes.
    """

    def __init__(self, **options: Any) -> None:
        self._run = EngineRun("transformers", **options)

    @property
    def checkpoint(self) -> str | None:
        """Newest valid checkpoint for ``trainer.train(resume_from_checkpoint=...)``; None starts at step 0."""
        folder = str(self._run.fetched.folder) if self._run.fetched else None
        self._run.take_forms()
        return folder

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Prepare the model for the checkpoint's tensors."""
        if model is not None:
            self._run.prepare(model)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **given: Any) -> None:
        """Join the ranks, and refuse a run that would not go on from its checkpoint."""
        if args.save_only_model or args.ignore_data_skip:
            raise ConfigurationError(
                "save_only_model and ignore_data_skip must be off: with either, a resumed run has lost its optimizer "
                "or its place in the data"
            )
        if args.dataloader_persistent_workers and state.is_world_process_zero:
            logger.warning("with dataloader_persistent_workers a resumed run draws other random numbers: not bit-equal")
        # Without automatic search the state of a resume has the checkpoint's batch, and the training the arguments'.
        found = state.train_batch_size if args.auto_find_batch_size else None
        batch = found or args.train_batch_size
        order: dict[str, Any] = {"seed": args.seed if args.data_seed is None else args.data_seed}
        dataset: Any = getattr(given.get("train_dataloader"), "dataset", None)
        if hasattr(dataset, "__len__"):
            order["dataset_size"] = len(dataset)
        if isinstance(config := getattr(given.get("model"), "config", None), PretrainedConfig):
            order |= config_facts(json.loads(config.to_json_string(use_diff=False)), "model.")
        order["schedule"] = schedule_of(given.get("lr_scheduler"))
        optimizer = given.get("optimizer")
        self._run.start(
            state.global_step, global_batch=batch * args.gradient_accumulation_steps * args.world_size, order=order,
            optimizers=[] if optimizer is None else [optimizer],
        )  # fmt: skip

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        """Ask Trainer to save, and to stop, where the ranks agree."""
        decision = self._run.end_step(state.global_step, is_last=state.global_step >= state.max_steps)
        control.should_save = control.should_save or decision.save
        control.should_training_stop = control.should_training_stop or decision.stop
        return control

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        """Ask Trainer to save an end that was not known at its step: early stopping, or no more data.

        Early stopping may be decided in the evaluation at the end of an epoch, by a callback before this one.
        """
        control.should_save = control.should_save or (control.should_training_stop and not self._run.is_saved)
        return control

    on_evaluate = on_epoch_end

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the loss that Trainer logs (``logging_steps``)."""
        if logs and "loss" in logs:
            self._run.ledger.report_loss(state.global_step, logs["loss"])

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Make Trainer's checkpoint durable."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._run.saved(state.global_step, folder)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Leave with exit code 75 after a notice."""
        if not self._run.is_saved:
            logger.warning(
                "training ended at step %d, which is not saved: callbacks that stop early belong before this one",
                state.global_step,
            )
        self._run.finish()


SpotTolerantCallback = TransformersSpotCallback  # the name that docs/engines.md imports
