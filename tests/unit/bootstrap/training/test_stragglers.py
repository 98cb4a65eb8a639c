from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bootstrap.training import stragglers
from bootstrap.training.stragglers import Stragglers, _timed_layers


class Linear(nn.Linear):
    """Has a state of its own, as DDP has."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "is_copy": True}


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Linear(2, 2)])
def test_only_training_passes_are_timed_and_copies_have_no_hook_of_ours(model: nn.Module) -> None:
    model.register_forward_hook(print)
    watch = Stragglers()
    watch.watch(model, torch.device("cpu"))
    for passes in range(2):
        watch.begin_step()
        for _ in range(passes):
            model(torch.ones(1, 2))
    model.eval()(torch.ones(1, 2))
    assert [part for part, _, _ in watch._spans] == [stragglers.INPUT, stragglers.FORWARD]
    saved = pickle.dumps(model)
    assert b"bootstrap" not in saved.replace(Linear.__module__.encode(), b"")
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(saved), copy.deepcopy(nn.Sequential(model))[0]):  # noqa: S301 - its own
        assert list(other._forward_hooks.values()) == [print] and not other._forward_pre_hooks
        assert "__getstate__" not in vars(other) and hasattr(other, "is_copy") is isinstance(model, Linear)
    watch.close()
    assert not model._forward_pre_hooks and len(model._forward_hooks) == 1 and "__getstate__" not in vars(model)


def test_under_ddp_the_modules_own_pass_is_timed_without_the_exchange_of_buffers() -> None:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2))
        assert _timed_layers(model) == [model.module]
        model.module._compiled_call_impl = print  # as after compile()
        assert _timed_layers(model) == [model]
    finally:
        dist.destroy_process_group()


def test_a_span_between_two_streams_waits_for_both_of_its_events() -> None:
    watch, finished = Stragglers(), {"start": False}
    watch._device = torch.device("cuda")
    start = SimpleNamespace(query=lambda: finished["start"], elapsed_time=lambda _: 250.0)
    watch._spans.append((stragglers.INPUT, start, SimpleNamespace(query=lambda: True)))
    watch._collect()
    assert watch._parts_s == [0.0, 0.0]
    finished["start"] = True
    watch._collect()
    assert watch._parts_s == [0.25, 0.0] and not watch._spans
