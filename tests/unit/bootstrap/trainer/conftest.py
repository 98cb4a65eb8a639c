"""The S3 server of the store tests, for data and weights on S3; a compiler without kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

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
