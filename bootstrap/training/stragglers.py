"""Slowest rank, by what each rank does before the first exchange of a step.

Step times name no rank: in every exchange all ranks wait for the slowest. So two parts are timed: from the step's begin
to the forward pass (input, host) and the forward pass. Megatron-LM's detector times such sections by events of the
device too (https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/README_STRAGGLER.md). Under FSDP2 the forward
pass waits for gathered parameters: there, some of its layers are timed after their gathering. Tensor and context ranks
exchange within a forward pass, so the named rank stands for all ranks of its group.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import OrderedDict, deque
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bootstrap.contract.ledger import SLOW_SHARE, Straggler
from bootstrap.training.rank_group import RankGroup

logger = logging.getLogger(__name__)

# Between two comparisons, each of one small gather. The first minute is left out: ranks compile and fill their caches.
WINDOW_S = 60.0
# Layers to time under FSDP2; a pair of events takes 10 µs of the host.
LAYERS = 4
INPUT, FORWARD = 0, 1


class Stragglers:
    """Times this rank's parts of each step, by hooks that no copy or pickle of the model takes along."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._step_from: Any = None
        self._layer_from: Any = None
        self._spans: deque[tuple[int, Any, Any]] = deque()
        self._parts_s = [0.0, 0.0]
        self._steps = 0
        self._since, self._has_warmed, self._named = time.monotonic(), False, -1
        self._handles: list[Any] = []
        self._modules: list[nn.Module] = []

    def __reduce__(self) -> tuple[type[Stragglers], tuple[()]]:
        return Stragglers, ()  # torch.fx copies the hooks of a graph by themselves

    def watch(self, model: nn.Module, device: torch.device) -> None:
        """Put hooks on ``model``."""
        self._device, self._since = device, time.monotonic()
        self._handles = [model.register_forward_pre_hook(self._end_input, prepend=True)]
        layers = _timed_layers(model)
        for layer in layers:
            self._handles.append(layer.register_forward_pre_hook(self._begin_layer))
            self._handles.append(layer.register_forward_hook(self._end_layer, prepend=True))
        self._modules = [model, *layers]
        for module in self._modules:  # pickle and copy take it from the instance
            vars(module)["__getstate__"] = partial(_state_without_hooks, module)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            vars(module).pop("__getstate__", None)

    def begin_step(self) -> None:
        """Mark that a step is about to begin."""
        if self._handles:
            self._collect()
            self._steps += 1
            self._step_from = self._mark()

    @property
    def is_due(self) -> bool:
        """True where this rank's window is over; then all ranks compare."""
        return self._steps > 0 and time.monotonic() - self._since >= WINDOW_S

    def compare(self, ranks: RankGroup) -> Straggler | None:
        """Find the slowest rank of the window against the median one, on rank 0; collective."""
        self._collect()
        steps, now = max(1, self._steps), time.monotonic()
        host = os.environ.get("GPUFLEET_INSTANCE_ID") or socket.gethostname()
        by_rank = ranks.gather_to_first((host, [part_s / steps for part_s in self._parts_s]))
        step_s, has_warmed = (now - self._since) / steps, self._has_warmed
        self._since, self._steps, self._parts_s, self._has_warmed = now, 0, [0.0, 0.0], True
        if not by_rank or not has_warmed:
            return None
        usual = [median_low(parts[part] for _, parts in by_rank) for part in (INPUT, FORWARD)]
        found = []
        for rank, (name, parts) in enumerate(by_rank):
            # The backward pass is slower by the same factor.
            compute = parts[FORWARD] / usual[FORWARD] - 1 if usual[FORWARD] > 0 else 0.0
            waits = (parts[INPUT] - usual[INPUT]) / step_s
            found += [
                Straggler(rank=rank, host=name, slower=round(slower, 3), part=part)
                for part, slower in (("compute", compute), ("input", waits))
            ]
        slowest = max(found, key=lambda entry: entry.slower)
        if slowest.slower > SLOW_SHARE and slowest.rank != self._named:
            logger.warning("%s", slowest)
        self._named = slowest.rank if slowest.slower > SLOW_SHARE else -1
        return slowest

    def _mark(self) -> Any:
        """Now, on the host or in the device's queue; None where a CUDA graph is recorded."""
        if self._device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _end(self, part: int, start: Any) -> None:
        if start is not None and (end := self._mark()) is not None:
            self._spans.append((part, start, end))

    def _collect(self) -> None:
        """Add up the parts that the device has finished."""
        on_device = self._device.type == "cuda"
        while self._spans:
            part, start, end = self._spans[0]
            # Both are asked: a forward pass on another stream may end before the mark on the step's own stream.
            if on_device and not (start.query() and end.query()):
                return
            self._spans.popleft()
            self._parts_s[part] += start.elapsed_time(end) / 1000 if on_device else end - start

    # In a pass that a user's torch.compile traces, the hooks are nothing: a clock would cut its graph.
    def _end_input(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._end(INPUT, self._step_from)
        self._step_from = None

    def _begin_layer(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        is_training = self._handles and module.training and torch.is_grad_enabled()
        self._layer_from = self._mark() if is_training else None

    def _end_layer(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._end(FORWARD, self._layer_from)
        self._layer_from = None


def _state_without_hooks(module: nn.Module) -> Any:
    """State of a module for pickle and copy; its reader may not have this package."""
    state: Any = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != "__getstate__"}
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = state[name].items()
            state[name] = OrderedDict(
                (key, hook) for key, hook in hooks if not isinstance(getattr(hook, "__self__", None), Stragglers)
            )
    return state


def _timed_layers(model: nn.Module) -> list[nn.Module]:
    """Modules whose forward pass exchanges nothing: the whole model, or innermost modules of FSDP2."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        # DDP sends rank 0's buffers before its module's pass. A hook would become a part of a compiled module.
        inner: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        return [inner if inner._compiled_call_impl is None else model]
    if any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()):
        return []  # a hook would become a part of the compiled layer
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    layers: list[nn.Module] = [
        module
        for module in sharded
        if module is not model and not any(isinstance(part, FSDPModule) for part in list(module.modules())[1:])
    ]
    return layers[:: max(1, len(layers) // LAYERS)][:LAYERS]
