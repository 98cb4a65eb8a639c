"""State that a checkpoint saves and a resume restores."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from bootstrap.training.errors import ConfigurationError
from bootstrap.training.facts import is_same_fact
from bootstrap.training.forms import AS_BEFORE, Form, ModuleForms, form_of, plain_name, ties_of, warn_of_untakeable
from bootstrap.training.index import SavedTensor
from bootstrap.training.optimizer_states import OptimizerStates, is_zero_redundancy
from bootstrap.training.tensors import (
    Geometry,
    empty_like_part,
    geometry_of,
    put_together,
    refuse_uncopyable,
    refuse_unreadable,
    take_apart,
)

MODEL = "model"
# Changes of a run that made none.
UNCHANGED: Mapping[str, Any] = {"born": {}, "trains": {}, "groups": {}}
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
        self._wrapped, self.model = model, unwrap(model)
        refuse_unsupported(self.model, optimizer)
        self._rank, self._world_size, self._save_frozen = rank, world_size, save_frozen
        parts: dict[str, Stateful | None] = {"optimizer": optimizer, **optional}
        self._all_parts = {name: unwrap_optimizer(part) for name, part in parts.items() if part is not None}
        for name, part in self._all_parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ConfigurationError(
                    f"{name} ({type(part).__name__}) has no state_dict and load_state_dict: give an object with both, "
                    "which returns and takes the state as tensors and plain values"
                )
        self._trained: set[str] = set()
        self._versions: dict[str, int] = {}
        self._said = ""
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
        """Find the parameters; again on entering a run and where it changed them, as in a replaced module."""
        reshard(self.model)
        for name, buffer in persistent_buffers(self.model).items():
            # Expanded: a resume could not write its elements.
            strides = buffer.stride() if buffer.layout is torch.strided else buffer.shape
            if any(size > 1 and not stride for size, stride in zip(buffer.shape, strides, strict=True)):
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[leaf] = buffer.clone(memory_format=torch.contiguous_format)
        self._parameters = {plain_name(name): parameter for name, parameter in self.model.named_parameters()}
        names = dict(self._parameters)
        for name, part in self._all_parts.items():
            if isinstance(part, nn.Module):
                names |= {f"{name}.{own}": parameter for own, parameter in part.named_parameters()}
        devices = {parameter.device for parameter in names.values() if parameter.device.type == "cuda"}
        if len(devices) > 1:  # copies from another device are not awaited, nor are its generators saved
            raise ConfigurationError(
                f"parameters are on {', '.join(sorted(map(str, devices)))}, and a rank has the state of one GPU: shard "
                "the model with fully_shard (FSDP2) over a process for each GPU (torchrun), or use a larger GPU"
            )
        self.device = devices.pop() if devices else torch.device("cpu")
        known = set(names.values())
        self.parts: dict[str, Stateful] = {}
        self.optimizers: dict[str, OptimizerStates] = {}
        for name, part in self._all_parts.items():
            is_known = has_torch_states(part) and all(
                parameter in known for group in part.param_groups for parameter in group["params"]
            )
            if has_torch_states(part) and (name == "optimizer" or is_known):
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

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of a checkpoint taken now: without frozen ones those that train, or did in this run."""
        self._trained |= {name for name, p in self._parameters.items() if p.requires_grad and not is_lazy(p)}
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if (self._save_frozen and not is_lazy(parameter))
            or name in self._trained
            or parameter._version != self._versions.get(name, parameter._version)
        }

    def norms(self) -> dict[str, float]:
        """Norm of each parameter of which every rank has the whole, which is the same on all."""
        trained = [(n, p.detach()) for n, p in self.saved_parameters().items() if p.requires_grad and p.itemsize > 1]
        plain = {n: p for n, p in trained if type(p) is torch.Tensor and p.is_floating_point()}
        return {name: float(torch.linalg.vector_norm(p, dtype=torch.float64)) for name, p in plain.items()}

    def snapshot(self) -> StateSnapshot:
        """Tensors and values to save."""
        if self._is_stale():
            self.resolve()
        later: dict[str, torch.Tensor] = {f"{MODEL}.{name}": tensor for name, tensor in self.saved_parameters().items()}
        now: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            tensors, values[name] = optimizer.tensors_and_values()
            later |= tensors
        for name, part in self.parts.items():
            reshard(part)
            values[name] = skeleton = take_apart(state_of(part), name, now)
            for key in persistent_buffers(part) if isinstance(part, nn.Module) else ():
                if isinstance(buffer := now.get(f"{name}.{key}"), torch.Tensor) and not isinstance(buffer, DTensor):
                    skeleton[key] = take_apart(now.pop(f"{name}.{key}"), f"{rank_prefix(self._rank)}{name}.{key}", now)
        self._sharded = {key: tensor.shape for key, tensor in now.items() if isinstance(tensor, DTensor)}
        if self._extra_states:
            states = {name: module.get_extra_state() for name, module in self._extra_states.items()}
            values[MODEL] = take_apart(states, f"{MODEL}.extra_state", now)
        for name, buffer in persistent_buffers(self.model).items():
            now[buffer_key(self._rank, name, buffer)] = buffer
        return StateSnapshot(later=later, now=now, values=values)

    def _is_stale(self) -> bool:
        """True where a parameter is new, replaced, or gathered by FSDP2."""
        named = {plain_name(name): id(parameter) for name, parameter in self.model.named_parameters()}
        is_other = named != {name: id(parameter) for name, parameter in self._parameters.items()}
        return is_other or any(optimizer.unknown() for optimizer in self.optimizers.values())

    def changes(self) -> dict[str, Any]:
        """Changes of the state's form in this run, as plain values, which ``restore`` makes again."""
        groups = {
            name: born
            for name, born in self._born_groups.items()
            if name in self.optimizers and self.optimizers[name].group_names() != born
        }
        sharded = sorted(self._sharded.keys() - self._born_sharded)
        schedules = {name: kind for name, part in self.parts.items() if (kind := schedule_of(part))}
        changes = self._forms.changes(warns=not self._rank)
        return {**changes, "groups": groups, "sharded": sharded, "schedules": schedules}

    def warn(self, changes: Mapping[str, Any]) -> None:
        """Say once why no new start of this script could take a checkpoint of now, where none could."""
        problem = self._forms.problem(None, changes["born"]) if changes["born"] else ""
        if new := [key for key in changes["sharded"] if self._like(key, self._sharded[key]) is None]:
            problem = f"{new[0]} is sharded over the ranks, and no parameter has its shape to lay it out like"
        for optimizer in self.optimizers.values():
            if lost := optimizer.unknown():
                problem = f"the optimizer has a parameter of shape {lost[0]} that the model has no longer"
        self._said = warn_of_untakeable(problem, self._said, self._rank) or self._said

    def look(self) -> None:
        """Warn, on rank 0, where a step has made what no new start could take, before a checkpoint has it.

        Gathered parameters stay so: a rank that reshards them in another step than its peers gathers alone.
        """
        if any(map(is_gathered, (self.model, *self.parts.values()))):
            return
        if self._is_stale():
            self.resolve()
        self.warn({"born": self._forms.born(), "sharded": ()})

    def _like(self, key: str, shape: tuple[int, ...]) -> DTensor | None:
        """Sharded parameter of a shape, whose layout a tensor that a part makes late has; that of its name first."""
        alike = [(name, p) for name, p in self._parameters.items() if isinstance(p, DTensor) and p.shape == shape]
        return min(alike, key=lambda pair: not key.endswith(f".{pair[0]}"), default=("", None))[1]

    def geometries(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Geometry]:
        """Geometry of each of a snapshot's tensors."""
        replicas = self._world_size
        holders_of = {
            rank_prefix(self._rank): 1,
            **{optimizer.prefix: optimizer.replicas for optimizer in self.optimizers.values()},
        }
        geometries = {}
        for key, tensor in tensors.items():
            refuse_uncopyable(key, tensor)
            holders = next((number for prefix, number in holders_of.items() if key.startswith(prefix)), replicas)
            geometries[key] = geometry_of(tensor, holders)
        return geometries

    def expected(self) -> dict[str, Geometry]:
        """Geometry of the tensors that the first checkpoint will hold, before the first step; notes the forms of now.

        ConfigurationError: values that no resume could read.
        """
        modules = {name: part for name, part in self.parts.items() if isinstance(part, nn.Module)}
        self._forms = ModuleForms({MODEL: self.model, **modules})
        self._born_groups = {name: optimizer.group_names() for name, optimizer in self.optimizers.items()}
        self._versions = {name: parameter._version for name, parameter in self._parameters.items()}
        snapshot = self.snapshot()
        self._born_sharded = self._sharded.keys()
        for name, values in snapshot.values.items():
            refuse_unreadable(name, values)
        geometries = self.geometries(snapshot.later)
        for optimizer in self.optimizers.values():
            if unknown := optimizer.unknown():
                raise ConfigurationError(
                    f"the optimizer has a parameter of shape {unknown[0]} that the model has not: a checkpoint would "
                    "lose it; make it a parameter of the model"
                )
            geometries |= optimizer.probe()
        return geometries | self.geometries(snapshot.now)

    def restore(
        self, values: Mapping[str, Any], saved: Mapping[str, SavedTensor], *, buffers_of: int,
        changes: Mapping[str, Any],
    ) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:  # fmt: skip
        """Tensors to fill by key, and a function to call when they are filled.

        ``buffers_of``: the rank whose buffers this rank takes. ``changes``: of the run that saved. ConfigurationError:
        the checkpoint is another model's.
        """
        schedules = changes.get("schedules", {})
        for name, part in self.parts.items():
            own = schedule_of(part)
            if not is_same_fact(own, schedules.get(name, own)):
                raise ConfigurationError(
                    f"{name} is {own or type(part).__name__}, and the checkpoint's {schedules[name]}: take the one of "
                    "before, or use a new store"
                )
        fill: dict[str, torch.Tensor] = {}
        templates: dict[str, torch.Tensor] = {}
        for name, part in self.parts.items():
            take_apart(state_of(part), name, templates)

        def new(key: str) -> torch.Tensor:
            like, shape, dtype = templates.get(key), saved[key].shape, saved[key].dtype
            if key in changes.get("sharded", ()):
                like = self._like(key, shape)
            fill[key] = empty_like_part(like, dtype) if isinstance(like, DTensor) else torch.empty(shape, dtype=dtype)
            return fill[key]

        states = {name: put_together(values[name], new) for name in self.parts}
        extra_states = put_together(values.get(MODEL, {}), new)
        if alone := sorted(extra_states.keys() ^ self._extra_states.keys()):
            raise ConfigurationError(
                f"the extra state of {alone[0] or MODEL} is in only one of the checkpoint and this model: {AS_BEFORE}"
            )
        self._take_forms(saved, states, changes, buffers_of)
        fill |= {f"{MODEL}.{name}": tensor for name, tensor in self._parameters.items() if f"{MODEL}.{name}" in saved}
        for name, buffer in persistent_buffers(self.model).items():
            fill[buffer_key(buffers_of, name, buffer)] = buffer
        for name, optimizer in self.optimizers.items():
            fill |= optimizer.restore(values[name], saved, self._born_groups[name], changes["groups"].get(name))

        def finish() -> None:
            for name, part in self.parts.items():
                try:
                    part.load_state_dict(states[name])
                except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                    if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
                        raise  # a device's
                    raise ConfigurationError(
                        f"{name} cannot take its state from the checkpoint: {error}. Make it as before, or use a new "
                        "store"
                    ) from error
            for name, module in self._extra_states.items():
                module.set_extra_state(extra_states[name])
            self._trained |= {name for name in self._parameters if f"{MODEL}.{name}" in saved}
            if self._forms.train(changes["trains"]):
                rebuild_reducer(self._wrapped)

        return fill, finish

    def _take_forms(
        self, saved: Mapping[str, SavedTensor], states: Mapping[str, Any], changes: Mapping[str, Any], buffers_of: int
    ) -> None:
        """Change the new modules as their run did; ConfigurationError where the model is another one."""
        own, born = f"{rank_prefix(buffers_of)}buffers.", changes["born"]
        forms: dict[str, Form] = {}
        for key, tensor in saved.items():
            if key.startswith(own):
                forms[f"{MODEL}.{key.removeprefix(own)}"] = form_of("buffer", tensor)
            elif key.startswith(f"{MODEL}.") and not key.startswith(f"{MODEL}.extra_state."):
                forms[key] = form_of("parameter", tensor)
        for name, part in self.parts.items():
            for key, value in states[name].items() if isinstance(part, nn.Module) else ():
                if isinstance(value, torch.Tensor):
                    full = plain_name(f"{name}.{key}")
                    forms[full] = form_of(self._forms.kinds.get(full, "buffer"), value)
        forms |= changes.get("ties", ties_of(self._forms.now()))
        may_lack = frozenset() if self._save_frozen else self._forms.frozen
        of_model = {key: form for key, form in forms.items() if key.startswith(f"{MODEL}.")}
        if problem := self._forms.problem(of_model, born, may_lack, part=MODEL):
            raise ConfigurationError(problem)
        if self._forms.take(forms, born, self.device):
            self.resolve()
            for optimizer in self.optimizers.values():
                optimizer.probe()

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


def reshard(part: object) -> None:
    """Let FSDP2 put the sharded parameters of a module in the place of gathered ones."""
    for module in part.modules() if isinstance(part, nn.Module) else ():
        method: Any = getattr(module, "reshard", None)  # fully_shard's, whose import takes long
        if method is not None:
            method()


def is_gathered(part: object) -> bool:
    """True where FSDP2 has gathered parameters of a module, or leaves some out."""
    modules = list(part.modules()) if isinstance(part, nn.Module) else []
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    is_whole = (parameter is not None and not isinstance(parameter, DTensor) for parameter in parameters)
    return any(hasattr(module, "reshard") for module in modules) and any(is_whole)


def rebuild_reducer(model: nn.Module) -> None:
    """Let DistributedDataParallel reduce the gradients of parameters that it was made without."""
    while isinstance(model, nn.Module):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.__setstate__(model.__getstate__())  # type: ignore[no-untyped-call]  # as after pickling: a new reducer
            return
        model = getattr(model, "_orig_mod", None)  # type: ignore[assignment]


def unwrap_optimizer(optimizer: Stateful) -> Stateful:
    """Torch's optimizer inside a wrapper of Accelerate or Lightning; others (Lookahead) have a state of their own."""
    while type(optimizer).__module__.partition(".")[0] in _STATELESS_WRAPPERS and isinstance(
        inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = inner
    return optimizer


def buffer_key(rank: int, name: str, buffer: torch.Tensor) -> str:
    """Key of a buffer: plain ones are a rank's own, as batch statistics differ between DDP's ranks."""
    owner = MODEL if isinstance(buffer, DTensor) else f"{rank_prefix(rank)}buffers"
    return f"{owner}.{plain_name(name)}"


def schedule_of(part: Any) -> str:
    """Class of a torch scheduler, those within it, its functions' names and code, as no state tells; else empty."""
    part = getattr(part, "scheduler", part)  # in accelerate's wrapper
    if not isinstance(part, torch.optim.lr_scheduler.LRScheduler):
        return ""
    functions = [getattr(function, "func", function) for function in getattr(part, "lr_lambdas", ())]
    inner = [schedule_of(own) for own in getattr(part, "_schedulers", ())]
    for function in functions:
        name, code = getattr(function, "__name__", type(function).__name__), getattr(function, "__code__", None)
        numbers = [value for value in code.co_consts if isinstance(value, int | float)] if code else []
        inner.append(f"{name}#{zlib.crc32(repr((code.co_code, numbers)).encode()):08x}" if code else name)
    return f"{type(part).__name__}({', '.join(inner)})"


def state_of(part: Stateful) -> Mapping[str, Any]:
    """State of a part; of a lazy module without the tensors that its first forward pass makes."""
    state = part.state_dict()
    if isinstance(part, nn.Module):
        for key in [key for key, value in state.items() if is_lazy(value)]:
            del state[key]  # type: ignore[attr-defined]
    return state


def rank_prefix(rank: int) -> str:
    """Beginning of the keys of a rank's own tensors."""
    return f"rank-{rank:05d}."


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
            "ZeroRedundancyOptimizer has overlap_with_ddp=True: parameters change in the backward pass; leave it False"
        )


def refuse_sharded(name: str, part: Stateful) -> None:
    """Refuse an optimizer with a state_dict of its own for sharded parameters: a resume has no form for its states."""
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else []
    if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        raise ConfigurationError(
            f"{name} ({type(part).__name__}) has a state_dict of its own, or parameters that the model has not, and "
            "a resume could not divide its states over ranks: use an optimizer of torch for the model's parameters, or "
            "DDP (gpufleet recommend --sharding ddp)"
        )


def refuse_inner_optimizer(optimizer: torch.optim.Optimizer, parts: Mapping[str, Stateful]) -> None:
    """Refuse an optimizer around another (SAM) whose states its state_dict leaves out."""
    if is_zero_redundancy(optimizer):
        return
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and not any(part is inner for part in parts.values()):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.{name} is an optimizer ({type(inner).__name__}), whose states a resume "
                "would lose: let the outer state_dict and load_state_dict have both"
            )


def random_state(device: torch.device) -> dict[str, Any]:
    """State of this process's generators, as plain values and tensors."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = (str(name), keys.tolist(), int(position), int(has_gauss), float(cached))
    if (gpu := generating_gpu(device)) is not None:
        state["cuda"] = torch.cuda.get_rng_state(gpu)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators that ``random_state`` read."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and (gpu := generating_gpu(device)) is not None:
        torch.cuda.set_rng_state(state["cuda"], gpu)


def generating_gpu(device: torch.device) -> int | torch.device | None:
    """GPU whose generator a model on ``device`` uses: with parameters offloaded to the CPU it computes there, too."""
    is_offloaded = device.type == "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if is_offloaded else device if device.type == "cuda" else None


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
        if name not in module._non_persistent_buffers_set and not is_lazy(buffer)
    }
