"""Copies of tensors to host memory, beside the training.

What only ``optimizer.step`` changes is copied on a stream of its own while the next forward and backward run; a hook
makes the optimizers wait for the end of the copy. Everything else is copied before training goes on, in stream order.

All copies are issued at once. A GPU has one engine for copies to the host, which takes them in the order of issue, so
a training that reads a value (loss.item(), the mask of transformers' forward) before the optimizer's step waits for the
copy, 0.13 s for 7 GiB. Issuing piece after piece from a thread was measured and is worse: each piece waits for Python's
lock, and the optimizer for the last piece (tests/benchmarks/results/checkpoint_2xh200_202611.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Stager:
    """Copies of one rank. ``optimizers``: their steps wait; without one (no hook), nothing is copied later."""

    def __init__(self, device: torch.device, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._begun: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None
        self._guarded: list[tuple[torch.Tensor, int]] = []
        self._waits = False
        self.is_torn = False
        """True where a tensor changed while it was copied, outside ``optimizer.step``."""
        self._handles: list[Any] = []
        if self._stream is not None:
            self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin(self, later: Pairs, now: Pairs, guarded: Sequence[torch.Tensor]) -> None:
        """Begin copies of (target, source): ``later`` may end until the next step of the optimizer, ``now`` may not.

        ``guarded`` are the whole tensors of ``later``: ``is_torn`` where one changes before the optimizer's step.
        """
        if not self._handles:
            later, now, guarded = (), [*later, *now], ()
        self.is_torn = False
        with torch.no_grad():
            _copy(now)
            if self._stream is not None:
                self._begun, self._done = _event(), _event()
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    self._begun.record()
                    _copy(later)
                    self._done.record()
        self._guarded = [(tensor, tensor._version) for tensor in guarded]
        self._waits = bool(self._handles)

    def finish(self) -> float:
        """Wait in the calling thread until the copies are over; their seconds on the GPU."""
        if self._begun is None or self._done is None:
            return 0.0
        self._done.synchronize()
        return float(self._begun.elapsed_time(self._done)) / 1e3

    def finish_first(self) -> None:
        """Let the training wait for the copies, where no step of the optimizer will."""
        self._before_step()

    def _before_step(self, *_: Any) -> None:
        if self._waits:
            self._waits = False
            if self._done is not None:
                torch.cuda.current_stream(self._device).wait_event(self._done)
            self.is_torn |= any(tensor._version != version for tensor, version in self._guarded)


def _event() -> torch.cuda.Event:
    """Event with a time, whose waiting thread sleeps."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _copy(pairs: Pairs) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
