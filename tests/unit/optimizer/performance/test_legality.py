from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.contract.errors import InvalidInputError
from optimizer.performance.legality import check_legal, legal
from optimizer.performance.types import Grid, Recipe
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import GPT2_XL, LLAMA_8B, RESNET

MIXTRAL = resolve_model("mixtral-8x7b")
RECIPE = Recipe(seq_len=4096)


def grid(**settings: Any) -> Grid:
    return Grid(**({"nodes": 1, "data": 8} | settings))


@pytest.mark.parametrize(
    ("model", "layout", "says"),
    [
        (LLAMA_8B, {"tensor": 3}, "tensor is 3\n  limit: a divisor of 32, the attention heads of llama-3.1-8b\n  why:"),
        (LLAMA_8B, {"tensor": 16}, "a divisor of 8, the key-value heads"),
        (replace(LLAMA_8B, ffn_size=14_338), {"tensor": 4}, "a divisor of 14338, the feed-forward width"),
        (LLAMA_8B, {"pipeline": 64}, "pipeline is 64\n  limit: 32, the layers"),
        (LLAMA_8B, {"pipeline": 4, "virtual_stages": 9, "grad_accum": 4}, "8: 32 layers over 4 stages"),
        (LLAMA_8B, {"virtual_stages": 2}, "1 without pipeline"),
        (LLAMA_8B, {"pipeline": 4, "virtual_stages": 2, "grad_accum": 6}, "grad_accum is 6\n  limit: a multiple of 4"),
        (LLAMA_8B, {"context": 3}, "context is 3\n  limit: a divisor of 2048, half the tokens"),
        (LLAMA_8B, {"tensor": 8, "context": 1024, "sequence_parallel": 1}, "4096 tokens of a sequence are no multiple"),
        (LLAMA_8B, {"expert": 2}, "1: llama-3.1-8b has no experts"),
        (MIXTRAL, {"expert": 3, "data": 9}, "a divisor of 8, the experts of mixtral-8x7b"),
        (MIXTRAL, {"expert": 8, "data": 4}, "a divisor of 4, the data-parallel ranks"),
        (MIXTRAL, {"expert": 8, "tensor": 2}, "sequence_parallel is 0\n  limit: on: expert parallelism is 8"),
        (RESNET, {"tensor": 2}, "1: resnet50 is trained data-parallel"),
        (LLAMA_8B, {"micro_batch": 0}, "micro_batch is 0\n  limit: at least 1"),
        (LLAMA_8B, {"tensor": 0}, "tensor is 0\n  limit: at least 1"),
    ],
)
def test_an_illegal_configuration_is_named_with_its_limit_and_the_reason(model, layout, says) -> None:  # type: ignore[no-untyped-def]
    recipe = replace(RECIPE, seq_len=1 if model is RESNET else 4096)
    with pytest.raises(InvalidInputError) as error:
        check_legal(model, recipe, grid(**layout))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LLAMA_8B, {"tensor": 8, "pipeline": 4, "virtual_stages": 8, "grad_accum": 8, "context": 2}),
        (LLAMA_8B, {"pipeline": 5}),  # stages of 7 and 6 layers
        (MIXTRAL, {"expert": 8, "tensor": 2, "sequence_parallel": 1}),
        (GPT2_XL, {"tensor": 5}),
        (RESNET, {}),
    ],
)
def test_a_legal_configuration_is_accepted(model, layout) -> None:  # type: ignore[no-untyped-def]
    check_legal(model, replace(RECIPE, seq_len=1 if model is RESNET else 1024), grid(**layout))


def test_a_framework_that_splits_the_sequence_satisfies_experts_without_a_flag() -> None:
    layout = grid(expert=8, tensor=2)
    assert legal(MIXTRAL, replace(RECIPE, framework="megatron-core"), layout)
    assert not legal(MIXTRAL, RECIPE, layout)


small = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@given(
    model=st.sampled_from([LLAMA_8B, MIXTRAL, RESNET]),
    axes=st.fixed_dictionaries(dict.fromkeys(("tensor", "pipeline", "expert", "virtual_stages", "data"), small)),
    sequence_parallel=st.integers(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_a_grid_is_judged_as_its_configurations_one_by_one(model, axes, sequence_parallel) -> None:  # type: ignore[no-untyped-def]
    names = list(axes)
    arrays = dict(zip(names, np.meshgrid(*axes.values(), indexing="ij"), strict=True))
    mask = legal(model, RECIPE, grid(sequence_parallel=sequence_parallel, **arrays))
    assert mask.shape == arrays["tensor"].shape
    for at in np.ndindex(mask.shape):
        alone = grid(sequence_parallel=sequence_parallel, **{name: int(arrays[name][at]) for name in names})
        assert bool(legal(model, RECIPE, alone)) == bool(mask[at])
        if not mask[at]:
            with pytest.raises(InvalidInputError):
                check_legal(model, RECIPE, alone)
