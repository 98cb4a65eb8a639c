"""Training in every layout on four gloo ranks, which test_layouts runs once.

A leg is a process group of its own size, a fresh model in some layout and a few steps; its facts go to
FOLDER/facts-RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bootstrap.training import Interrupted, SpotTolerantRun, Watcher, forms, loading, planning
from bootstrap.training.errors import TrainingError
from bootstrap.training.notices import Notice

RANKS = 4
SAMPLES = 64
GLOBAL_BATCH = 8
# Twelve legs of two steps.
CHAIN_STEPS = 24


class Net(nn.Module):
    """Layers that tensor parallelism divides, and a head that four ranks cannot share evenly."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 96), nn.Linear(96, 32)
        self.norm = nn.BatchNorm1d(32) if batch_norm else nn.Identity()
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(32, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.drop(self.norm(self.down(torch.relu(self.up(inputs))))))
        return logits


def build(
    layout: str, dropout: float, *, thaws: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer, DeviceMesh | None]:
    """Model, optimizers of its matrices and of its biases, and mesh."""
    torch.manual_seed(0)
    model: nn.Module = Net(dropout, batch_norm=layout == "ddp-norm")
    model.down.requires_grad_(not thaws)
    world, mesh = dist.get_world_size(), None
    if layout.startswith("fsdp-tp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    elif layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout in ("fsdp", "hsdp", "fsdp-tp"):
        assert mesh is not None
        shards = mesh["dp_shard"] if layout == "fsdp-tp" else mesh
        for layer in (model.up, model.down, model):
            fully_shard(layer, mesh=shards)  # type: ignore[arg-type]
    if layout in ("ddp", "zero1", "ddp-norm"):
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(100 + (dist.get_rank() if mesh is None else 0))
    matrices = [one for one in model.parameters() if one.dim() > 1]
    biases = torch.optim.AdamW([one for one in model.parameters() if one.dim() == 1], lr=1e-2)
    if layout == "zero1":
        # Its package warns of torch.jit on import, which is an error where pytest imports this file.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(matrices, torch.optim.AdamW, lr=1e-2), biases, mesh
    return model, torch.optim.AdamW(matrices, lr=1e-2), biases, mesh


class OfRank:
    """Generators of a user's, with a seed of each rank's own."""

    def __init__(self) -> None:
        self.python = random.Random(dist.get_rank())  # noqa: S311
        self.torch = torch.Generator().manual_seed(dist.get_rank())

    def draw(self) -> float:
        return self.python.random() + torch.rand((), generator=self.torch).item()

    def state_dict(self) -> dict[str, Any]:
        return {"python": self.python.getstate(), "torch": self.torch.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.python.setstate(state["python"])
        self.torch.set_state(state["torch"])


class Average:
    """Moving average that begins after a warm-up, laid out as the parameters are."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, list[torch.Tensor]()

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step == 2:
            self.shadow = [parameter.detach().clone() for parameter in self.model.parameters()]
        for average, parameter in zip(self.shadow, self.model.parameters(), strict=False):
            average.lerp_(parameter, 0.5)

    def digest(self) -> str:
        whole = [tensor.full_tensor() for tensor in self.shadow if isinstance(tensor, DTensor)]
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in whole)).hexdigest() if whole else ""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Leg:
    """One stretch of training in one layout."""

    def __init__(
        self, layout: str, store: Path, *, dropout: float = 0.0, stop_after: int | None = None, thaws: bool = False
    ) -> None:
        self.layout, self.stop_after, self.thaws = layout, stop_after, thaws
        self.watcher = Watcher(None, signals=False)
        self.model, self.optimizer, self.biases, mesh = build(layout, dropout, thaws=thaws)
        self.of_rank, self.critic = OfRank(), nn.BatchNorm1d(4096)
        extra: dict[str, Any] = {"of_rank": self.of_rank, "critic": self.critic} if layout == "ddp-norm" else {}
        self.average = Average(self.model)
        if layout in ("fsdp", "hsdp", "fsdp-tp") and dropout:
            extra = {"average": self.average}
        self.losses: dict[int, float] = {}
        self.loaded = self.random = ""
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 16, generator=generator)
        self.targets = torch.randint(0, 3, (SAMPLES,), generator=generator)

        def rehearse() -> None:
            nn.functional.cross_entropy(self.model(self.inputs[:2]), self.targets[:2]).backward()  # type: ignore[no-untyped-call]

        self.run = SpotTolerantRun(
            self.model, self.optimizer, extra={"biases": self.biases, **extra}, mesh=mesh, dataset_size=SAMPLES,
            global_batch=GLOBAL_BATCH, store=str(store), watcher=self.watcher, checkpoint_every=3, keep=3,
            agree_every=1, rehearsal=rehearse if mesh is None else None,
        )  # fmt: skip

    def train(self, steps: int) -> Leg:
        """Train until ``steps`` or the notice."""
        try:
            with self.run as run:
                self.loaded = self.digest() if run.step else ""
                if run._random_state is not None:
                    self.random = hashlib.sha256(run._random_state["torch"].numpy()).hexdigest()
                for step in run.steps(steps):
                    if self.thaws and step == 2:
                        self.run._state.model.down.requires_grad_(True)
                        if self.layout == "ddp":
                            self.model = nn.parallel.DistributedDataParallel(self.run._state.model)
                    self.critic(torch.full((2, 4096), self.of_rank.draw()))
                    indices = run.sample_indices(step)
                    loss = nn.functional.cross_entropy(self.model(self.inputs[indices]), self.targets[indices])
                    for optimizer in (self.optimizer, self.biases):
                        optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    for optimizer in (self.optimizer, self.biases):
                        optimizer.step()
                    self.average.update(step)
                    if isinstance(self.model, FSDPModule):  # an evaluation leaves its parameters gathered
                        with torch.no_grad():
                            self.model.eval()(self.inputs[:2])
                            self.model.train()
                    mean = loss.detach().clone()
                    dist.all_reduce(mean)
                    self.losses[step] = mean.item() / dist.get_world_size()
                    if step + 1 == self.stop_after and dist.get_rank() == 0:
                        self.watcher.stop_notice = Notice(source="test", detail="", save_by=float("inf"))
        except Interrupted as stopped:
            assert stopped.saved
        return self

    def whole(self) -> dict[str, torch.Tensor]:
        """Whole parameters and optimizer states by name."""
        states = self.run._state.snapshot().later
        tensors = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in states.items()
        }
        if self.layout == "zero1":
            for rank in range(dist.get_world_size()):
                box = [{name: value for name, value in tensors.items() if name.startswith("optimizer")}]
                dist.broadcast_object_list(box, src=rank)
                tensors |= box[0]
        return tensors

    def digest(self) -> str:
        """Digest of the whole parameters and large optimizer states, the same in every layout."""
        sha256 = hashlib.sha256()
        for name, tensor in sorted(self.whole().items()):
            if tensor.nbytes > 4096:
                sha256.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return sha256.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Results that the test compares."""
        return {"layout": self.layout, "losses": self.losses, "loaded": self.loaded, "end": self.digest(),
                "step": self.run.step, "random": self.random, "average": self.average.digest(),
                "data": [self.run.data_rank, self.run.data_size]}  # fmt: skip


def resumes_bit_equal(folder: Path, layout: str) -> dict[str, Any]:
    """An undisturbed run of eight steps beside one that is stopped after five, with dropout."""
    undisturbed = Leg(layout, folder / "whole", dropout=0.2).train(8)
    whole = undisturbed.facts()
    first = Leg(layout, folder / "parts", dropout=0.2, stop_after=5).train(8).facts()
    second = Leg(layout, folder / "parts", dropout=0.2).train(8)
    return {"whole": whole, "first": first, "second": second.facts(), "means": means_of(second),
            "undisturbed_means": means_of(undisturbed)}  # fmt: skip


def thawed(folder: Path, layout: str) -> dict[str, Any]:
    """A layer that trains from the third step on: DistributedDataParallel is made anew for it, and by a resume."""
    whole = Leg(layout, folder / "whole", thaws=True).train(7).facts()
    Leg(layout, folder / "parts", thaws=True, stop_after=4).train(7)
    again = Leg(layout, folder / "parts", thaws=True)
    frozen = again.whole()["model.down.weight"]
    parts = again.train(7).facts()
    moved = again.whole()["model.down.weight"] != frozen
    return {"whole": whole, "parts": parts, "moved": bool(moved.all())}


def means_of(leg: Leg) -> list[float]:
    """Sums of this rank's batch statistics."""
    found = [buffer.sum().item() for name, buffer in leg.model.named_buffers() if name.endswith("running_mean")]
    assert leg.critic.running_mean is not None
    return [*found, leg.critic.running_mean.sum().item(), leg.of_rank.draw()] if found else []


def step_of(checkpoint: Path) -> int:
    """Step in a checkpoint's name."""
    return int(checkpoint.name.split("-")[1])


def alone(folder: Path, layout: str) -> dict[str, Any]:
    """The steps of the whole chain on one rank."""
    return Leg(layout, folder).train(CHAIN_STEPS).facts()


def one_leg(folder: Path, layout: str) -> dict[str, Any]:
    """The next two steps of a chain of layouts, over one store."""
    before = sorted(folder.glob("step-*")) if folder.exists() else []
    start = step_of(before[-1]) if before else 0
    dist.barrier()
    leg = Leg(layout, folder, stop_after=start + 2).train(start + 20)
    assert leg.run.step == start + 2
    return leg.facts()


def write_once(path: Path, data: bytes | bytearray) -> None:
    """Write a file by the first rank, while no rank reads it."""
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(data)
    dist.barrier()


def damaged(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Resume with one byte of one file of the newest checkpoint changed, for each file, at its begin and its end."""
    Leg(layout, folder).train(7)
    # The older checkpoint is that of step 6 if it was committed before the run's end, else that of step 3.
    *_, older, newest = sorted(folder.glob("step-*"))
    facts = []
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for at in (0, -5):
            data = bytearray(whole)
            data[at] ^= 1
            write_once(path, data)
            leg = Leg(layout, folder)
            with leg.run as run:
                facts.append({"file": path.name, "step": run.step, "older": step_of(older), "digest": leg.digest()})
            write_once(path, whole)
    leg = Leg(layout, folder)
    with leg.run as run:
        facts.append({"file": "", "step": run.step, "digest": leg.digest()})
    return facts


class PlainStates(torch.optim.Optimizer):
    """Optimizer that keeps plain tensors for sharded parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["velocity"] = torch.zeros(parameter.to_local().shape)


def refused(folder: Path, layout: str) -> list[str]:
    """Messages of what cannot be saved."""
    messages: list[str] = []
    model, _, _, mesh = build(layout, 0.0)
    for optimizer, variable, value in (
        (PlainStates(model.parameters()), "", ""),
        (torch.optim.AdamW(model.parameters()), "", ""),
        (torch.optim.AdamW(model.parameters()), "GPUFLEET_PLAN", '{"tensor_parallel": 2}'),
        (torch.optim.AdamW(model.parameters()), "GPUFLEET_PLAN", '{"sharding": "zero3"}'),
    ):
        os.environ[variable or "UNUSED"] = value
        try:
            with SpotTolerantRun(
                model, optimizer, mesh=mesh, dataset_size=8, global_batch=4, store=str(folder),
                watcher=Watcher(None, signals=False),
                extra={"of_first": OfRank()} if len(messages) == 1 and dist.get_rank() == 0 else {},
            ):  # fmt: skip
                messages.append("entered")
        except TrainingError as error:
            messages.append(str(error))
        os.environ.pop(variable or "UNUSED")
    return messages


def apart(folder: Path, layout: str) -> list[str]:
    """Warnings of a run for what no checkpoint holds: ranks with other parameters, the state of DDP's hook."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bootstrap").addHandler(handler)
    leg = Leg(layout, folder)
    if layout == "ddp":
        leg.model.register_comm_hook({"errors": []}, lambda _, bucket: allreduce_hook(None, bucket))  # type: ignore[operator, arg-type]
    leg.train(2)
    logging.getLogger("bootstrap").removeHandler(handler)
    return [text for text in said if "between ranks" in text or "communication hook" in text]


# Ranks, what to run, layout, folder of the store.
PROGRAM: list[tuple[int, Callable[[Path, str], Any], str, str]] = [
    *((RANKS, resumes_bit_equal, layout, f"equal-{layout}")
      for layout in ("ddp-norm", "zero1", "fsdp", "hsdp", "fsdp-tp")),
    *((RANKS, thawed, layout, f"thawed-{layout}") for layout in ("ddp", "fsdp")),
    *((ranks, one_leg, layout, "chain") for ranks, layout in (
        (4, "ddp"), (4, "fsdp"), (2, "fsdp"), (2, "tp"), (1, "plain"), (4, "fsdp-tp"), (4, "zero1"), (4, "hsdp"),
        (2, "zero1"), (2, "ddp"), (4, "fsdp-tp"), (1, "plain"))),
    (1, alone, "plain", "alone"),
    (RANKS, damaged, "fsdp", "damaged-fsdp"),
    (RANKS, damaged, "ddp", "damaged-ddp"),
    (RANKS, refused, "fsdp", "refused"),
    *((2, apart, layout, f"apart-{layout}") for layout in ("plain", "ddp", "tp")),
]  # fmt: skip


def main(folder: Path) -> None:
    """Every entry of the program that this rank takes part in."""
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"rank {rank} %(message)s")
    torch.set_num_threads(1)
    # Small tensors are divided as large ones are.
    for module in (planning, loading):
        vars(module).update(PIECE_BYTES=2048, WHOLE_BYTES=256)
    forms.LOOK_FACTOR = 0 if rank == 0 else 10**9  # ranks look after different steps
    facts = []
    for number, (ranks, function, layout, name) in enumerate(PROGRAM):
        if rank >= ranks:
            continue
        store: Any = dist.FileStore(  # type: ignore[attr-defined]
            str(folder / f"rendezvous-{number}"), ranks
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        facts.append([number, function.__name__, layout, ranks, function(folder / name, layout)])
        dist.barrier()
        dist.destroy_process_group()
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
