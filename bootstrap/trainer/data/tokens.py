"""Token files: memory-mapped arrays of token ids, cut into samples of ``seq_len`` tokens.

Read as they are: nanoGPT's train.bin (uint16, no header), llm.c's .bin (1,024-byte header), Megatron-LM's .bin with its
.idx, and the .bin with a .json sidecar (dtype, tokens) that ``pack.py`` writes. Samples follow each other in the file
without regard to documents, whose end is a token of its own.
"""

from __future__ import annotations

import bisect
import json
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bootstrap.trainer.data.dataset import Batch, Dataset
from bootstrap.trainer.data.objectives import Objective
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.facts import digest

# https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py (read 2026-11): 256 int32, the first the magic.
LLMC_HEADER_BYTES = 1024
LLMC_DTYPES: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
# https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py (read 2026-11).
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}
# After magic (9 bytes), version (uint64) and dtype code (uint8): sequences and documents (uint64), then the sequences'
# lengths in tokens (int32) and places in bytes (int64).
MEGATRON_HEAD = struct.Struct("<9sQBQQ")
# Numbers that tell the upper halves of 32-bit tokens from a text of 16-bit ones.
HALVES = 64
SIDECAR_DTYPES: dict[str | None, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def map_tokens(path: Path) -> npt.NDArray[np.integer]:
    """Memory-mapped token ids of one file; ConfigurationError for a file of no known format."""
    dtype, header_bytes, says = _format(path)
    count, rest = divmod(path.stat().st_size - header_bytes, dtype.itemsize)
    if rest or count < 1:
        raise ConfigurationError(
            f"{path} has {path.stat().st_size} bytes: not a whole number of {dtype.name} tokens after a header of "
            f"{header_bytes}; write it again (python -m bootstrap.trainer.data.pack) or complete the copy"
        )
    for what, tokens in says.items():
        if tokens != count:
            raise ConfigurationError(
                f"{path} has {count} tokens and its {what} says {tokens}: an incomplete copy; copy it whole, or write "
                "it with python -m bootstrap.trainer.data.pack"
            )
    return np.memmap(path, dtype=dtype, mode="r", offset=header_bytes, shape=(count,))


def read_sidecar(path: Path) -> dict[str, Any]:
    """Read the facts that ``pack.py`` wrote beside a token file; empty without such a sidecar."""
    sidecar = path.with_suffix(".json")
    if not sidecar.is_file():
        return {}
    try:
        facts = json.loads(sidecar.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{sidecar} is not JSON ({error}); write it again, or copy it whole") from error
    if not isinstance(facts, dict):
        raise ConfigurationError(f"{sidecar} is no JSON object; expected dtype and tokens of {path.name}")
    return facts


def _format(path: Path) -> tuple[np.dtype[Any], int, dict[str, Any]]:
    """Type of a token, bytes before the first, and tokens by the place that says their number."""
    sidecar, index = path.with_suffix(".json"), path.with_suffix(".idx")
    if sidecar.is_file():
        facts = read_sidecar(path)
        dtype = SIDECAR_DTYPES.get(facts.get("dtype"))
        if dtype is None:
            raise ConfigurationError(f"{sidecar}: dtype is {facts.get('dtype')!r}; expected uint16 or uint32")
        return dtype, 0, {sidecar.name: facts.get("tokens")}
    if index.is_file():
        dtype, tokens = _megatron(index)
        return dtype, 0, {index.name: tokens}
    with path.open("rb") as file:
        head = file.read(12)
    if len(head) == 12:
        magic, _, tokens = struct.unpack("<3i", head)
        if magic in LLMC_DTYPES:
            return LLMC_DTYPES[magic], LLMC_HEADER_BYTES, {"header": tokens}
    return np.dtype("<u2"), 0, {}


def _megatron(index: Path) -> tuple[np.dtype[Any], int]:
    with index.open("rb") as file:
        head = file.read(MEGATRON_HEAD.size)
        if len(head) == MEGATRON_HEAD.size:
            magic, _, code, sequences, _ = MEGATRON_HEAD.unpack(head)
            if magic == MEGATRON_MAGIC and code in MEGATRON_DTYPES and sequences:
                lengths_end = MEGATRON_HEAD.size + 4 * sequences
                file.seek(lengths_end - 4)
                last = file.read(4)
                file.seek(lengths_end + 8 * (sequences - 1))
                if len(place := file.read(8)) == 8:
                    dtype = MEGATRON_DTYPES[code]
                    return dtype, struct.unpack("<q", place)[0] // dtype.itemsize + struct.unpack("<i", last)[0]
    raise ConfigurationError(f"{index} is not a whole Megatron-LM index of int32, int64 or uint16 tokens")


def _refuse_halves(path: Path, tokens: npt.NDArray[np.integer], vocab_size: int) -> None:
    """Refuse 32-bit tokens that would be read as 16 bits: every second number is the upper half of one."""
    upper = tokens[1 : 2 * HALVES : 2]
    if tokens.itemsize == 2 and len(upper) == HALVES and int(upper.max()) <= (vocab_size - 1) >> 16:
        number = path.stat().st_size // 4
        raise ConfigurationError(
            f"{path} has the tokens of uint32 read as uint16: every second one is at most {int(upper.max())}. Write "
            f'{path.with_suffix(".json").name}, {{"dtype": "uint32", "tokens": {number}}}, beside it'
        )


class TokenFiles(Dataset):
    """Samples of ``length`` tokens, one every ``stride``, of several files in the order of their names."""

    def __init__(self, paths: list[Path], *, length: int, stride: int, vocab_size: int, objective: Objective) -> None:
        self._length, self._stride = length, stride
        self._vocab_size = vocab_size
        self._objective = objective
        self._paths = sorted(paths)
        self.digest = digest(self._paths)
        self._files = [map_tokens(path) for path in self._paths]
        for path, file in zip(self._paths, self._files, strict=True):
            _refuse_halves(path, file, vocab_size)
        counts = [max(0, (len(file) - self._length) // stride + 1) for file in self._files]
        self._ends = list(accumulate(counts))
        if not self._ends or not self._ends[-1]:
            raise ConfigurationError(
                f"{', '.join(map(str, self._paths)) or 'no file'}: none has the {self._length} tokens of one sample; "
                "give more data or a smaller --seq-len"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def fetch(self, indices: torch.Tensor, *, step: int, device: torch.device) -> Batch:
        """See ``Dataset.fetch``; reads the pages of these samples only."""
        rows = np.stack([self._sample(index) for index in indices.tolist()])
        # On a GPU an id beyond the embedding is an assertion that ends the process without a name.
        if (largest := int(rows.max())) >= self._vocab_size or int(rows.min()) < 0:
            raise ConfigurationError(
                f"token {largest} in {self._paths[0].parent}, and the model's vocabulary has {self._vocab_size}: the "
                "files were written with another tokenizer, or are uint32 without a .json sidecar that says so"
            )
        return self._objective(torch.from_numpy(rows), indices, step)

    def _sample(self, index: int) -> npt.NDArray[np.int64]:
        file = bisect.bisect_right(self._ends, index)
        first = (index - (self._ends[file - 1] if file else 0)) * self._stride
        return self._files[file][first : first + self._length].astype(np.int64)
