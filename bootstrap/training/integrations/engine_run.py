"""Notices, saves and the ledger around a loop that an engine owns; the callbacks of all engines share it."""

from __future__ import annotations

import functools
import logging
import math
import os
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bootstrap.training.environment import checkpoint_interval
from bootstrap.training.errors import CheckpointError, ConfigurationError, TrainingError
from bootstrap.training.forms import ModuleForms, paced, warn_of_untakeable
from bootstrap.training.integrations.engine_files import EngineFiles, EngineManifest, Fetched
from bootstrap.training.leaving import Heartbeat, leave_together
from bootstrap.training.ledger import Ledger, process_started_at
from bootstrap.training.progress import ProgressFile
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.stores import Store, open_store
from bootstrap.training.watcher import Watcher

logger = logging.getLogger(__name__)

# Local disk that checkpoints are fetched to before the engine reads them.
SCRATCH_VARIABLE = "GPUFLEET_SCRATCH_DIR"
# Changes of the model's form, in the engine's checkpoint.
CHANGES_FILE = "gpufleet-changes.pt"
# Ranks meet at a save: the slowest may still write its files.
RANKS_TIMEOUT_S = 1800.0


class StepDecision(NamedTuple):
    """Actions of all ranks after the same step."""

    save: bool
    stop: bool


class EngineRun:
    """One process of a run whose loop belongs to ``engine``; a store holds checkpoints of one engine.

    Args:
        store: a store or its URI; default: ``GPUFLEET_CHECKPOINT_URI``.
        checkpoint_interval_s: default: ``GPUFLEET_CHECKPOINT_INTERVAL_S``, else 600.
        checkpoint_every: steps between checkpoints instead of seconds.
        keep: newest checkpoints that stay.
        watcher: of notices; default: as the environment says.
    """

    def __init__(
        self,
        engine: str,
        *,
        store: Store | str | None = None,
        checkpoint_interval_s: float | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        watcher: Watcher | None = None,
    ) -> None:
        if keep < 1 or (checkpoint_every is not None and checkpoint_every < 1):
            raise ConfigurationError(f"keep {keep} and checkpoint_every {checkpoint_every} must be at least 1")
        allow_numpys_values()
        self.engine = engine
        self.files = EngineFiles(open_store(store))
        self.step = 0
        self._interval_s = checkpoint_interval(checkpoint_interval_s)
        self._every = checkpoint_every
        self._keep = keep
        self._watcher = watcher or Watcher.from_environment()
        self.ledger = Ledger(None, writer_id="")  # until the start, which an error of the set-up may precede
        self._heartbeat = Heartbeat()
        self._saved_step: int | None = None
        self._saves = 0
        self._stopping = False
        self._forms: ModuleForms | None = None
        self._told: dict[str, Any] = {}  # changes of the model, in the fetched checkpoint
        self._problem = ""
        self._look = paced(self._warn)

    @functools.cached_property
    def fetched(self) -> Fetched | None:
        """Newest valid checkpoint, on this node's disk; None where the store has none."""
        root = Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir())
        folder = root / f"gpufleet-{self.engine}-{uuid.uuid5(uuid.NAMESPACE_URL, self.files.store.uri).hex[:12]}"
        fetched = self.files.fetch_newest(folder)
        if fetched is not None and fetched.manifest.engine != self.engine:
            raise ConfigurationError(
                f"{self.files.store.uri} holds checkpoints of {fetched.manifest.engine}, and this run is by "
                f"{self.engine}: use a new store"
            )
        return fetched

    def prepare(self, model: nn.Module) -> None:
        """Note a new model's form, and add what a fetched checkpoint's run added to it."""
        self._forms, self._model = ModuleForms({"model": model}), model
        self.take_forms()

    def take_forms(self) -> None:
        """Add to the model what a fetched checkpoint's run added to it, before the engine loads the tensors."""
        fetched = vars(self).get("fetched")  # a model that is only evaluated stays as it is
        if self._forms is not None and fetched and not self._told and (file := fetched.folder / CHANGES_FILE).exists():
            self._told = torch.load(file, map_location="cpu", weights_only=True)
            problem, saved = self._told.get("problem"), {**self._forms.now(), **self._told["now"]}
            if problem and self._forms.problem(saved, {}):  # Trainer would go on without the tensors
                raise ConfigurationError(f"{self.files.store.uri}/{fetched.prefix}: {problem}")
            device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
            self._forms.take(self._told["now"], self._told["born"], device)

    def _group_sizes(self) -> list[list[int]]:
        return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self._optimizers]

    def _tell_changes(self, folder: Path) -> None:
        """Write what the run changed into the engine's checkpoint."""
        problem = self._warn()
        if self._forms is None:
            return
        changes, now = self._forms.changes(warns=not self._ranks.rank), self._forms.now()
        if self._ranks.local_rank == 0 and (changes["born"] or changes["trains"]):
            now_of_born = {key: now.get(key) for key in changes["born"]}
            torch.save({**changes, "now": now_of_born, "problem": problem}, folder / CHANGES_FILE)

    def _warn(self) -> str:
        """Warn where no resume can take what the run has made of the model, which is returned, or of its groups."""
        problem = of_model = self._forms.problem(None, self._forms.born()) if self._forms else ""
        if not problem and self._group_sizes() != self._groups:
            problem = "the optimizer has other parameter groups than at the start"
        self._problem = warn_of_untakeable(problem, self._problem, self._ranks.rank)
        return of_model

    def start(
        self, step: int, *, global_batch: int, order: Mapping[str, Any],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:  # fmt: skip
        """Begin after ``step`` steps, once the engine has its ranks; raises Interrupted where a node already ends.

        ``order``: as EngineManifest's.

        Raises:
            ConfigurationError: the engine does not go on from the checkpoint, or has another global batch or order.
            CheckpointError: the nodes have different checkpoints; starting again fetches them anew.
        """
        self.step = step
        self._optimizers = optimizers
        self._groups = self._group_sizes()
        self._global_batch, self._order = global_batch, dict(order)
        self.files.facts = {**order, "engine": self.engine, "samples_a_step": global_batch}
        self._ranks = RankGroup(timeout_s=RANKS_TIMEOUT_S)
        self._writer_id = self._ranks.broadcast(uuid.uuid4().hex[:12])
        self.ledger = Ledger.open(self.files.store, self._ranks.rank, writer_id=self._writer_id)
        self._progress = ProgressFile(global_batch=global_batch)
        # The heartbeat notices a torchrun that is gone, no hang: the engine may evaluate for hours between two steps.
        self._heartbeat.beat(limit_s=math.inf, doing="the engine's loop")
        self._watcher.start()
        self.ledger.start(started_at=process_started_at(), world_size=self._ranks.world_size)
        try:
            self._check_resume(step)
        except TrainingError:
            self._heartbeat.close()
            self._watcher.close()
            raise
        if self._forms is not None:
            self._forms.rebase_parameters()
            self._forms.train(self._told.get("trains", {}))
        self._last_save = time.monotonic()
        if self._ranks.maximum(int(self._watcher.stop_notice is not None))[0]:
            self._stopping = True
            self.finish()
        self.ledger.train(step)

    def _check_resume(self, step: int) -> None:
        prefixes = set(self._ranks.gather(self.fetched.prefix if self.fetched else ""))
        if len(prefixes) > 1:
            raise CheckpointError(f"the nodes fetched different checkpoints, {sorted(prefixes)}: start again")
        if self.fetched is None:
            return
        manifest = self.fetched.manifest
        if step != manifest.step:
            raise ConfigurationError(
                f"{self.files.store.uri} has a checkpoint of step {manifest.step}, and {self.engine} begins at step "
                f"{step}: give it the callback's checkpoint (docs/engines.md), or use a new store"
            )
        ranks = self._ranks.world_size
        if different := self.files.differences(manifest):
            raise ConfigurationError(
                f"{self.files.store.uri} is of another run ({manifest.world_size} ranks, now {ranks}): {different}. "
                "set it back (samples_a_step is micro-batch × accumulation × ranks), or use a new store"
            )
        if manifest.world_size != ranks and self._ranks.rank == 0:
            logger.warning("checkpoint of %d ranks, now %d: not bit-equal", manifest.world_size, ranks)
        self._saved_step = manifest.step

    def end_step(self, step: int, *, is_last: bool) -> StepDecision:
        """Agree with the other ranks after ``step`` steps; ``save`` is True at most once a step."""
        before, self.step = self.step, step
        self.ledger.progress(step)
        if self._ranks.rank == 0:
            self._progress.update(step)
            self._look()
        stop, due = self._ranks.maximum(int(self._watcher.stop_notice is not None), int(self._is_due(before, step)))
        self._stopping = bool(stop) and not is_last
        save = bool(due) or self._stopping or is_last
        return StepDecision(save=save and self._saved_step != step, stop=self._stopping)

    @property
    def is_saved(self) -> bool:
        """True where the newest checkpoint is of the last step."""
        return self._saved_step == self.step

    def _is_due(self, before: int, step: int) -> bool:
        if self._watcher.save_notice is not None:
            return True
        if self._every is not None:
            return step // self._every > before // self._every  # Lightning counts the steps of each optimizer
        # Only rank 0's clock counts; the ranks' clocks would ask one after the other.
        return self._ranks.rank == 0 and time.monotonic() - self._last_save >= self._interval_s

    def saved(self, step: int, folder: Path) -> None:
        """Make the engine's checkpoint in ``folder`` durable: each node's files once, the manifest last."""
        if self._saved_step == step:
            return
        self._tell_changes(folder)
        self.ledger.progress(step, force=True)
        self._saves += 1
        prefix = self.files.prefix_name(step, self._writer_id, self._saves)
        self._ranks.maximum(0)  # every rank has written its files
        # Nodes may share the folder, or have one each.
        paths = folder.rglob("*") if self._ranks.local_rank == 0 else ()
        local = sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())
        listings = self._ranks.gather(local)
        own = [name for name in local if not any(name in listing for listing in listings[: self._ranks.rank])]
        problem, uploaded = "", []
        try:
            uploaded = self.files.upload(prefix, folder, own)
        except (CheckpointError, OSError) as error:
            problem = f"rank {self._ranks.rank}: {error}"
        answers = self._ranks.gather((problem, uploaded))
        problems = [fault for fault, _ in answers if fault]
        if not problems and self._ranks.rank == 0:
            manifest = EngineManifest(
                engine=self.engine,
                step=step,
                world_size=self._ranks.world_size,
                global_batch=self._global_batch,
                created_unix_s=round(time.time(), 3),
                order=self._order,
                files=tuple(file for _, files in answers for file in files),
            )
            try:
                self.files.commit(prefix, manifest.to_bytes())
                self.ledger.save("commit", step, prefix=prefix, bytes=sum(file.bytes for file in manifest.files))
            except (CheckpointError, OSError) as error:
                problems = [f"manifest: {error}"]
        problems = self._ranks.broadcast(problems)
        if problems:
            logger.error("checkpoint of step %d is NOT safe, training goes on: %s", step, "; ".join(problems))
        else:
            self._saved_step = step
        if self._ranks.rank == 0:
            self.files.clean_up(prefix, "; ".join(problems), keep=self._keep)
        self._watcher.save_notice = None
        self._last_save = time.monotonic()
        self.ledger.save("stall", step)
        self.ledger.flush()

    def finish(self) -> None:
        """End the run: Interrupted (exit code 75) after a notice, else the ledger's last line."""
        self._heartbeat.close()
        if not self._stopping:
            self.ledger.end("done", self.step, "all steps done")
            self._watcher.close()
            self._ranks.close()
            return
        raise leave_together(self._ranks, self.ledger, self._watcher, step=self.step, is_saved=self.is_saved)

    def fail(self, error: BaseException) -> None:
        """Record that the engine failed."""
        self._heartbeat.close()
        self.ledger.end("failed", self.step, f"{type(error).__name__}: {error}"[:200])
        self._watcher.close()


def allow_numpys_values() -> None:
    """Let ``torch.load(weights_only=True)``, by which engines resume, read numpy's numbers and arrays: no code runs.

    A schedule that computes with numpy leaves them in the optimizer.
    """
    import numpy

    core: Any = getattr(numpy, "_core", None) or numpy.core  # numpy 2, numpy 1
    types = [value for name, value in vars(numpy.dtypes).items() if name.endswith("DType") and name != "ObjectDType"]
    safe = [core.multiarray.scalar, core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, *types]
    torch.serialization.add_safe_globals(safe)
