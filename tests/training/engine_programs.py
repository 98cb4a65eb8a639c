"""Tiny trainings by transformers' Trainer and by Lightning, with dropout and shuffled data, for test_integrations.py.

As a program under torchrun: each engine undisturbed, then interrupted and resumed in the folder of its argument.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from bootstrap.training.errors import Interrupted

STEPS = 12
STOP_AFTER = 5  # in the second epoch of Trainer, whose epoch has 3 steps
SAMPLES = 24


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].flip(0)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 6))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        loss = outputs.new_zeros(()) if labels is None else (outputs - labels).square().mean()
        return {"loss": loss, "logits": outputs}


class Growing(Net):
    """Makes and grows buffers in forward passes, and trains its first layer from the fifth on."""

    scale: torch.Tensor | None
    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.register_buffer("scale", None)
        self.register_buffer("queue", torch.zeros(0, 6))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if len(self.queue) == 5:
            self.layers[0].requires_grad_(True)
        if self.scale is None:
            self.scale = inputs.detach().abs().mean(0)
        self.queue = torch.cat([self.queue, inputs.detach()[:1]])
        return super().forward(inputs * self.scale + self.queue.mean(), labels)


def end_this_process(step: int, stop_after: int | None) -> None:
    """SIGTERM to this process, as the agent sends it."""
    if step == stop_after:
        os.kill(os.getpid(), signal.SIGTERM)


def with_transformers(
    folder: Path, *, stop_after: int | None = None, resume: bool = True, net: type[Net] = Net
) -> nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from bootstrap.training.integrations.transformers_callback import SpotTolerantCallback

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            end_this_process(state.global_step + 1, stop_after)

    spot = SpotTolerantCallback(store=str(folder / "store"), checkpoint_every=2)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = net()
    trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=[spot, Stop()])
    trainer.train(resume_from_checkpoint=spot.checkpoint if resume else None)
    return model


def with_lightning(
    folder: Path, *, stop_after: int | None = None, resume: bool = True, net: type[Net] = Net, callbacks: Any = ()
) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    from bootstrap.training.integrations.lightning_callback import SpotTolerantCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx % 2 == 0:
                end_this_process(self.trainer.global_step + 1, stop_after)
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            trained = (one for one in self.parameters() if one.requires_grad or not callbacks)
            return torch.optim.AdamW(trained, lr=0.01)

    seed_everything(11, verbose=False)
    module = Module()
    spot = SpotTolerantCallback(store=str(folder / "store"), checkpoint_every=2)
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        accumulate_grad_batches=2,
        callbacks=[spot, *callbacks],
        default_root_dir=folder / "lightning",
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loader = spot.loader(Samples(), global_batch=4)
    trainer.fit(module, loader, ckpt_path=spot.checkpoint if resume else None)
    trained: nn.Module = module.net
    return trained


ENGINES = {"transformers": with_transformers, "lightning": with_lightning}


def parameters(model: nn.Module) -> list[list[float]]:
    return [value.double().flatten().tolist() for value in model.state_dict().values()]


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    result: dict[str, Any] = {}
    for name, train in ENGINES.items():
        undisturbed = parameters(train(folder / name / "undisturbed"))
        try:
            # One rank gets the notice; all stop.
            train(folder / name / "interrupted", stop_after=STOP_AFTER if rank == 1 else None)
        except Interrupted as interrupted:
            result[f"{name} stopped"] = [interrupted.step, interrupted.saved]
        result[name] = parameters(train(folder / name / "interrupted")) == undisturbed
    (folder / f"result-{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
