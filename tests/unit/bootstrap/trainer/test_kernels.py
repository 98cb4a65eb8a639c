"""Kernels that take the place of transformers' operations: where they do, and that they compute the same."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bootstrap.trainer import kernels
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.models import blocks, build, materialise
from tests.unit.bootstrap.trainer.test_models import SEQ_LEN, SHAPE


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    """The compiler is used on the CPU too, as on a GPU; it traces and writes no kernels."""
    monkeypatch.setattr(kernels, "can_compile", lambda _: True)


def build_model(kind: str, **more: Any) -> Any:
    architecture = SHAPE | {"model_type": kind, "tie_word_embeddings": False, "pad_token_id": 0} | more
    model: Any = build(TrainerConfig(architecture=architecture, seq_len=SEQ_LEN, global_batch=2, gpus_per_node=1))
    for part in (*blocks(model), model):
        materialise(model, part, device=torch.device("cpu"), seed=0)
    return model


@pytest.mark.parametrize(
    ("kind", "fused"), [("llama", True), ("qwen3", True), ("gpt_oss", True), ("gemma3_text", False), ("gpt2", False)]
)
def test_norms_are_torchs_kernel_where_that_computes_the_same(kind: str, fused: bool) -> None:
    norms = [part for part in build_model(kind).modules() if "Norm" in type(part).__name__]
    assert norms and all((vars(part).get("forward") is not None) == fused for part in norms)


@pytest.mark.parametrize(
    ("kind", "fused"),
    [("llama", True), ("qwen3", True), ("gemma2", True), ("phi3", True), ("glm", False), ("gpt_oss", False)],
)
def test_rotary_positions_are_one_kernel_where_that_computes_the_same(kind: str, fused: bool) -> None:
    attention = next(part for part in build_model(kind).modules() if type(part).__name__.endswith("Attention"))
    rotary = getattr(sys.modules[type(attention).__module__], kernels.ROTARY)
    assert isinstance(rotary, kernels._Rotary) == fused


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, in its compiler
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("more", [{}, {"model_type": "phi3", "partial_rotary_factor": 0.5}])
def test_loss_and_gradients_are_those_of_the_written_out_rotation(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Phi 3 rotates a part of each head: transformers' own operations."""
    model = build_model("llama", **more)
    tokens = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) % SHAPE["vocab_size"]
    rotate = Mock(side_effect=kernels._Rotation.apply)
    monkeypatch.setattr(kernels._Rotation, "apply", rotate)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens).logits.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    ours = gradients()
    assert rotate.call_count == (0 if more else SHAPE["num_hidden_layers"])
    monkeypatch.setattr(kernels, "can_compile", lambda _: False)
    torch.testing.assert_close(ours, gradients())


def test_rotated_queries_keep_their_type_under_autocast(compiling: None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 8, 16, generator=generator).bfloat16() for heads in (4, 2))
    angles = torch.rand(1, 8, 8, generator=generator)
    cos, sin = (function(torch.cat((angles, angles), -1)) for function in (torch.cos, torch.sin))
    model = build_model("llama")
    rotary = getattr(sys.modules[type(model).__module__], kernels.ROTARY)
    ours = rotary(query, key, cos, sin)
    theirs = rotary._written_out(query, key, cos, sin)
    assert [x.dtype for x in theirs] == [torch.float32] * 2
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(ours, theirs, strict=True))


def test_an_evaluation_of_other_sizes_leaves_training_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run, which has not evaluated yet, must compute the same bits."""
    numbers = itertools.count(1)
    used: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        number = next(numbers)

        def run(*inputs: Any) -> Any:
            used.append(number)
            return graph.forward(*inputs)

        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    function = kernels.compiled.__wrapped__(kernels._half_turn)
    for samples in (4, 4, 3, 2, 4):
        function(torch.ones(samples, 8))
    assert used == [1, 1, 2, 3, 1]


@pytest.fixture
def forgotten() -> Iterator[None]:
    kernels.can_compile.cache_clear()
    yield
    kernels.can_compile.cache_clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    ],
)
def test_without_a_compiler_the_trainer_goes_on_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(_: Callable[..., Any]) -> Callable[..., Any]:
        raise error

    monkeypatch.setattr(kernels, "compiled", fail)
    assert not kernels.can_compile("cuda")
    assert not kernels.can_compile("cuda")
    (message,) = caplog.messages
    assert str(error) in message and "apt-get install gcc python3-dev" in message


def test_a_cpu_compiles_nothing(forgotten: None) -> None:
    assert not kernels.can_compile("cpu")
