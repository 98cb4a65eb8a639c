"""Image folders, one folder a class (torchvision's ImageFolder layout), decoded and augmented by sample number."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from bootstrap.trainer.data.dataset import Batch, Dataset, hash64
from bootstrap.training.errors import ConfigurationError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
# https://docs.pytorch.org/vision/stable/models.html, "the inference transforms" (read 2026-11).
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
# A validation image is resized to this multiple of the crop (256 for 224).
RESIZE = 256 / 224


def normalise(raw: Batch) -> Batch:
    """Images as float32 in channels_last, by ImageNet's mean and deviation; uint8 until here: a quarter of the copy."""
    images = raw["images"].contiguous(memory_format=torch.channels_last).float()
    mean, deviation = _statistics(images.device)
    return {**raw, "images": images.sub_(mean).div_(deviation)}


@functools.cache
def _statistics(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # Made once: a copy from the host waits for the whole step before. Multiplied there, it is ready on every stream.
    mean, deviation = ((torch.tensor(values) * 255).view(1, 3, 1, 1).to(device) for values in (MEAN, DEVIATION))
    return mean, deviation


def _shown(folder: Path) -> list[os.DirEntry[str]]:
    """Entries by name, without hidden ones (macOS's ._IMAGE.jpg, Jupyter's .ipynb_checkpoints)."""
    return sorted((entry for entry in os.scandir(folder) if not entry.name.startswith(".")), key=lambda one: one.name)


def _folders(folder: Path) -> list[str]:
    return [entry.name for entry in _shown(folder) if entry.is_dir()]


class ImageFolder(Dataset):
    """Images under ``folder/CLASS/``. Classes are numbered by name, or as in ``numbered``, the training's folder.

    Training images get a random crop and flip drawn from (seed, step, sample), validation images the central crop.
    """

    needs_workers: ClassVar[bool] = True

    def __init__(
        self, folder: Path, *, image_size: int, classes: int, augment: bool, seed: int, numbered: Path | None = None
    ) -> None:
        names, own = _folders(numbered or folder), _folders(folder)
        if new := sorted(set(own) - set(names)):
            raise ConfigurationError(f"{folder} has class folders that {numbered} lacks: {', '.join(new[:3])}")
        if not 1 <= len(names) <= classes:
            raise ConfigurationError(
                f"{folder} has {len(names)} class folders, and the model has {classes} classes; expected "
                "FOLDER/CLASS/IMAGE.jpg with at most as many classes as the model"
            )
        self._folder = folder
        self._size = image_size
        self._augment = augment
        self._seed = seed
        files = [
            (f"{name}/{file}", label)
            for label, name in enumerate(names)
            if name in own
            for file in (entry.name for entry in _shown(folder / name))
            if file.lower().endswith(SUFFIXES)
        ]
        if not files:
            raise ConfigurationError(f"{folder}: no image ({', '.join(SUFFIXES)}) in its {len(own)} class folders")
        encoded = [path.encode() for path, _ in files]
        self.digest = hashlib.sha256(b"\0".join(encoded)).hexdigest()[:16]
        # An array instead of a list of a million strings, which each worker process would copy piece by piece.
        self._paths = np.array(encoded)
        self._labels = torch.tensor([label for _, label in files])

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: torch.Tensor, *, step: int, device: torch.device) -> Batch:
        """See ``Dataset.fetch``; uint8 images on the CPU."""
        images = torch.stack([self._image(index, step) for index in indices.tolist()])
        return {"images": images, "labels": self._labels[indices]}

    def finish(self, raw: Batch) -> Batch:
        """See ``Dataset.finish``."""
        return normalise(raw)

    def _image(self, index: int, step: int) -> torch.Tensor:
        from torchvision.io import ImageReadMode, decode_image
        from torchvision.transforms import v2

        path = self._folder / os.fsdecode(self._paths[index])
        try:
            image: torch.Tensor = decode_image(str(path), mode=ImageReadMode.RGB, apply_exif_orientation=True)
        except RuntimeError as error:
            raise ConfigurationError(f"{path} cannot be decoded ({error}); remove it or copy it again") from error
        if image.dtype != torch.uint8:  # a PNG of 16 bits
            image = v2.functional.to_dtype(image, torch.uint8, scale=True)
        if not self._augment:
            scaled = v2.functional.resize(image, [math.ceil(self._size * RESIZE)], antialias=True)
            cropped: torch.Tensor = v2.functional.center_crop(scaled, [self._size, self._size])
            return cropped
        # torchvision draws from the CPU's generator, which the training's random numbers come from too.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(hash64((self._seed, step, index)))
            crop: torch.Tensor = v2.RandomResizedCrop(self._size, antialias=True)(image)
            return v2.RandomHorizontalFlip()(crop)  # type: ignore[no-any-return]
