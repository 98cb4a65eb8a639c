"""Plans of an answer: they keep the contract, add up, and say what they rest on."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.recommend import Recommendation
from optimizer.search.problem import Problem
from tests.unit.optimizer.search.requests import answer, calibration, catalog, request


def test_a_revised_request_keeps_the_model_that_was_read() -> None:
    problem = Problem.resolve(request("1.3B"), catalog(), calibration())
    revised = problem.revise(budget_usd=7.0)
    assert revised.request.constraints.budget_usd == 7 and revised.model is problem.model


@pytest.mark.parametrize(
    ("model", "work", "batch"),
    [
        ("gpt2-xl", {"samples": 10**8}, 1024),  # 1.5B parameters: 1M tokens
        ("gpt2-xl", {"samples": 10**8, "seq_len": 700}, 1536),  # the nearest of 2^k and 3 x 2^k
        ("gpt2-xl", {"samples": 1_100_000}, 512),  # 2,000 steps, not 1,074
        ("gpt2-xl", {"samples": 52_002 * 3}, 128),  # Alpaca: 1,218 steps
        ("llama-3.2-1b", {"samples": 10**7, "method": "lora"}, 128),
        ("gpt2-xl", {"samples": 9766}, 32),  # 20M tokens of 2048
        ("gpt2-xl", {"samples": 20}, 16),
        ("gpt2-xl", {"samples": 10**9}, 2048),  # 1T tokens: a batch of 1M would take a million steps
        ("gpt2-xl", {"samples": 10**11}, 16384),
        ("llama-3.2-1b", {"samples": 8192, "seq_len": 131072}, 8),
        ("resnet50", {"samples": 1_281_167 * 90, "seq_len": None}, 8192),
        ("resnet50", {"samples": 100_000, "seq_len": None}, 64),
    ],
)
def test_without_a_batch_all_plans_have_one_that_such_runs_have(model: str, work: dict[str, Any], batch: int) -> None:
    answered = answer(model, work=work | {"global_batch": None})
    assert {plan.job.global_batch for plan in answered.plans + answered.pareto} == {batch}
    few = [note for note in answered.notes if "steps of" in note]
    assert bool(few) == (answered.plans[0].job.steps < 200)


@pytest.mark.parametrize("samples", [1, 7, 64, 1000, 10_000, 300_000, 10**9])
@pytest.mark.parametrize("model", ["gpt2", "bert-large", "resnet50"])
def test_a_run_of_any_size_has_plans_that_add_up(model: str, samples: int) -> None:
    """Cents rounded apart must not make a plan contradict itself, however small the run."""
    work = {"samples": samples, "seq_len": 512, "global_batch": None}
    answered = answer(model, work=work, instance_types=[], regions=["us-*"])
    assert answered.plans
    for plan in answered.plans + answered.pareto:
        cost = plan.cost_usd  # its median was up to two cents above the expected value
        assert cost.p50 <= round(cost.breakdown.total(), 2) == cost.expected <= cost.p95


def test_steps_samples_and_tokens_ask_for_the_same() -> None:
    amounts = ({"samples": 64_000}, {"steps": 1000}, {"tokens": 64_000 * 1024})
    by_samples, by_steps, by_tokens = (answer(work={"samples": None} | amount).plans for amount in amounts)
    assert by_samples == by_steps == by_tokens


def test_a_plan_says_when_its_parallelism_was_never_measured() -> None:
    work = {"seq_len": 8192, "samples": 10_000, "global_batch": 384}
    limits: dict[str, Any] = {"instance_types": ["p5en"], "parallelism": ["pipeline"], "max_nodes": 2}
    plan = answer("llama-3.1-70b", work=work, **limits).plans[0]
    assert plan.parallelism.beyond_data == ("pipeline",)
    assert "no measured run on H200 has pipeline parallelism" in plan.calibration.source
    pooled = calibration().residuals["pooled"].relative_error
    assert plan.calibration.relative_error == pytest.approx(pooled, rel=1e-4)
    plain = answer(instance_types=["p5en"]).plans[0]
    assert not plain.parallelism.beyond_data and "parallelism" not in plain.calibration.source


def test_an_answer_whose_nodes_talk_through_host_memory_says_so() -> None:
    several = answer("llama-3.1-70b", instance_types=["g6e.48xlarge"], max_nodes=8)
    best = several.plans[0]
    assert best.node_count > 1 and best.calibration.relative_error >= 0.69
    assert "without GPUDirect RDMA" in best.calibration.source
    assert any("EFA without GPUDirect RDMA" in note for note in several.notes)
    one = answer(instance_types=["g6e.48xlarge"], max_nodes=1)
    assert not any("GPUDirect" in note for note in one.notes)


def test_a_cnn_needs_vcpus_that_decode_its_images() -> None:
    """The two types have the same GPU; the smaller one's loader is slower than ResNet-34."""
    work = {"samples": 10_000_000, "global_batch": 512, "seq_len": None}
    limits: dict[str, Any] = {"regions": ["us-east-1"], "purchase_options": ["on-demand"], "max_nodes": 1}

    def best(name: str, **more: Any) -> Recommendation:
        return answer("resnet34", work=work | more, instance_types=[name], **limits)

    small, large = best("g6e.2xlarge"), best("g6e.4xlarge")
    assert small.plans[0].tokens_per_second == pytest.approx(7 * 250)
    assert large.plans[0].tokens_per_second > 1.5 * small.plans[0].tokens_per_second
    assert any("the GPUs wait for their input: 7 of the 8 vCPUs prepare 1,750" in note for note in small.notes)
    assert not any("wait for their input" in note for note in large.notes)
    assert best("g6e.2xlarge", samples_per_vcpu_s=0).plans[0].tokens_per_second == large.plans[0].tokens_per_second


def test_a_cnn_on_many_nodes_is_replicated() -> None:
    """ZeRO-2 was planned, as if it gathered 16 bits in one call: 32 bits in seven take longer than DDP's buckets."""
    work = {"samples": 50_000_000, "global_batch": None, "seq_len": None}
    best = answer("resnet152", work=work, objective="time", instance_types=["p4d"], max_nodes=16).plans[0]
    assert (best.node_count, best.parallelism.sharding) == (16, "ddp")
