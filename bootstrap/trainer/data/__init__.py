"""Data of a training run: synthetic samples, token files, image folders, and the loader in front of them."""

from __future__ import annotations

from bootstrap.trainer.data.dataset import Batch, Dataset
from bootstrap.trainer.data.loader import Loader
from bootstrap.trainer.data.open import open_dataset

__all__ = ["Batch", "Dataset", "Loader", "open_dataset"]
