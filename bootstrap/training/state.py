"""What must be saved so that training goes on as if nothing happened."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from bootstrap.training.errors import ConfigurationError


class Stateful(Protocol):
    """Anything with the two methods of torch's own classes: schedulers, scalers, moving averages."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take back what ``state_dict`` gave."""


def bare(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel and torch.compile, so that names fit any wrapping."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        inner = inner or getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def refuse_sharded(model: nn.Module, optimizer: Stateful) -> None:
    """Refuse states that no single rank holds whole; saving one rank's part would lose the others'.

    Raises:
        ConfigurationError: FSDP, DTensor parameters or ZeroRedundancyOptimizer.
    """
    sharded = [name for name, parameter in model.named_parameters() if type(parameter.data).__name__ == "DTensor"]
    kinds = {type(module).__name__ for module in model.modules()} | {type(optimizer).__name__}
    found = sharded[:1] or sorted(kinds & {"FullyShardedDataParallel", "ZeroRedundancyOptimizer"})
    if found:
        raise ConfigurationError(
            f"{found[0]} is sharded over ranks, and this runtime saves replicated (DDP) states only; "
            "sharded checkpoints are not built yet: use DDP, or save with torch.distributed.checkpoint yourself"
        )


def to_cpu(value: Any) -> Any:
    """Copy of a nested state with every tensor cloned to the CPU; later training steps do not change it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        copied = OrderedDict((key, to_cpu(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # module versions, which load_state_dict reads
            copied._metadata = value._metadata  # type: ignore[attr-defined]
            return copied
        return dict(copied)
    if isinstance(value, list):
        return [to_cpu(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_cpu(item) for item in value)
    return value


def random_state(device: torch.device) -> dict[str, Any]:
    """State of every generator this process uses, as plain values and tensors."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = (str(name), keys.tolist(), int(position), int(has_gauss), float(cached))
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put every generator back where ``random_state`` found it."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed every generator this process uses."""
    random.seed(seed)
    torch.manual_seed(seed)  # every CUDA device as well
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of the state dict: batch statistics differ between DDP's ranks."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in _buffers(model) if name in saved}


def restore_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Put back what ``own_buffers`` gave."""
    mine = dict(_buffers(model))
    with torch.no_grad():
        for name, buffer in buffers.items():
            mine[name].copy_(buffer)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, buffer) for name, buffer in model.named_buffers())
