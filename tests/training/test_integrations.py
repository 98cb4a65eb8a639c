"""Real engines, stopped by SIGTERM and started again, end with the parameters of an undisturbed run, bit by bit."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.prune import random_unstructured
from torch.utils.data import ConcatDataset, DataLoader

from bootstrap.training import Watcher
from bootstrap.training.errors import EXIT_INTERRUPTED, ConfigurationError, Interrupted
from bootstrap.training.integrations.engine_files import EngineFiles
from bootstrap.training.integrations.engine_run import CHANGES_FILE, EngineRun
from bootstrap.training.ledger import read_ledger
from bootstrap.training.stores import open_store
from tests.training.engine_programs import (
    ENGINES,
    STEPS,
    STOP_AFTER,
    Growing,
    Net,
    Samples,
    end_this_process,
    parameters,
    with_lightning,
)  # fmt: skip
from tests.warm import ROOT, TRAINER, Warm

pytestmark = [
    pytest.mark.training,
    # Names of the engines' options, not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GPUFLEET_SCRATCH_DIR", str(tmp_path / "scratch"))
    yield


def steps(store: Path) -> list[int]:
    return [found.manifest.step for found in EngineFiles(open_store(str(store))).scan()[0]]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupted_run_goes_on_exactly(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = ENGINES[engine]
    undisturbed = parameters(train(tmp_path / "undisturbed"))
    folder = tmp_path / "interrupted"
    with pytest.raises(Interrupted) as stopped:
        train(folder, stop_after=STOP_AFTER)
    assert (stopped.value.code, stopped.value.step, stopped.value.saved) == (EXIT_INTERRUPTED, STOP_AFTER, True)
    assert steps(folder / "store") == [5, 4, 2]
    with pytest.raises(ConfigurationError, match="begins at step 0"):
        train(folder, resume=False)

    # The newest checkpoint has a flipped bit, and another node starts: the one before is used.
    monkeypatch.setenv("GPUFLEET_SCRATCH_DIR", str(tmp_path / "another node"))
    newest = max((folder / "store").glob("engine-*/files"))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert parameters(train(folder)) == undisturbed
    assert steps(folder / "store") == [STEPS, 10, 8]
    account = read_ledger(str(folder / "store"))
    assert account.finished and account.steps == STEPS


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_run_makes_and_unfreezes_is_there_after_a_resume(engine: str, tmp_path: Path) -> None:
    train = ENGINES[engine]
    undisturbed = train(tmp_path / "undisturbed", net=Growing)
    with pytest.raises(Interrupted):
        train(tmp_path, stop_after=STOP_AFTER, net=Growing)
    resumed = train(tmp_path, net=Growing)
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in undisturbed.parameters()]
    assert all(p.requires_grad for p in resumed.parameters())
    assert parameters(resumed) == parameters(undisturbed)


def test_groups_that_lightning_restores_are_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lightning.pytorch.callbacks import BaseFinetuning

    class Thawing(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.layers[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.layers[0], optimizer)

    undisturbed = with_lightning(tmp_path / "undisturbed", callbacks=[Thawing()])
    with pytest.raises(Interrupted):
        with_lightning(tmp_path, stop_after=STOP_AFTER, callbacks=[Thawing()])
    assert parameters(with_lightning(tmp_path, callbacks=[Thawing()])) == parameters(undisturbed)
    assert "no new start" not in caplog.text


class Died(Exception):  # noqa: N818
    """Stands for a process that ends without notice."""


def validated(
    folder: Path,
    *,
    notice_in: int | None = None,
    death_in: int | None = None,
    validates: bool = True,
    seed: int = 0,
    global_batch: int = 8,
    repeat: int = 1,
    accumulate: int = 0,
) -> Any:
    """Parameters, learning rate, loggers' step and validated steps of a Lightning run whose epoch has 3 steps."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    from bootstrap.training.integrations.lightning_callback import SpotTolerantCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.validated: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            end_this_process(self.trainer.global_step + 1, notice_in)
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(**batch)["loss"])
            if batch_idx and self.trainer.global_step == death_in:
                raise Died
            if not batch_idx:
                self.validated.append(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            if not validates:
                return optimizer
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    seed_everything(11, verbose=False)
    module = Module()
    spot = SpotTolerantCallback(store=str(folder / "store"), checkpoint_every=3, seed=seed)
    trainer = Trainer(
        max_steps=9, accelerator="cpu", devices=1, callbacks=[spot], default_root_dir=folder, logger=False,
        use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, accumulate_grad_batches=accumulate or 8 // global_batch,
    )  # fmt: skip
    validation = DataLoader(Samples(), batch_size=12) if validates else None
    data: Any = ConcatDataset([Samples()] * repeat)
    trainer.fit(module, spot.loader(data, global_batch=global_batch), validation, ckpt_path=spot.checkpoint)
    loggers_step = trainer.fit_loop.epoch_loop._batches_that_stepped
    return parameters(module.net), trainer.optimizers[0].param_groups[0]["lr"], loggers_step, module.validated


@pytest.mark.parametrize(
    ("ending", "validations"),
    [
        ({"notice_in": 3, "validates": False}, []),
        ({"notice_in": 3, "validates": True}, [3, 6, 9]),
        ({"notice_in": 4, "validates": True}, [6, 9]),
        ({"death_in": 6, "validates": True}, [6, 9]),
    ],
)
def test_lightning_goes_on_exactly_around_the_end_of_an_epoch(
    ending: dict[str, Any], validations: list[int], tmp_path: Path
) -> None:
    """Between the last batch of an epoch and the next come validation, its schedulers, and a draw of the loader."""
    validates = ending["validates"]
    *undisturbed, all_validations = validated(tmp_path / "undisturbed", validates=validates)
    assert all_validations == ([3, 6, 9] if validates else [])
    with pytest.raises((Interrupted, Died)):
        validated(tmp_path, **ending)
    changes: dict[str, tuple[int, str]] = {
        "seed": (1, "seed is 1, and was 0"),
        "repeat": (2, "dataset_size is 48, and was 24"),
        # With eight times the accumulation.
        "global_batch": (1, "global_batch is 1, and was 8"),
        "accumulate": (2, "samples_a_step is 16, and was 8"),
    }
    for name, (value, reason) in changes.items() if not validates else ():
        with pytest.raises(ConfigurationError, match=reason):
            validated(tmp_path, validates=validates, **{name: value})
    assert validated(tmp_path, validates=validates) == (*undisturbed, validations)
    assert steps(tmp_path / "undisturbed" / "store") == [9, 6, 3]


def trained(folder: Path, **options: Any) -> Any:
    """Store's steps after a Trainer run that evaluates; ``callbacks``: around this project's, which is None."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from bootstrap.training.integrations.transformers_callback import SpotTolerantCallback

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            end_this_process(state.global_step + 1, stop_after)

    spot = SpotTolerantCallback(store=str(folder / "store"), checkpoint_every=50)
    stop_after, model = options.pop("stop_after", None), options.pop("model", Net)()
    data: Any = ConcatDataset([Samples()] * options.pop("samples", 1))
    callbacks = [one or spot for one in options.pop("callbacks", [None])]
    optimizers = options.pop("optimizers", (None, None))
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trainer"), "per_device_train_batch_size": 8, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 0.01,
        "save_strategy": "no", "max_steps": 60,
    }  # fmt: skip
    arguments = TrainingArguments(**settings | options)
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=Samples(),
        callbacks=[*callbacks, Stop()], optimizers=optimizers,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=spot.checkpoint)
    return steps(folder / "store"), trainer.state.global_step


@pytest.mark.parametrize("is_first", [True, False])
def test_a_training_that_stops_early_is_saved(is_first: bool, tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    early = EarlyStoppingCallback(1, early_stopping_threshold=1000.0)
    saved, step = trained(
        tmp_path, callbacks=[None, early] if is_first else [early, None], eval_strategy="steps", eval_steps=2
    )
    assert step < 60 and saved == [step]


def test_a_training_that_stops_early_at_an_epochs_end_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import EarlyStoppingCallback

    early = EarlyStoppingCallback(1, early_stopping_threshold=1000.0)
    assert trained(tmp_path / "a", callbacks=[early, None], eval_strategy="epoch") == ([6], 6)
    assert "not saved" not in caplog.text
    assert trained(tmp_path / "b", callbacks=[None, early], eval_strategy="epoch") == ([], 6)
    assert "ended at step 6, which is not saved: callbacks that stop early belong before" in caplog.text


def test_a_notice_is_saved_where_trainer_keeps_the_best_alone(tmp_path: Path) -> None:
    """``save_strategy="best"`` takes back any wish to save at a step that evaluates."""
    with pytest.raises(Interrupted) as stopped:
        trained(tmp_path, stop_after=10, eval_strategy="steps", eval_steps=5, save_strategy="best")
    assert (stopped.value.step, stopped.value.saved) == (10, True)


def test_the_global_batch_is_the_one_that_trainer_found(tmp_path: Path) -> None:
    class Large(Net):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if len(inputs) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(inputs, labels)

    accumulated = {"gradient_accumulation_steps": 2}
    assert trained(tmp_path, model=Large, auto_find_batch_size=True, max_steps=3, **accumulated) == ([3], 3)
    (found,) = EngineFiles(open_store(str(tmp_path / "store"))).scan()[0]
    assert found.manifest.global_batch == 4
    # Without the search, Trainer takes its arguments, and not what its checkpoint says.
    assert trained(tmp_path, max_steps=4, per_device_train_batch_size=4) == ([4, 3], 4)
    with pytest.raises(ConfigurationError, match="samples_a_step is 8, and was 4"):
        trained(tmp_path, max_steps=6)
    for change, reason in (
        ({"seed": 7}, "seed is 7, and was 42"),
        ({"samples": 2}, "dataset_size is 48, and was 24"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            trained(tmp_path, max_steps=6, per_device_train_batch_size=4, **change)


def test_another_model_of_the_same_shapes_does_not_go_on(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Model(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        def __init__(self, **fields: Any) -> None:
            sizes: dict[str, Any] = {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
            super().__init__(LlamaConfig(vocab_size=50, **sizes, **fields))

        def forward(self, inputs: Any, labels: Any = None, **_: Any) -> Any:
            tokens = torch.arange(8).repeat(len(inputs), 1)
            return super().forward(input_ids=tokens, labels=tokens)

    assert trained(tmp_path, model=Model, max_steps=2) == ([2], 2)
    with pytest.raises(ConfigurationError, match=r"model.rope_parameters.rope_theta is 5.0, and was 10000.0"):
        trained(tmp_path, model=lambda: Model(rope_theta=5.0), max_steps=3)
    # A classifier that is loaded from its checkpoint has problem_type.
    classifier = {"problem_type": "single_label_classification", "chunk_size_feed_forward": 4}
    assert trained(tmp_path, model=lambda: Model(**classifier), max_steps=3) == ([3, 2], 3)


def test_a_model_that_was_pruned_in_the_run_does_not_go_on(tmp_path: Path) -> None:
    """Trainer would load what it finds, and go on with the rest as it is."""

    class Pruned(Net):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if not hasattr(self.layers[0], "weight_orig"):
                random_unstructured(self.layers[0], "weight", 0.5)  # type: ignore[no-untyped-call]
            return super().forward(inputs, labels)

    assert trained(tmp_path, model=Pruned, max_steps=2) == ([2], 2)
    with pytest.raises(ConfigurationError, match=r"model.layers.0.weight is in only one"):
        trained(tmp_path, model=Pruned, max_steps=3)


def test_lightnings_own_error_is_shown_where_the_run_has_not_begun(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from bootstrap.training.integrations.lightning_callback import SpotTolerantCallback

    class Module(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("it began")

        def configure_optimizers(self) -> None:
            raise AssertionError("it began")

    spot = SpotTolerantCallback(store=str(tmp_path / "store"))
    trainer = Trainer(accelerator="cpu", callbacks=[spot], default_root_dir=tmp_path, logger=False)
    with pytest.raises(ConfigurationError, match="no loader of this callback"):
        trainer.fit(Module(), DataLoader(Samples()))
    trainer.callbacks.append(StochasticWeightAveraging(0.1))  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="use Lightning's WeightAveraging"):
        trainer.fit(Module(), spot.loader(Samples(), global_batch=8))


def test_a_schedule_that_computes_with_numpy_is_resumed(tmp_path: Path) -> None:
    """It leaves numpy's numbers in the optimizer, which Trainer and Lightning read with ``weights_only=True``."""
    for steps_of_run in (2, 4):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step / 9))
        trained(tmp_path, model=lambda built=model: built, optimizers=(optimizer, schedule), max_steps=steps_of_run)
    assert steps(tmp_path / "store") == [4, 2]


def test_a_checkpoint_is_due_where_a_loop_counts_several_steps_at_once(tmp_path: Path) -> None:
    """Lightning's step counts those of each optimizer: 1, 3, 5 never divide by 2."""
    run = EngineRun(
        "lightning", store=str(tmp_path), checkpoint_interval_s=None, checkpoint_every=2, keep=1,
        watcher=Watcher(None, signals=False),
    )  # fmt: skip
    run.start(0, global_batch=1, order={})
    assert [run.end_step(step, is_last=False).save for step in (1, 3, 4, 5, 7)] == [False, True, True, False, True]
    run.finish()


def test_a_group_that_an_optimizer_gets_in_a_run_is_said_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    run = EngineRun("lightning", store=str(tmp_path), watcher=Watcher(None, signals=False))
    run.prepare(model)
    run.start(0, global_batch=1, order={}, optimizers=[optimizer])
    optimizer.add_param_group({"params": model.layers[3].parameters()})
    run.end_step(1, is_last=False)
    assert "no new start of this script" in caplog.text and "other parameter groups" in caplog.text
    run.finish()


def test_what_an_engine_casts_and_shards_is_no_change_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ZeRO-3 and FSDP1 leave a rank a part of each parameter, which the next start's model must not get."""
    for step in (0, 1):
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False), torch.nn.LazyLinear(2))
        model[1].weight = model[0].weight
        run = EngineRun("transformers", store=str(tmp_path / "store"), watcher=Watcher(None, signals=False))
        assert (run.fetched is None) == (step == 0)
        run.prepare(model)
        assert model[1].weight is model[0].weight
        assert model[0].weight.shape == (8, 4)
        assert isinstance(model[2].weight, torch.nn.parameter.UninitializedParameter) == (step == 0)
        model[0].weight.data = torch.zeros(0, dtype=torch.bfloat16)
        run.start(step, global_batch=8, order={})
        model[2](torch.zeros(1, 8))  # the run itself makes these parameters
        run.end_step(step + 1, is_last=False)
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        run.saved(step + 1, folder)
        told = torch.load(folder / CHANGES_FILE, weights_only=True)
        assert set(told["born"]) == {"model.2.weight", "model.2.bias"}
        run.finish()
    assert "no new start" not in caplog.text


def test_a_save_that_fails_is_told_and_the_next_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = EngineRun(
        "lightning", store=str(tmp_path / "store"), checkpoint_every=1, watcher=Watcher(None, signals=False)
    )
    run.start(0, global_batch=1, order={})
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "model").write_bytes(b"x")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    for step in (1, 2, 3):
        with monkeypatch.context() as full:
            if step != 2:
                full.setattr(EngineFiles, "upload" if step == 1 else "prune", fail)
            run.end_step(step, is_last=False)
            run.saved(step, tmp_path / "state")
        assert run.is_saved is (step != 1)
    assert "NOT safe, training goes on: rank 0: [Errno 28] full" in caplog.text and steps(tmp_path / "store") == [3, 2]
    assert "old checkpoints are not deleted: [Errno 28] full" in caplog.text, "the new one is safe all the same"
    run.finish()


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engines.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["transformers", "lightning"])
def test_the_pages_examples_run_as_they_stand(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUFLEET_CHECKPOINT_URI", str(tmp_path / "store"))
    exec(compile(example, "engines.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    assert steps(tmp_path / "store") == [20]


def test_two_ranks_stop_together_and_go_on_exactly(warm: Warm, tmp_path: Path) -> None:
    warm.torchrun(
        tmp_path,
        2,
        "tests.training.engine_programs",
        str(tmp_path),
        modules=(*TRAINER, "transformers.trainer", "lightning.pytorch"),
    )
    for rank in range(2):
        result = json.loads((tmp_path / f"result-{rank}.json").read_text(encoding="utf-8"))
        for engine in ENGINES:
            assert result[f"{engine} stopped"] == [STOP_AFTER, True]
            assert result[engine] is True, f"{engine} on rank {rank} is not bit-equal"
