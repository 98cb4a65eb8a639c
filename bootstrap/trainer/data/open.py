"""Data set of an address: synthetic without one, token files or images of a folder or an S3 prefix with one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from bootstrap.contract.trainer import Family, span_lengths, spans_of
from bootstrap.trainer.data.dataset import Dataset
from bootstrap.trainer.data.images import ImageFolder
from bootstrap.trainer.data.objectives import SENTINELS, CorruptedSpans, MaskedTokens
from bootstrap.trainer.data.synthetic import SyntheticClips, SyntheticImages, SyntheticPairs, SyntheticTokens
from bootstrap.trainer.data.tokens import TokenFiles, read_sidecar
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.staging import stage

Split = Literal["train", "val"]


def open_dataset(
    uri: str,
    *,
    family: Family,
    seq_len: int = 1,
    vocab_size: int = 0,
    image_size: int = 224,
    classes: int = 1000,
    target_len: int = 1,
    start: int = 0,
    end: int = 1,
    mel_shape: tuple[int, int] = (80, 3000),
    split: Split = "train",
    seed: int = 0,
) -> Dataset:
    """Samples of ``uri`` for a model; call it before the process group is made, as staging may take long.

    Args:
        uri: folder, file, or ``s3://BUCKET/PREFIX``, copied once to the node's local disk; empty: synthetic samples.
        target_len, start, end: tokens of a decoder beside an encoder, the first that it reads, and the last of a text.
        mel_shape: bins and frames of a clip.
        split: ``train`` or ``val``: token files whose name begins with it, or in a folder of that name; images of the
            folder. ``train`` takes all that is not ``val`` where nothing is named so.

    Raises:
        ConfigurationError: no such data, a format that is not known, data that does not fit the model.
    """
    takes_images = family in ("cnn", "image")
    if not takes_images and vocab_size < 1:
        raise ConfigurationError(f"vocab_size is {vocab_size}; the architecture must say it (config.json: vocab_size)")
    # Validation samples are other ones, drawn the same way.
    seed = seed * 2 + (split == "val")
    # The last of the vocabulary is RoBERTa's mask; a packed file says its tokenizer's (BERT's is 103).
    masked = MaskedTokens(mask_token_id=vocab_size - 1, vocab_size=vocab_size, seed=seed)
    if not uri:
        if takes_images:
            return SyntheticImages(image_size=image_size, classes=classes, seed=seed)
        if family == "seq2seq":
            return SyntheticPairs(seq_len=seq_len, target_len=target_len, vocab_size=vocab_size, start=start, seed=seed)
        if family == "speech":
            bins, frames = mel_shape
            return SyntheticClips(
                bins=bins, frames=frames, target_len=target_len, vocab_size=vocab_size, start=start, seed=seed
            )
        return SyntheticTokens(
            seq_len=seq_len, vocab_size=vocab_size, masked=masked if family == "encoder" else None, seed=seed
        )
    path = stage(uri)
    if takes_images:
        folder = path / split if (path / split).is_dir() else path
        if folder == path and (split == "val" or not path.is_dir()):
            raise _missing(uri, split, "FOLDER/val/CLASS/IMAGE.jpg" if split == "val" else "FOLDER/CLASS/IMAGE.jpg")
        return ImageFolder(
            folder,
            image_size=image_size,
            classes=classes,
            augment=split == "train",
            seed=seed,
            numbered=path / "train" if (path / "train").is_dir() else None,
        )
    files = _token_files(path, uri, split)
    if family == "seq2seq":
        length, _ = span_lengths(seq_len)
        if (spans := spans_of(length)[1]) > SENTINELS:
            raise ConfigurationError(
                f"span corruption of {length} tokens has {spans} spans, and a tokenizer has {SENTINELS} sentinels; "
                "give a smaller --seq-len"
            )
        corrupted = CorruptedSpans(vocab_size=vocab_size, start=start, end=end, seed=seed)
        return TokenFiles(files, seq_len=length, vocab_size=vocab_size, masked=corrupted)
    if family == "encoder":
        if (mask := read_sidecar(files[0]).get("mask_token_id")) is not None:
            masked = dataclasses.replace(masked, mask_token_id=mask)
        return TokenFiles(files, seq_len=seq_len, vocab_size=vocab_size, masked=masked)
    return TokenFiles(files, seq_len=seq_len, vocab_size=vocab_size, masked=None)


def _token_files(path: Path, uri: str, split: Split) -> list[Path]:
    found = [path] if path.is_file() else sorted(path.glob("**/*.bin"))
    files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]

    def of(name: str) -> list[Path]:
        return [file for file in files if file.name.startswith(name) or name in file.relative_to(path).parts[:-1]]

    named = of(split)
    if not named and split == "train":
        named = [path] if path.is_file() else [file for file in files if file not in of("val")]
    if not named:
        raise _missing(uri, split, f"{split}*.bin or {split}/*.bin")
    return named


def _missing(uri: str, split: Split, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{uri} has no {split} data; expected {expected} (docs/data.md has the formats; "
        "python -m bootstrap.trainer.data.pack writes token files)"
    )
