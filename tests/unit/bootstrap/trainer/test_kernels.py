"""Kernels that take the place of transformers' operations: where they do, and that they compute the same."""

from __future__ import annotations

import functools
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bootstrap.trainer import kernels
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.models import blocks, build, materialise
from bootstrap.trainer.parallelize import HALF
from tests.training.test_trainer import BERT, LLAMA, QWEN3, VIT
from tests.unit.bootstrap.trainer.test_models import SEQ_LEN, SHAPE

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel of rotary positions, run on the CPU by Triton's interpreter as if it were a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "can_compile", lambda _: True)
    monkeypatch.delitem(sys.modules, "bootstrap.trainer.rotary", raising=False)
    yield importlib.import_module("bootstrap.trainer.rotary")
    del sys.modules["bootstrap.trainer.rotary"]


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


@pytest.mark.parametrize("more", [{}, {"model_type": "phi3", "partial_rotary_factor": 0.5}])
def test_loss_and_gradients_are_those_of_the_written_out_rotation(
    monkeypatch: pytest.MonkeyPatch, interpreted: Any, more: dict[str, Any]
) -> None:
    """Phi 3 rotates a part of each head: transformers' own operations."""
    model = build_model("llama", **more)
    tokens = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) % SHAPE["vocab_size"]
    rotate = Mock(side_effect=interpreted.rotate)
    monkeypatch.setattr(interpreted, "rotate", rotate)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens).logits.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    ours = gradients()
    assert rotate.call_count == (0 if more else SHAPE["num_hidden_layers"])
    monkeypatch.setattr(kernels, "can_compile", lambda _: False)
    torch.testing.assert_close(ours, gradients())


def test_a_rotation_that_computes_something_else_is_not_used(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.check_rotation("cpu")
    rotate = interpreted.rotate
    monkeypatch.setattr(interpreted, "rotate", lambda query, key, cos, sin: rotate(query, key, sin, cos))
    with pytest.raises(RuntimeError, match="something else"):
        kernels.check_rotation("cpu")


@pytest.mark.parametrize("batch", [1, 2])
def test_each_sample_is_turned_by_its_own_positions_and_keeps_its_type(interpreted: Any, batch: int) -> None:
    """Three heads of width 12: blocks of Triton are powers of two."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(2, 5, heads, 12, generator=generator) for heads in (3, 1))
    query, key = (x.bfloat16().transpose(1, 2).requires_grad_() for x in made)
    cos, sin = (torch.randn(batch, 5, 12, generator=generator) for _ in range(2))
    model = build_model("llama")
    rotary = getattr(sys.modules[type(model).__module__], kernels.ROTARY)
    ours, theirs = rotary(query, key, cos, sin), rotary._written_out(query, key, cos, sin)
    assert [x.dtype for x in theirs] == [torch.float32] * 2
    assert [x.stride() for x in ours] == [query.stride(), key.stride()]
    near: Any = functools.partial(torch.testing.assert_close, rtol=2**-6, atol=3e-2)
    weights = [torch.randn(x.shape, generator=generator) for x in theirs]
    for x, y in zip(ours, theirs, strict=True):
        near(x, y.bfloat16())
    found, expected = (
        torch.autograd.grad(sum((x * y).sum() for x, y in zip(pair, weights, strict=True)), (query, key))
        for pair in (ours, theirs)
    )
    near(found, expected)


def test_heads_that_lie_far_apart_are_turned(interpreted: Any) -> None:
    """Element 2^32 of a tensor; a 32-bit product of head and stride would read element 0."""
    far = torch.empty(2**32 + 4, dtype=torch.int8)  # memory of three pages: the others are not touched
    query = far.as_strided((1, 3, 1, 4), (1, 2**30, 4, 1), 2**31)
    query.copy_(torch.arange(12).view(1, 3, 1, 4))
    far[:4] = 100
    turned, _ = interpreted.rotate(query, query[:, :1], torch.ones(1, 1, 4), torch.zeros(1, 1, 4))
    assert turned.flatten().tolist() == list(range(12))


def test_cosines_and_sines_need_not_lie_alike(interpreted: Any) -> None:
    query, turns = torch.randn(2, 3, 5, 4), torch.randn(2, 5, 8)
    cos, sin = turns[..., :4], turns[..., 4:].contiguous()
    ours, _ = interpreted.rotate(query, query, cos, sin)
    torch.testing.assert_close(ours, kernels._turned(query, cos, sin))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "architecture",
    [LLAMA, QWEN3, LLAMA | {"model_type": "gemma"}, GPT2, BERT, VIT],
    ids=itemgetter("model_type"),
)
def test_norms_and_residual_have_16_bits_under_autocast_to_bf16(architecture: dict[str, Any], precision: str) -> None:
    """FSDP2's policy gives them as many. fp16 keeps 32: its range is too short for some models' residual."""
    model: Any = build(
        TrainerConfig(architecture=architecture, precision=precision, seq_len=32, global_batch=2, gpus_per_node=1)
    )
    found: set[torch.dtype] = set()
    for part in (*blocks(model), model):
        materialise(model, part, device=torch.device("cpu"), seed=0)
    for part in blocks(model):
        part.register_forward_hook(
            lambda _, __, output: found.add((output if isinstance(output, torch.Tensor) else output[0]).dtype)
        )
    ids = torch.arange(64).reshape(2, 32)
    is_vit = architecture["model_type"] == "vit"
    inputs = {"pixel_values": torch.rand(2, 3, 32, 32)} if is_vit else {"input_ids": ids}
    with torch.autocast("cpu", HALF[precision]):
        model(**inputs).logits.float().square().mean().backward()
    assert found == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters() if parameter.grad is not None)


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
    function = kernels.compiled.__wrapped__(kernels._probe)
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
        importlib.import_module("triton.runtime.errors").PTXASError("sm_103 is not defined"),
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
