"""State that a checkpoint saves and a resume restores."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bootstrap.training.errors import ConfigurationError
from bootstrap.training.optimizer_states import OptimizerStates, Saved, is_zero_redundancy
from bootstrap.training.plain_values import refuse_unreadable
from bootstrap.training.tensors import Geometry, empty_like_part, geometry_of, put_together, take_apart

MODEL = "model"
# Packages whose wrappers of an optimizer add nothing to its state.
_STATELESS_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


class Stateful(Protocol):
    """An object with the two methods of torch's schedulers, scalers and moving averages."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the values of ``state_dict``."""


@dataclass(frozen=True, kw_only=True)
class StateSnapshot:
    """State of this rank after a step; the tensors are the live ones.

    Attributes:
        later: tensors that only the optimizer's step changes.
        now: tensors that a forward pass or the user may change.
        values: everything else by part, copied.
    """

    later: dict[str, torch.Tensor]
    now: dict[str, torch.Tensor]
    values: dict[str, Any]


class TrainingState:
    """Model, optimizer and optional parts, with this rank's generators and buffers."""

    def __init__(
        self, model: nn.Module, optimizer: Stateful, optional: Mapping[str, Stateful | None], *, rank: int = 0,
        world_size: int = 1, save_frozen: bool = True,
    ) -> None:  # fmt: skip
        self.model = unwrap(model)
        refuse_unsupported(self.model, optimizer)
        self._rank, self._world_size, self._save_frozen = rank, world_size, save_frozen
        parts: dict[str, Stateful | None] = {"optimizer": optimizer, **optional}
        self._all_parts = {name: unwrap_optimizer(part) for name, part in parts.items() if part is not None}
        self.resolve()

    @property
    def steppers(self) -> list[torch.optim.Optimizer]:
        """Optimizers with hooks; none where the first has none (a wrapper without torch's constructor)."""
        found = {
            name: part
            for name, part in self._all_parts.items()
            if isinstance(part, torch.optim.Optimizer)
            and getattr(type(part).step, "hooked", False)
            and "_optimizer_step_pre_hooks" in vars(part)
        }
        return list(found.values()) if "optimizer" in found else []

    def resolve(self) -> None:
        """Find the parameters; again on entering a run, as the user may have replaced a module since."""
        for module in self.model.modules():
            # fully_shard's method (its import takes long): gathered parameters may stand in place of the sharded ones.
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()
        for name, buffer in persistent_buffers(self.model).items():
            # Expanded: a resume could not write its elements.
            if any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[leaf] = buffer.clone(memory_format=torch.contiguous_format)
        self._parameters = {plain_name(name): parameter for name, parameter in self.model.named_parameters()}
        names = dict(self._parameters)
        for name, part in self._all_parts.items():
            if isinstance(part, nn.Module):
                names |= {f"{name}.{own}": parameter for own, parameter in part.named_parameters()}
        self.parts: dict[str, Stateful] = {}
        self.optimizers: dict[str, OptimizerStates] = {}
        for name, part in self._all_parts.items():
            if has_torch_states(part) and (name == "optimizer" or has_parameters_of(part, names.values())):
                refuse_inner_optimizer(part, self._all_parts)
                self.optimizers[name] = OptimizerStates(name, part, names, self._world_size)
            else:
                refuse_sharded(name, part)
                self.parts[name] = part
        self._extra_states = {
            plain_name(name): module
            for name, module in self.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        parameter = next(iter(self._parameters.values()), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")

    @property
    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of a checkpoint taken now: a loop may unfreeze some in a later step."""
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if self._save_frozen or parameter.requires_grad
        }

    @property
    def part_names(self) -> set[str]:
        """Names of what a checkpoint holds beside the model."""
        return {*self.parts, *self.optimizers}

    def snapshot(self) -> StateSnapshot:
        """Tensors and values to save."""
        later: dict[str, torch.Tensor] = {f"{MODEL}.{name}": tensor for name, tensor in self.saved_parameters.items()}
        now: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            tensors, values[name] = optimizer.tensors_and_values()
            later |= tensors
        for name, part in self.parts.items():
            values[name] = take_apart(part.state_dict(), name, now)
        if self._extra_states:
            states = {name: module.get_extra_state() for name, module in self._extra_states.items()}
            values[MODEL] = take_apart(states, f"{MODEL}.extra_state", now)
        for name, buffer in persistent_buffers(self.model).items():
            now[buffer_key(self._rank, name, buffer)] = buffer
        return StateSnapshot(later=later, now=now, values=values)

    def geometries(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Geometry]:
        """Geometry of each of a snapshot's tensors."""
        own_buffers, replicas = own_prefix(self._rank), self._world_size
        holders_of = {
            own_buffers: 1,
            **{optimizer.prefix: optimizer.replicas for optimizer in self.optimizers.values()},
        }
        geometries = {}
        for key, tensor in tensors.items():
            holders = next((number for prefix, number in holders_of.items() if key.startswith(prefix)), replicas)
            geometries[key] = geometry_of(tensor, holders)
        return geometries

    def expected(self) -> dict[str, Geometry]:
        """Geometry of the tensors that the first checkpoint will hold, before the first step.

        ConfigurationError: values that no resume could read.
        """
        snapshot = self.snapshot()
        for name, values in snapshot.values.items():
            refuse_unreadable(name, values)
        geometries = self.geometries(snapshot.later)
        for optimizer in self.optimizers.values():
            geometries |= optimizer.probe()
        return geometries | self.geometries(snapshot.now)

    def restore(
        self, values: Mapping[str, Any], saved: Mapping[str, Saved], *, buffers_of: int
    ) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
        """Tensors to fill by key, and a function to call when they are filled.

        ``buffers_of``: the rank whose buffers this rank takes. ConfigurationError: the checkpoint is another model's.
        """
        wanted = self.saved_parameters
        fill: dict[str, torch.Tensor] = {
            f"{MODEL}.{name}": tensor
            for name, tensor in self._parameters.items()
            if name in wanted or f"{MODEL}.{name}" in saved
        }
        for name, buffer in persistent_buffers(self.model).items():
            fill[buffer_key(buffers_of, name, buffer)] = buffer
        refuse_other_model(fill, saved)
        for name, optimizer in self.optimizers.items():
            fill |= optimizer.restore(values[name], saved)
        templates: dict[str, torch.Tensor] = {}
        for name, part in self.parts.items():
            take_apart(part.state_dict(), name, templates)

        def new(key: str) -> torch.Tensor:
            like, shape, dtype = templates.get(key), saved[key].shape, saved[key].dtype
            fill[key] = empty_like_part(like, dtype) if isinstance(like, DTensor) else torch.empty(shape, dtype=dtype)
            return fill[key]

        states = {name: put_together(values[name], new) for name in self.parts}
        extra_states = put_together(values.get(MODEL, {}), new)

        def finish() -> None:
            for name, part in self.parts.items():
                part.load_state_dict(states[name])
            for name, module in self._extra_states.items():
                module.set_extra_state(extra_states[name])

        return fill, finish

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore generators and buffers, and drop the gradients, on leaving."""
        generators = random_state(self.device)
        buffers = {name: buffer.detach().clone() for name, buffer in persistent_buffers(self.model).items()}
        yield
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in buffers.items():
                self.model.get_buffer(name).copy_(buffer)
        restore_random_state(generators, self.device)


def unwrap(model: nn.Module) -> nn.Module:
    """User's module inside DistributedDataParallel and torch.compile: parameter names fit any wrapping."""
    ddp = nn.parallel.DistributedDataParallel
    while isinstance(inner := getattr(model, "module" if isinstance(model, ddp) else "_orig_mod", None), nn.Module):
        model = inner
    return model


def unwrap_optimizer(optimizer: Stateful) -> Stateful:
    """Torch's optimizer inside a wrapper of Accelerate or Lightning; others (Lookahead) have a state of their own."""
    while type(optimizer).__module__.partition(".")[0] in _STATELESS_WRAPPERS and isinstance(
        inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = inner
    return optimizer


def plain_name(name: str) -> str:
    """Parameter name as in torch's state dicts, without the wrappers of torch.compile and activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def buffer_key(rank: int, name: str, buffer: torch.Tensor) -> str:
    """Key of a buffer: plain ones are a rank's own, as batch statistics differ between DDP's ranks."""
    return f"{MODEL}.{plain_name(name)}" if isinstance(buffer, DTensor) else f"{own_prefix(rank)}{plain_name(name)}"


def own_prefix(rank: int) -> str:
    """Beginning of the keys of a rank's own buffers."""
    return f"rank-{rank:05d}.buffers."


def has_torch_states(optimizer: Stateful) -> TypeGuard[torch.optim.Optimizer]:
    """True where the optimizer's state is what torch's own state_dict says."""
    return isinstance(optimizer, torch.optim.Optimizer) and (
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict or is_zero_redundancy(optimizer)
    )


def refuse_unsupported(model: nn.Module, optimizer: Stateful) -> None:
    """Refuse FSDP1 and an optimizer that steps within DDP's backward pass."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigurationError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters fit no other layout; use "
            "fully_shard (FSDP2, torch.distributed.fsdp) or DistributedDataParallel"
        )
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ConfigurationError(
            "ZeroRedundancyOptimizer has overlap_with_ddp=True, so parameters change during the backward pass, where "
            "no checkpoint can be taken; leave it False"
        )


def has_parameters_of(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """True where all parameters of ``optimizer`` are among these."""
    known = set(parameters)
    return all(parameter in known for group in optimizer.param_groups for parameter in group["params"])


def refuse_sharded(name: str, part: Stateful) -> None:
    """Refuse an optimizer with a state_dict of its own for sharded parameters: a resume has no form for its states."""
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else []
    if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        raise ConfigurationError(
            f"{name} ({type(part).__name__}) has a state_dict of its own, or parameters that the model has not, and "
            "its parameters are sharded over ranks: a resume could not divide its states. Use an optimizer of torch "
            "for the model's parameters, or train with DistributedDataParallel (gpufleet recommend --sharding ddp)"
        )


def refuse_inner_optimizer(optimizer: torch.optim.Optimizer, parts: Mapping[str, Stateful]) -> None:
    """Refuse an optimizer around another (SAM) whose states its state_dict leaves out."""
    if is_zero_redundancy(optimizer):
        return
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and not any(part is inner for part in parts.values()):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.{name} is an optimizer ({type(inner).__name__}), and the state_dict of "
                f"{type(optimizer).__name__} has none of its states: a resume would lose them. Let its state_dict and "
                "load_state_dict have both"
            )


def refuse_other_model(fill: Mapping[str, torch.Tensor], saved: Mapping[str, Saved]) -> None:
    """Refuse a checkpoint whose parameters have other names, shapes or types."""
    model = {key for key in saved if key.startswith(f"{MODEL}.") and not key.startswith(f"{MODEL}.extra_state.")}
    missing = sorted(set(fill) - set(saved)) or sorted(model - set(fill))
    if missing:
        raise ConfigurationError(
            f"{missing[0]} is in only one of the checkpoint and this model ({len(missing)} such tensors): build the "
            "same model as before, or use a new store"
        )
    for key, tensor in fill.items():
        if tuple(tensor.shape) != saved[key].shape:
            raise ConfigurationError(
                f"size mismatch: {key} has shape {tuple(tensor.shape)}, and the checkpoint {saved[key].shape}: build "
                "the same model as before, or use a new store"
            )
        if tensor.dtype != saved[key].dtype:
            raise ConfigurationError(
                f"{key} is {tensor.dtype}, and the checkpoint's {saved[key].dtype}: the optimizer's states would not "
                "fit; build the model in the type of before, or use a new store"
            )


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
    """Buffers of the model's state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
