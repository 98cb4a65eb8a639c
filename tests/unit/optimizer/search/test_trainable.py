"""Plans by default: the reference trainer carries them out, or the answer says why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optimizer.contract.request import request_from_dict
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.search.requests import answer

MIXTURES = {"mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"}
# One of each kind that the trainer tells apart.
NAMES = [
    "gpt2-xl", "llama-3.2-1b", "llama-3.1-70b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gemma-2-2b", "gemma-3-1b",
    "bert-large", "resnet18", "resnet152", *MIXTURES,
]  # fmt: skip


@pytest.mark.parametrize("objective", ["cost", "time", "pareto"])
def test_every_plan_of_every_kind_of_preset_is_the_trainers(objective: str) -> None:
    beyond = {}
    for name in NAMES:
        seq_len = min(2048, resolve_model(name).max_seq_len or 2048)
        work = {"samples": 200_000, "seq_len": seq_len, "global_batch": 512}
        answered = answer(name, objective, work, purchase_options=["on-demand"], max_nodes=64)
        assert answered.plans
        if any(plan.beyond_trainer for plan in answered.plans):
            beyond[name] = answered.notes
        else:
            assert answered.problem.reach.only_trainers
            assert not any("code of your own" in note for note in answered.notes)
    assert beyond.keys() == MIXTURES
    for notes in beyond.values():
        assert any("plans are for training code of your own" in note and "mixture" in note for note in notes)


@pytest.mark.parametrize(
    ("asked", "work", "axes", "shardings", "framework"),
    [
        ({}, {}, ("data", "tensor", "context"), 4, "gpufleet"),
        ({"parallelism": ["data", "pipeline"]}, {}, ("data", "pipeline"), 4, "torch"),
        ({"sharding": ["zero3"]}, {"framework": "torch"}, ("data", "tensor", "context"), 1, "torch"),
        ({}, {"optimizer": "adafactor"}, ("data", "context"), 1, "gpufleet"),
        # Other training code may do everything.
        ({}, {"framework": "torchtitan"}, ("data", "tensor", "pipeline", "context", "expert"), 4, "torchtitan"),
        ({}, {"precision": "fp8"}, ("data", "tensor", "pipeline", "context", "expert"), 4, "torch"),
    ],
)
def test_the_request_widens_and_narrows_the_search(
    asked: dict[str, Any], work: dict[str, Any], axes: tuple[str, ...], shardings: int, framework: str
) -> None:
    answered = answer("llama-3.2-1b", work={"seq_len": 8192, **work}, instance_types=["p5"], **asked)
    assert (answered.problem.reach.axes, len(answered.problem.reach.shardings)) == (axes, shardings)
    assert answered.plans[0].job.framework == framework


def test_a_size_alone_is_for_code_of_the_users_own() -> None:
    answered = answer("7B", instance_types=["p4d"])
    assert answered.plans[0].job.architecture is None
    assert "--parallelism data narrows it" in " ".join(answered.notes)


def test_a_request_without_parallelism_reads_back() -> None:
    request = answer("gpt2", instance_types=["g5"]).problem.request
    assert request_from_dict(json.loads(request.model_dump_json())) == request
