"""State that a checkpoint saves and a resume restores."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from bootstrap.training.errors import ConfigurationError


class Stateful(Protocol):
    """An object with the two methods of torch's schedulers, scalers and moving averages."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the values of ``state_dict``."""


class TrainingState:
    """Model, optimizer and optional parts, with this rank's generators and buffers."""

    def __init__(self, model: nn.Module, optimizer: Stateful, optional: Mapping[str, Stateful | None]) -> None:
        self.model = unwrap(model)
        refuse_sharded(self.model, optimizer)
        self.parts: dict[str, Stateful] = {"model": self.model, "optimizer": optimizer}
        self.parts |= {name: part for name, part in optional.items() if part is not None}
        parameter = next(self.model.parameters(), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")

    def replicated(self) -> dict[str, Any]:
        """CPU copy of the parts' states, which are the same on every rank."""
        return {name: to_cpu(part.state_dict()) for name, part in self.parts.items()}

    def rank_own(self) -> dict[str, Any]:
        """CPU copy of this rank's generators and buffers."""
        return {"random": random_state(self.device), "buffers": to_cpu(persistent_buffers(self.model))}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore generators and buffers, and drop the gradients, on leaving."""
        own = self.rank_own()
        yield
        for parameter in self.model.parameters():
            parameter.grad = None
        restore_buffers(self.model, own["buffers"])
        restore_random_state(own["random"], self.device)


def unwrap(model: nn.Module) -> nn.Module:
    """User's module inside DistributedDataParallel and torch.compile: parameter names fit any wrapping."""
    ddp = nn.parallel.DistributedDataParallel
    while isinstance(inner := getattr(model, "module" if isinstance(model, ddp) else "_orig_mod", None), nn.Module):
        model = inner
    return model


def refuse_sharded(model: nn.Module, optimizer: Stateful) -> None:
    """Refuse FSDP, DTensor parameters and ZeroRedundancyOptimizer: no rank holds their state whole."""
    sharded = [name for name, parameter in model.named_parameters() if type(parameter.data).__name__ == "DTensor"]
    classes = {type(module).__name__ for module in model.modules()} | {type(optimizer).__name__}
    sharded = sharded or sorted(classes & {"FullyShardedDataParallel", "ZeroRedundancyOptimizer"})
    if sharded:
        raise ConfigurationError(
            f"{sharded[0]} is sharded over ranks, and this runtime saves replicated (DDP) states only; "
            "use DDP, or save with torch.distributed.checkpoint yourself"
        )


def to_cpu(value: Any) -> Any:
    """Copy of a nested state with every tensor cloned to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        copied = OrderedDict((key, to_cpu(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # module versions, which load_state_dict reads
            copied._metadata = value._metadata  # type: ignore[attr-defined]
            return copied
        return dict(copied)
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(to_cpu(item) for item in value)
    return value


def random_state(device: torch.device) -> dict[str, Any]:
    """State of this process's generators, as plain values and tensors."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = (str(name), keys.tolist(), int(position), int(has_gauss), float(cached))
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators that ``random_state`` read."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed every generator of this process."""
    random.seed(seed)
    torch.manual_seed(seed)  # every CUDA device as well
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of the model's state dict; batch statistics differ between DDP's ranks."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def restore_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Copy ``buffers`` into the model's own."""
    with torch.no_grad():
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
