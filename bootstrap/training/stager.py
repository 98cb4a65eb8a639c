"""Copies of tensors to host memory, beside the training.

What only ``optimizer.step`` changes is copied on a stream of its own while the next forward and backward run; a hook
makes the optimizer wait for the end of the copy. Everything else is copied before training goes on, in stream order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Stager:
    """Copies of one rank. ``optimizer``: its step waits; without one (no hook), nothing is copied later."""

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer | None) -> None:
        self._device = device
        self._has_hook = optimizer is not None
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._begun: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None
        self._guarded: list[tuple[torch.Tensor, int]] = []
        self._torn = False
        self._waits = False
        self._handle: Any = None
        if optimizer is not None and self._stream is not None:
            self._handle = optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def copy(
        self, later: Sequence[tuple[torch.Tensor, torch.Tensor]], now: Sequence[tuple[torch.Tensor, torch.Tensor]],
        guarded: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Begin copies of (target, source): ``later`` may end until the next step of the optimizer, ``now`` may not.

        ``guarded`` are the whole tensors of ``later``: a change before the optimizer's step makes ``wait`` fail.
        """
        if self._stream is None or not self._has_hook:
            later, now, guarded = (), [*later, *now], ()
        self._torn = False
        with torch.no_grad():
            if self._stream is None:
                _copy(now)
                return
            _copy(now)
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._begun.record()
                _copy(later)
                self._done.record()
        self._guarded = [(tensor, tensor._version) for tensor in guarded]
        self._waits = True

    def _before_step(self, *_: Any) -> None:
        if self._waits and self._done is not None:
            self._waits = False
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._torn |= any(tensor._version != version for tensor, version in self._guarded)

    def finish_now(self) -> None:
        """Let the training wait for the copies, where no step of the optimizer will."""
        self._before_step()

    def wait(self) -> float:
        """Wait in the calling thread; seconds that the copy took on the GPU."""
        if self._done is None or self._begun is None:
            return 0.0
        started = time.monotonic()
        self._done.synchronize()
        return self._begun.elapsed_time(self._done) / 1e3 if self._stream is not None else time.monotonic() - started

    @property
    def is_torn(self) -> bool:
        """True where a tensor changed while it was copied, outside ``optimizer.step``."""
        return self._torn


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
