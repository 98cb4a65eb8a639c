"""Micro-batches of each data rank by the speed that it has in the first steps (``--balance measured``)."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bootstrap.trainer.clock import StepClock
from bootstrap.trainer.loop import Stepper
from bootstrap.trainer.mesh import data_rank, data_size

logger = logging.getLogger(__name__)

# Steps before the passes are timed (compilation, autotuning, cold caches), and steps that are.
WARMUP_STEPS = 5
TIMED_STEPS = 10
# A smaller gain is within the scatter of pass times, and with the same shares a resume stays bit-equal.
LEAST_GAIN = 0.02


def fastest_split(pass_s: Sequence[float], passes: int) -> list[int]:
    """Share out ``passes`` micro-batches, at least one a rank, so that the slowest rank ends first.

    ``pass_s``: seconds of a micro-batch on each rank.
    """
    numbers = [1] * len(pass_s)
    for _ in range(passes - len(pass_s)):
        first = min(range(len(pass_s)), key=lambda rank: (numbers[rank] + 1) * pass_s[rank])
        numbers[first] += 1
    return numbers


class Balance:
    """Times the micro-batches of this process's first steps, and sets their numbers once."""

    def __init__(self, mesh: DeviceMesh, stepper: Stepper, device: torch.device) -> None:
        self._mesh, self._stepper = mesh, stepper
        self._clock = StepClock(device)
        self._steps = 0

    def step(self) -> list[int] | None:
        """Count a step; after the last timed one the data ranks' micro-batches, where they gain; collective then."""
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self._stepper.pass_clock = self._clock
        if self._steps != WARMUP_STEPS + TIMED_STEPS:
            return None
        self._stepper.pass_clock = None
        self._clock.synchronize()
        mine = (data_rank(self._mesh), statistics.median(self._clock.durations_s))
        by_rank = [mine] * self._mesh.size()
        if self._mesh.size() > 1:
            dist.all_gather_object(by_rank, mine)
        ranks, before = data_size(self._mesh), self._stepper.grad_accum
        # Tensor and context ranks of a data rank wait for their slowest.
        pass_s = [max(seconds for place, seconds in by_rank if place == rank) for rank in range(ranks)]
        passes = fastest_split(pass_s, ranks * before)
        now_s = max(pass_s) * before
        then_s = max(seconds * number for seconds, number in zip(pass_s, passes, strict=True))
        measured = f"micro-batches take {min(pass_s):.4g} to {max(pass_s):.4g} s by rank"
        if then_s > now_s * (1 - LEAST_GAIN):
            logger.info("balance: %s; the shares stay", measured)
            return None
        logger.info(
            "balance: %s; micro-batches a step by data rank are now %s, before %d each: computation of the slowest "
            "rank %.4g s, before %.4g s", measured, passes, before, then_s, now_s,
        )  # fmt: skip
        return passes
