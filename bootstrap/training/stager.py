"""Copies of tensors to host memory, beside the training.

What only ``optimizer.step`` changes is copied by a thread while the next forward and backward run; a hook makes the
optimizers wait for its end. Everything else is copied before training goes on, in stream order.

A GPU has one engine for copies to the host, which takes them in the order of issue: a training that reads a value
(loss.item(), the mask of transformers' forward) waits for all that were issued before. So the thread has one piece
in the queue at a time, and issues them in one call that does without Python's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
# Longest wait of a read is the copy of a piece: 0.6 ms.
PIECE_BYTES = 32 * 2**20


class Stager:
    """Copies of one rank. Steps of ``optimizers`` wait for them; without an optimizer all is copied at once."""

    def __init__(self, device: torch.device, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._later: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._is_copied = threading.Event()
        self._guarded: list[tuple[torch.Tensor, int]] = []
        self._waits = False
        self.is_torn = False
        """True where a tensor changed while it was copied, outside ``optimizer.step``."""
        self._handles = [optimizer.register_step_pre_hook(self.wait) for optimizer in optimizers]
        self.has_stepped = False
        """True once an optimizer has begun a step since the caller set it to False."""

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin(self, later: Pairs, now: Pairs, guarded: Sequence[torch.Tensor]) -> None:
        """Begin copies of (target, source): ``later`` may end until the next step of the optimizer, ``now`` may not.

        Another thread must call ``finish``. ``guarded`` are the whole tensors of ``later``: ``is_torn`` where one
        changes before the optimizer's step.
        """
        if self._stream is None or not self._handles:
            later, now, guarded = (), [*later, *now], ()
        self.is_torn = False
        with torch.no_grad():
            for target, source in now:
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Not by the thread: each operation of torch gives Python's lock away, and the thread waits for it.
        self._later = _pieces(later)
        self._is_copied.clear()
        self._guarded = [(tensor, tensor._version) for tensor in guarded]
        self._waits = self._stream is not None and bool(self._handles)

    def finish(self) -> None:
        """Copy ``later`` and wait in the calling thread until all copies are over."""
        if self._stream is None:
            return
        try:
            # A new thread is on GPU 0: leaving the stream alone would make this process a context there, of 0.3 s and
            # half a GiB for each of the other ranks.
            with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if self._later[0]:  # blocking, and without Python's lock
                    torch._foreach_copy_(*self._later)
                self._stream.synchronize()  # also for those that began in stream order
        finally:
            self._later = [], []
            self._is_copied.set()

    def wait(self, *_: Any) -> None:
        """Let the training wait for the copies, before a step of the optimizer or where none will come."""
        self.has_stepped = True
        if self._waits:
            self._waits = False
            self._is_copied.wait()
            self.is_torn |= any(tensor._version != version for tensor, version in self._guarded)


def _pieces(pairs: Pairs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Targets and sources, cut to ``PIECE_BYTES`` where they are larger and both contiguous."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for target, source in pairs:
        if target.nbytes > PIECE_BYTES and target.is_contiguous() and source.is_contiguous():
            elements = max(1, PIECE_BYTES // target.itemsize)
            targets += torch.split(target.view(-1), elements)
            sources += torch.split(source.view(-1), elements)
        else:
            targets.append(target)
            sources.append(source)
    return targets, sources
