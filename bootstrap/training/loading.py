"""Load of a checkpoint's tensors into a run of any layout: parallel reads, each chunk verified before it counts.

DCP's resharding tells which saved chunks overlap this rank's parts. A chunk that every rank needs is read by one rank
and broadcast; any other is read by each rank that needs it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bootstrap.training.checkpoint import Committed, Manifest, StoredCheckpoints
from bootstrap.training.errors import InvalidCheckpoint
from bootstrap.training.host_buffer import memory_of
from bootstrap.training.index import Chunk, Extent, SavedTensor
from bootstrap.training.planning import PIECE_BYTES
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.tensors import geometry_of, local_part

# Threads of one rank; a store's read_into divides large ranges further.
READ_THREADS = 8
_UNUSED, _ON_CPU, _ON_GPU = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Box of a saved chunk that goes to a box of a local tensor."""

    chunk: Chunk
    dtype: torch.dtype
    source: tuple[slice, ...]
    target: torch.Tensor


@dataclass(kw_only=True)
class ByteRange:
    """Neighbouring chunks of one file, read at once.

    Attributes:
        reader: rank that reads and broadcasts them; None: each rank that needs them reads them.
        copies: what this rank takes from them.
    """

    extents: list[Extent]
    reader: int | None
    is_on_gpu: bool
    copies: list[Copy] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size."""
        return sum(extent.bytes for extent in self.extents)

    def is_read_by(self, rank: int) -> bool:
        """True where this rank, ``rank``, reads them."""
        return bool(self.copies) if self.reader is None else self.reader == rank


def load_tensors(
    checkpoints: StoredCheckpoints,
    checkpoint: Committed[Manifest],
    fill: Mapping[str, torch.Tensor],
    *,
    buffer: torch.Tensor,
    device: torch.device,
    ranks: RankGroup,
) -> str:
    """Fill the tensors by key; the fault of a damaged checkpoint, else "". All ranks call it together.

    ``buffer``: host bytes that reads go to, as many at a time as fit.
    """
    tensors = checkpoint.manifest.index.tensors
    ranges = _ranges(tensors, _copies(tensors, fill), ranks)
    mine = [byte_range for byte_range in ranges if byte_range.is_read_by(ranks.rank)]
    problem = ""

    def read(byte_range: ByteRange, into: torch.Tensor) -> str:
        try:
            checkpoints.read_extents(checkpoint, byte_range.extents, memory_of(into))
        except InvalidCheckpoint as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="checkpoint-reader") as threads:
        reads = _read_ahead(mine, buffer, read, threads)
        for byte_range in ranges:
            data: torch.Tensor | None = None
            if byte_range.is_read_by(ranks.rank):
                data, fault = next(reads)
                problem = problem or fault
            if byte_range.reader is not None:
                target = device if byte_range.is_on_gpu else torch.device("cpu")
                if data is None:
                    data = torch.empty(byte_range.bytes, dtype=torch.uint8, device=target)
                else:
                    data = data.to(target, non_blocking=True)
                ranks.broadcast_tensor(data, byte_range.reader)
            if data is not None and not problem:
                _scatter(data, byte_range)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return problem


def _read_ahead(
    ranges: Sequence[ByteRange], buffer: torch.Tensor, read: Callable[[ByteRange, torch.Tensor], str],
    threads: ThreadPoolExecutor,
) -> Iterator[tuple[torch.Tensor, str]]:  # fmt: skip
    """Bytes of each range, and what is wrong with them; as many are read ahead as the buffer holds."""
    waiting = deque(ranges)
    while waiting:
        if buffer.is_pinned():
            torch.cuda.current_stream().synchronize()  # copies out of it are over
        at = 0
        running: list[tuple[torch.Tensor, Future[str]]] = []
        while waiting and (not running or at + waiting[0].bytes <= buffer.nbytes):
            byte_range = waiting.popleft()
            size = byte_range.bytes
            data = buffer[at : at + size] if size <= buffer.nbytes else torch.empty(size, dtype=torch.uint8)
            running.append((data, threads.submit(read, byte_range, data)))
            at += -(-size // 64) * 64  # offsets stay aligned for every dtype
        for data, future in running:
            yield data, future.result()


def _copies(tensors: Mapping[str, SavedTensor], fill: Mapping[str, torch.Tensor]) -> dict[Extent, list[Copy]]:
    """Copies to this rank's parts, by the chunk's place."""
    copies: dict[Extent, list[Copy]] = {}
    for key, tensor in fill.items():
        saved, part = tensors[key], local_part(tensor)
        if not part.numel():
            continue
        local = [geometry_of(tensor, 1).chunk]
        for item in create_read_items_for_chunk_list(key, saved.metadata, local):
            assert item.storage_index.index is not None
            chunk = saved.chunks[item.storage_index.index]
            copies.setdefault(chunk.extent, []).append(
                Copy(
                    chunk=chunk,
                    dtype=saved.dtype,
                    source=_box(item.storage_offsets, item.lengths),
                    target=part[_box(item.dest_offsets, item.lengths)],
                )
            )
    return copies


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def _ranges(
    tensors: Mapping[str, SavedTensor], copies: Mapping[Extent, list[Copy]], ranks: RankGroup
) -> list[ByteRange]:
    """Ranges in one order on all ranks: each file's chunks in order, joined up to 64 MiB where they have one reader."""
    extents = [chunk.extent for tensor in tensors.values() for chunk in tensor.chunks if chunk.extent.bytes]
    extents.sort(key=lambda extent: (extent.file, extent.at))
    need = torch.zeros(len(extents), dtype=torch.uint8)
    for number, extent in enumerate(extents):
        if extent in copies:
            need[number] = _ON_GPU if copies[extent][0].target.is_cuda else _ON_CPU
    needs = torch.stack(ranks.gather(need))
    shared = ((needs == needs[0]).all(dim=0) & (needs[0] != _UNUSED)).tolist() if ranks.world_size > 1 else None
    kinds = need.tolist()
    ranges: list[ByteRange] = []
    # The same on all ranks, unlike the ranges that one rank reads for itself.
    shared_ranges: dict[int, list[ByteRange]] = {}
    last: ByteRange | None = None
    previous = None
    for number, extent in enumerate(extents):
        is_shared = shared is not None and shared[number]
        kind = (extent.file, is_shared, kinds[number])
        joins = last is not None and kind == previous and last.extents[-1].at + last.extents[-1].bytes == extent.at
        if last is None or not joins or last.bytes + extent.bytes > PIECE_BYTES:
            last = ByteRange(extents=[], reader=None, is_on_gpu=kinds[number] == _ON_GPU)
            (shared_ranges.setdefault(extent.file, []) if is_shared else ranges).append(last)
        last.extents.append(extent)
        last.copies.extend(copies.get(extent, ()))
        previous = kind
    turns = itertools.zip_longest(*shared_ranges.values())  # the first of each file, then the second of each
    in_turn = [byte_range for turn in turns for byte_range in turn if byte_range is not None]
    load = [0] * ranks.world_size
    for byte_range in in_turn:
        byte_range.reader = load.index(min(load))
        load[byte_range.reader] += byte_range.bytes
    return [byte_range for byte_range in ranges if byte_range.copies] + in_turn


def _scatter(data: torch.Tensor, byte_range: ByteRange) -> None:
    """Copy a range's bytes to this rank's tensors."""
    first = byte_range.extents[0].at
    with torch.no_grad():
        for copy in byte_range.copies:
            at = copy.chunk.extent.at - first
            values = data[at : at + copy.chunk.extent.bytes].view(copy.dtype).view(copy.chunk.sizes)
            copy.target.copy_(values[copy.source], non_blocking=True)
