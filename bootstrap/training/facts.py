"""Facts of a run that each start must have again, by name, as its checkpoints hold them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Bytes at either end of a file that its digest is of: data sets are too large to read at each start.
_END_BYTES = 4096
# Fields of a Hugging Face configuration that change nothing of the training, or the precision of its arithmetic. A
# classifier's first forward pass sets problem_type, which its checkpoint's configuration then has.
_ABOUT = (
    "_name_or_path", "architectures", "bnb_4bit_compute_dtype", "chunk_size_feed_forward", "dtype", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip


def facts_of(order: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a run, with the numbers of its order: a SampleOrder's, or a Manifest's."""
    return {**facts, **{name: getattr(order, name) for name in ("global_batch", "dataset_size", "seed")}}


def config_facts(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Fields of a model's configuration as facts, those of an object within by its own name and theirs."""
    facts: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name not in _ABOUT:
            facts |= config_facts(value, f"{prefix}{name}.")
        elif name not in _ABOUT:
            facts[prefix + name] = value
    return facts


def is_same_fact(own: Any, saved: Any) -> bool:
    """True where a fact is as before.

    A function of a schedule (``schedule_of``) may have another name, or, by another Python, another code.
    """
    if own == saved or not re.search(r"\(.*#[0-9a-f]{8}[,)]", f"{own} {saved}"):
        return bool(own == saved)
    words, before = (re.split(r"[(), ]+", str(text)) for text in (own, saved))
    is_alike = all({*word.split("#")} & {*was.split("#")} for word, was in zip(words, before, strict=False))
    return is_alike and len(words) == len(before)


def digest(files: Iterable[Path]) -> str:
    """Digest of sizes, beginnings and ends of files, in order: the same wherever they lie."""
    sums = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            sums.update(size.to_bytes(8, "little") + file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            sums.update(file.read(_END_BYTES))
    return sums.hexdigest()[:16]
