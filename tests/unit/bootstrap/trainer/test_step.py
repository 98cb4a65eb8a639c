"""Parts of a step in one process: loss, schedule, loss scale, and the advice when memory runs out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bootstrap.trainer import loss, oom
from bootstrap.trainer.optimize import LossScale, gradient_norm, rate_share, scale_gradients
from tests.unit.bootstrap.trainer.test_config import parse


def test_cross_entropy_is_torchs_and_leaves_its_gradient_in_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several turns, with ignored labels; the gradient is that of the weighted sum."""
    monkeypatch.setattr(loss, "TURN_ELEMENTS", 64)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 16, generator=generator) * 5
    labels = torch.randint(16, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = loss.IGNORED
    reference = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(reference.flatten(0, 1), labels.flatten(), reduction="sum")
    (0.25 * expected).backward()  # type: ignore[no-untyped-call]
    head = torch.nn.Linear(1, 1)  # not a leaf: the logits of a model are an output
    ours = (logits.clone().requires_grad_() * 1.0) + 0 * head.weight
    ours.retain_grad()
    found = loss.cross_entropy(ours, labels, weight=torch.tensor(0.25))
    found.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(ours.grad, reference.grad)
    torch.testing.assert_close(ours.detach(), reference.grad)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.55, 0.1]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_schedules_warm_up_and_end(schedule: str, expected: list[float]) -> None:
    config = parse("--steps", "102", "--warmup-steps", "2", "--schedule", schedule)
    assert [rate_share(config, step) for step in (0, 1, 2, 52, 102)] == pytest.approx(expected)


def test_fp16_scale_halves_on_infinity_and_survives_a_resume() -> None:
    scale = LossScale(enabled=True)
    assert not scale.takes_step(torch.tensor(torch.inf))
    assert scale.takes_step(torch.tensor(1.0))
    again = LossScale(enabled=True)
    again.load_state_dict(scale.state_dict())
    assert again.value == 2.0**15
    for _ in range(LossScale.GROWTH_INTERVAL - 1):
        again.takes_step(torch.tensor(1.0))
    assert again.value == 2.0**16


def test_norm_and_scaling_of_plain_gradients() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([2.0, 1.0]), torch.tensor([2.0])
    assert float(gradient_norm(parameters)) == pytest.approx(3.0)
    scale_gradients(parameters, torch.tensor(0.5))
    assert float(gradient_norm(parameters)) == pytest.approx(1.5)


@pytest.mark.parametrize(("micro_batch", "limit"), [(1, None), (2, "2")])
def test_running_out_again_ends_with_what_to_change(
    micro_batch: int, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is None:
        monkeypatch.delenv(oom.LIMIT_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(oom.LIMIT_VARIABLE, limit)
    config = dataclasses.replace(parse(), micro_batch=micro_batch)
    with (
        pytest.raises(oom.OutOfMemoryError, match=r"Change one of: --activation-checkpointing full; --sharding zero3"),
        oom.halving_micro_batch(config),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
