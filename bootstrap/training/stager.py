"""Copies of tensors to host memory, beside the training.

What only ``optimizer.step`` changes is copied on a stream of its own while the next forward and backward run; a hook
makes the optimizer wait for the end of the copy. Everything else is copied before training goes on, in stream order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# A GPU has one engine for copies to the host, which takes them in the order of their issue: a training that reads a
# value between the save and the optimizer's step (loss.item(), or the mask of transformers' forward) would wait for all
# of a checkpoint. So the next piece is issued when the last one is over: 32 MiB take 0.7 ms over PCIe 5.
COPY_BYTES = 32 * 2**20

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Stager:
    """Copies of one rank. ``optimizer``: its step waits; without one (no hook), nothing is copied later."""

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer | None) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._later: Pairs = ()
        self._issued = threading.Event()
        self._done: torch.cuda.Event | None = None
        self._guarded: list[tuple[torch.Tensor, int]] = []
        self._waits = False
        self.is_torn = False
        """True where a tensor changed while it was copied, outside ``optimizer.step``."""
        self._handle: Any = None
        if optimizer is not None and self._stream is not None:
            self._handle = optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def begin(self, later: Pairs, now: Pairs, guarded: Sequence[torch.Tensor]) -> None:
        """Begin copies of (target, source): ``later`` may end until the next step of the optimizer, ``now`` may not.

        ``guarded`` are the whole tensors of ``later``: ``is_torn`` where one changes before the optimizer's step. Some
        thread must call ``finish``.
        """
        if self._handle is None:
            later, now, guarded = (), [*later, *now], ()
        self.is_torn = False
        with torch.no_grad():
            for target, source in now:
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._later = later
        self._issued.clear()
        self._guarded = [(tensor, tensor._version) for tensor in guarded]
        self._waits = self._handle is not None

    def finish(self) -> float:
        """Copy what ``begin`` left, piece after piece, in the calling thread; seconds on the GPU."""
        if self._stream is None:
            return 0.0
        begun, over = _event(), _event()
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                begun.record()
                begun.synchronize()
                issued = 0
                for target, source in _in_pieces(self._later):
                    target.copy_(source, non_blocking=True)
                    issued += source.nbytes
                    if issued >= COPY_BYTES:
                        over.record()
                        over.synchronize()
                        issued = 0
                over.record()
                self._done = over
        finally:
            self._later = ()
            self._issued.set()
        over.synchronize()
        return float(begun.elapsed_time(over)) / 1e3

    def finish_first(self) -> None:
        """Let the training wait for the copies, where no step of the optimizer will."""
        self._before_step()

    def _before_step(self, *_: Any) -> None:
        if self._waits:
            self._waits = False
            self._issued.wait()
            if self._done is not None:
                torch.cuda.current_stream(self._device).wait_event(self._done)
            self.is_torn |= any(tensor._version != version for tensor, version in self._guarded)


def _event() -> torch.cuda.Event:
    """Event with a time, whose waiting thread sleeps."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _in_pieces(pairs: Pairs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for target, source in pairs:
        elements = COPY_BYTES // source.element_size()
        if source.numel() <= elements or not source.is_contiguous():
            yield target, source
        else:
            pieces = (torch.split(tensor.view(-1), elements) for tensor in (target, source))
            yield from zip(*pieces, strict=True)
