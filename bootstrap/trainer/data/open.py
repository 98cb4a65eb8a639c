"""Data set of an address: synthetic without one, token files or images of a folder or an S3 prefix with one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.data import objectives
from bootstrap.trainer.data.dataset import Dataset
from bootstrap.trainer.data.images import ImageFolder
from bootstrap.trainer.data.synthetic import SyntheticImages, SyntheticTokens
from bootstrap.trainer.data.tokens import TokenFiles, read_sidecar
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.staging import stage

Split = Literal["train", "val"]


def open_samples(config: TrainerConfig, split: Split = "train", *, image_size: int = 224) -> Dataset:
    """Samples for the configured model; call it before the process group is made, as staging may take long.

    Args:
        split: ``train`` or ``val``: token files whose name begins with it, or in a folder of that name; images of the
            folder. ``train`` takes all that is not ``val`` where nothing is named so.
        image_size: a CNN's.

    Raises:
        ConfigurationError: no such data, a format that is not known, data that does not fit the model.
    """
    shape, uri, family = config.architecture, config.train_data, config.family
    # Validation samples are other ones, drawn the same way.
    seed = config.seed * 2 + (split == "val")
    if family in ("cnn", "image"):
        image_size = shape.get("image_size", image_size)
        classes = shape.get("num_labels", shape.get("num_classes", 1000))
        if not uri:
            return SyntheticImages(image_size=image_size, classes=classes, seed=seed)
        path = stage(uri)
        folder = path / split if (path / split).is_dir() else path
        if folder == path and (split == "val" or not path.is_dir()):
            raise _missing(uri, split, "FOLDER/val/CLASS/IMAGE.jpg" if split == "val" else "FOLDER/CLASS/IMAGE.jpg")
        numbered = path / "train" if (path / "train").is_dir() else None
        augment = split == "train"
        return ImageFolder(
            folder, image_size=image_size, classes=classes, augment=augment, seed=seed, numbered=numbered
        )
    vocab_size = shape.get("vocab_size", 0)
    if vocab_size < 1:
        raise ConfigurationError(f"vocab_size is {vocab_size}; the architecture must say it (config.json: vocab_size)")
    files = _token_files(stage(uri), uri, split) if uri else []
    # A decoder's last label is the token after its last input.
    length, stride = config.seq_len + 1, config.seq_len
    objective: objectives.Objective = objectives.predict_next
    if family == "encoder":
        length = stride
        # The last of the vocabulary is RoBERTa's mask; a packed file says its tokenizer's (BERT's is 103).
        mask = read_sidecar(files[0]).get("mask_token_id") if files else None
        mask = vocab_size - 1 if mask is None else mask
        objective = partial(objectives.mask_tokens, mask_token_id=mask, vocab_size=vocab_size, seed=seed)
    if not files:
        return SyntheticTokens(length=length, vocab_size=vocab_size, objective=objective, seed=seed)
    return TokenFiles(files, length=length, stride=stride, vocab_size=vocab_size, objective=objective)


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
