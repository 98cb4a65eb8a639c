"""Prefetching loader: micro-batches of the coming steps are fetched and copied to the device while the step runs."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch.utils.data import DataLoader

from bootstrap.contract.trainer import loader_workers
from bootstrap.trainer.data.dataset import Batch, Dataset, Work

# Micro-batches fetched ahead: one hides the copy, two more even out slow reads.
DEPTH = 3
WORKER_BATCHES = 4

Item = tuple[Batch, torch.cuda.Event | None]


class Loader(AbstractContextManager["Loader"]):
    """Micro-batches of one rank, in the order of the steps.

    Args:
        sample_indices: the rank's samples of a step, ``SpotTolerantRun.sample_indices``.
        micro_batch: samples of one forward pass.
    """

    def __init__(
        self, dataset: Dataset, sample_indices: Callable[[int], torch.Tensor], *, micro_batch: int, device: torch.device
    ) -> None:
        self._dataset = dataset
        self._sample_indices = sample_indices
        self._micro_batch = micro_batch
        self._device = device
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._workers = loader_workers(len(os.sched_getaffinity(0)), ranks) if dataset.needs_workers else 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread: ThreadPoolExecutor | None = None
        self._items: Iterator[Item] = iter(())
        self._ahead: deque[Future[Item]] = deque()
        self._next_step = -1
        self.wait_s = 0.0
        """Seconds that steps waited for data so far; a growing share of the step time names a loader-bound run."""

    def step(self, step: int) -> Iterator[Batch]:
        """Micro-batches of ``step`` as model inputs; steps after one another are fetched ahead."""
        if self._thread is None or step != self._next_step:
            self.close()
            self._thread = ThreadPoolExecutor(1, "data-loader")
            self._items = self._device_batches(self._work_from(step))
            self._ahead.extend(self._thread.submit(next, self._items) for _ in range(DEPTH))
        count = -(-len(self._sample_indices(step)) // self._micro_batch)
        thread, self._next_step = self._thread, step + 1
        for _ in range(count):
            started = time.perf_counter()
            raw, ready = self._ahead.popleft().result()
            self._ahead.append(thread.submit(next, self._items))
            self.wait_s += time.perf_counter() - started
            if ready is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(ready)
                for tensor in raw.values():
                    tensor.record_stream(current)
            yield self._dataset.finish(raw)

    def close(self) -> None:
        """Stop fetching, before the process ends at the latest; ``step`` starts again."""
        if self._thread is not None:
            for item in self._ahead:
                item.cancel()
            self._ahead.clear()
            # A generator, whose end is that of the worker processes: in its own thread, whose stream it has set.
            self._thread.submit(self._items.close).result()  # type: ignore[attr-defined]
            self._thread.shutdown()
            self._thread = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work_from(self, step: int) -> Iterator[Work]:
        while True:
            for indices in torch.split(self._sample_indices(step), self._micro_batch):
                yield step, indices
            step += 1

    def _device_batches(self, work: Iterator[Work]) -> Iterator[Item]:
        """Batches on the device, each with the event after its copy."""
        if self._workers:
            raws = _worker_batches(self._dataset, work, self._workers, pin=self._stream is not None)
        else:
            raws = (self._dataset.fetch(indices, step=step, device=self._device) for step, indices in work)
        if self._stream is None:
            yield from ((raw, None) for raw in raws)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for raw in raws:
                copied = {
                    name: (tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()).to(
                        self._device, non_blocking=True
                    )
                    for name, tensor in raw.items()
                }
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
                yield copied, event


def _worker_batches(dataset: Dataset, work: Iterator[Work], workers: int, *, pin: bool) -> Iterator[Batch]:
    # A fork server has neither CUDA nor threads; a fork of this process would copy locks that its threads hold.
    torch.multiprocessing.set_forkserver_preload(["bootstrap.trainer.data.images", "torchvision.transforms.v2"])
    loader = DataLoader(
        dataset,
        sampler=work,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=WORKER_BATCHES,
        pin_memory=pin,
        multiprocessing_context="forkserver",
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # its own: the default would shift the training's random numbers
    )
    yield from loader


def _ignore_signals(_: int) -> None:
    # A notice's signal reaches the whole process group, and the last steps before the save still need data.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
