"""Resume: load the newest valid checkpoint into a run of any layout, each chunk verified before it counts.

DCP's resharding tells which saved chunks overlap this rank's parts. A chunk that every rank needs is read by one rank
and broadcast; any other is read by each rank that needs it.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bootstrap.training.checkpoint import Committed, Manifest, StoredCheckpoints
from bootstrap.training.checksum import matches
from bootstrap.training.data_ranks import DataRanks
from bootstrap.training.errors import ConfigurationError, InvalidCheckpoint
from bootstrap.training.host_buffer import memory_of
from bootstrap.training.index import Chunk, SavedTensor
from bootstrap.training.planning import PIECE_BYTES
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.state import MODEL, UNCHANGED, TrainingState, random_state, seed_everything
from bootstrap.training.stores.base import in_threads
from bootstrap.training.tensors import from_bytes, geometry_of, local_part

logger = logging.getLogger(__name__)

# Threads of one rank; a store's read_into divides large ranges further.
READ_THREADS = 8
_UNUSED, _ON_CPU, _ON_GPU = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Load of checkpoints into one run. ``buffer``: host bytes for the reads."""

    checkpoints: StoredCheckpoints
    state: TrainingState
    order: SampleOrder
    ranks: RankGroup
    data_ranks: DataRanks
    buffer: torch.Tensor
    beat: Callable[[str], None]

    def newest(self) -> tuple[int, Mapping[str, Any]] | None:
        """Load the newest checkpoint that is valid on every rank: its step and the generators' state; None without one.

        CheckpointError: every checkpoint is damaged. ConfigurationError: the checkpoint belongs to another run.
        """
        committed, broken = self.ranks.broadcast(self.checkpoints.scan() if self.ranks.rank == 0 else ([], []))
        for checkpoint in committed:
            self.beat(f"loading {checkpoint.prefix}")
            problems, resumed = self._load(checkpoint)
            if resumed is not None:
                return resumed
            broken.append(f"{checkpoint.prefix}: {problems}")
            if self.ranks.rank == 0:
                logger.error("checkpoint %s is not valid, trying an older one: %s", checkpoint.prefix, problems)
        self.checkpoints.refuse_damaged(broken)
        logger.info("no checkpoint in %s: starting at step 0", self.checkpoints.store.uri)
        return None

    def _load(self, checkpoint: Committed[Manifest]) -> tuple[str, tuple[int, Mapping[str, Any]] | None]:
        """Load a checkpoint: the problem of any rank, or the resumed state."""
        manifest = checkpoint.manifest
        problem, values = self.ranks.broadcast(self._values(checkpoint) if self.ranks.rank == 0 else ("", []))
        if problem:
            return problem, None
        # Generators, buffers and plain values are a rank's own, and a rank may have another's samples now.
        places = self.ranks.gather(astuple(self.data_ranks))
        same_ranks = places == [value.get("data_rank") for value in values]
        buffers_of = self.ranks.rank if same_ranks else 0
        parts = merged([value["parts"] for value in values], self.state.optimizers, buffers_of)
        self._refuse_other_run(checkpoint, set(parts))
        fill, finish = self.state.restore(
            parts, manifest.index.tensors, buffers_of=buffers_of, changes=values[buffers_of].get("changes", UNCHANGED)
        )
        fault = load_tensors(
            self.checkpoints, checkpoint, fill, buffer=self.buffer, device=self.state.device, ranks=self.ranks
        )
        problems = "; ".join(answer for answer in self.ranks.gather(fault) if answer)
        if problems:
            return problems, None
        finish()
        random = values[self.ranks.rank]["random"] if same_ranks else self._new_generators(manifest)
        logger.info("resuming at step %d from %s", manifest.step, checkpoint.prefix)
        return "", (manifest.step, random)

    def _refuse_other_run(self, checkpoint: Committed[Manifest], parts: set[str]) -> None:
        place, own = f"{self.checkpoints.store.uri}/{checkpoint.prefix}", {*self.state.parts, *self.state.optimizers}
        if different := self.checkpoints.differences(checkpoint.manifest):
            raise ConfigurationError(
                f"{place} is of another run: {different}. Set it back, or use a new store (bootstrap.trainer begins "
                "one from weights by --weights)"
            )
        if parts - {MODEL} != own:
            raise ConfigurationError(
                f"{place} holds {sorted(parts)}, and this run has {sorted(own)}: give the same scheduler, scaler and "
                "extra as before"
            )

    def _values(self, checkpoint: Committed[Manifest]) -> tuple[str, list[Any]]:
        """Read the plain values: their problem, or the values by rank."""

        def read(chunk: Any) -> Any:
            data = bytearray(chunk.bytes)
            self.checkpoints.read_chunks(checkpoint, [chunk], memoryview(data))
            return from_bytes(data)

        try:
            return "", in_threads(read, checkpoint.manifest.index.values)
        except InvalidCheckpoint as error:
            return str(error), []

    def _new_generators(self, manifest: Manifest) -> Mapping[str, Any]:
        """Generators of a rank that saved none; ranks with the same samples draw the same numbers."""
        logger.warning(
            "checkpoint of %d ranks, now %d, or of another layout: same samples a step, new random generators, plain "
            "values of extra as rank 0 had them (a data loader's place)",
            manifest.world_size,
            self.ranks.world_size,
        )
        seed_everything(((self.order.seed * 1_000_003 + manifest.step) * 1_000_003 + self.data_ranks.rank) % 2**63)
        return random_state(self.state.device)


def merged(parts_by_rank: list[dict[str, Any]], optimizers: Iterable[str], rank: int) -> dict[str, Any]:
    """Parts of ``rank``, with the optimizers' states of every rank: ZeroRedundancyOptimizer divides them."""
    parts = parts_by_rank[rank]
    for name in optimizers:
        for other in parts_by_rank:
            if isinstance(other.get(name, {}).get("state"), dict):
                parts[name]["state"] = other[name]["state"] | parts[name]["state"]
    return parts


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

    chunks: list[Chunk]
    reader: int | None
    is_on_gpu: bool
    copies: list[Copy] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size."""
        return sum(chunk.bytes for chunk in self.chunks)

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
            checkpoints.read_chunks(checkpoint, byte_range.chunks, memory_of(into))
        except InvalidCheckpoint as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="checkpoint-reader") as threads:
        kept = _kept([byte_range for byte_range in mine if byte_range.chunks[0].file == ranks.rank], buffer, threads)
        others = [byte_range for byte_range in mine if byte_range.chunks[0] not in kept]
        reads = _read_ahead(others, buffer[:0] if kept else buffer, read, threads)
        for byte_range in ranges:
            data = kept.get(byte_range.chunks[0])
            if data is None and byte_range.is_read_by(ranks.rank):
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


def _kept(ranges: Sequence[ByteRange], buffer: torch.Tensor, threads: ThreadPoolExecutor) -> dict[Chunk, torch.Tensor]:
    """Bytes by first chunk where the buffer has all ``ranges`` of a file, from a killed process (host_buffer.py)."""
    memory = memory_of(buffer)

    def is_there(chunk: Chunk) -> bool:
        view = memory[chunk.at : chunk.at + chunk.bytes]
        return len(view) == chunk.bytes and matches(view, chunk.checksum)

    chunks = [chunk for byte_range in ranges for chunk in byte_range.chunks]
    if not (chunks and is_there(chunks[0]) and all(threads.map(is_there, chunks))):
        return {}
    firsts = {byte_range.chunks[0]: byte_range.bytes for byte_range in ranges}
    return {chunk: buffer[chunk.at : chunk.at + size] for chunk, size in firsts.items()}


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


def _copies(tensors: Mapping[str, SavedTensor], fill: Mapping[str, torch.Tensor]) -> dict[Chunk, list[Copy]]:
    """Copies to this rank's parts, by the chunk's place."""
    copies: dict[Chunk, list[Copy]] = {}
    for key, tensor in fill.items():
        saved, part = tensors[key], local_part(tensor)
        if not part.numel():
            continue
        local = [geometry_of(tensor, 1).chunk]
        for item in create_read_items_for_chunk_list(key, saved.metadata, local):
            assert item.storage_index.index is not None
            chunk = saved.chunks[item.storage_index.index]
            copies.setdefault(chunk, []).append(
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
    tensors: Mapping[str, SavedTensor], copies: Mapping[Chunk, list[Copy]], ranks: RankGroup
) -> list[ByteRange]:
    """Ranges in one order on all ranks: each file's chunks in order, joined up to 64 MiB where they have one reader."""
    chunks = [chunk for tensor in tensors.values() for chunk in tensor.chunks if chunk.bytes]
    chunks.sort(key=lambda chunk: (chunk.file, chunk.at))
    need = torch.zeros(len(chunks), dtype=torch.uint8)
    for number, chunk in enumerate(chunks):
        if chunk in copies:
            need[number] = _ON_GPU if copies[chunk][0].target.is_cuda else _ON_CPU
    needs = torch.stack(ranks.gather(need))
    shared = ((needs == needs[0]).all(dim=0) & (needs[0] != _UNUSED)).tolist() if ranks.world_size > 1 else None
    kinds = need.tolist()
    ranges: list[ByteRange] = []
    # The same on all ranks, unlike the ranges that one rank reads for itself.
    shared_ranges: dict[int, list[ByteRange]] = {}
    last: ByteRange | None = None
    previous = None
    for number, chunk in enumerate(chunks):
        is_shared = shared is not None and shared[number]
        kind = (chunk.file, is_shared, kinds[number])
        joins = last is not None and kind == previous and last.chunks[-1].at + last.chunks[-1].bytes == chunk.at
        if last is None or not joins or last.bytes + chunk.bytes > PIECE_BYTES:
            last = ByteRange(chunks=[], reader=None, is_on_gpu=kinds[number] == _ON_GPU)
            (shared_ranges.setdefault(chunk.file, []) if is_shared else ranges).append(last)
        last.chunks.append(chunk)
        last.copies.extend(copies.get(chunk, ()))
        previous = kind
    in_turn = []
    for number, turn in enumerate(itertools.zip_longest(*shared_ranges.values())):  # first the first of each file
        for byte_range in filter(None, turn):
            # A rank reads its own file, which its memory may still hold; more ranks than files take turns.
            byte_range.reader = (byte_range.chunks[0].file + number * (1 + chunks[-1].file)) % ranks.world_size
            in_turn.append(byte_range)
    return [byte_range for byte_range in ranges if byte_range.copies] + in_turn


def _scatter(data: torch.Tensor, byte_range: ByteRange) -> None:
    """Copy a range's bytes to this rank's tensors."""
    first = byte_range.chunks[0].at
    with torch.inference_mode():  # in which tensors made so can be written, too
        for copy in byte_range.copies:
            at = copy.chunk.at - first
            values = data[at : at + copy.chunk.bytes].view(copy.dtype).view(copy.chunk.sizes)
            copy.target.copy_(values[copy.source], non_blocking=True)
