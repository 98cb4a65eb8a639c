"""The S3 server of the store tests, for data and weights on S3; a compiler without kernels."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bootstrap.trainer import kernels
from tests.unit.bootstrap.training.conftest import aws, moto_url

__all__ = ["aws", "moto_url"]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile traces for real and generates no kernels, which takes minutes on a CPU."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    kernels.compiled.cache_clear()
    yield
    kernels.compiled.cache_clear()
    torch._dynamo.reset()  # else the shapes of all tests count to the eight of one function


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.unfreeze()  # the trainer collects garbage by itself
    gc.enable()
