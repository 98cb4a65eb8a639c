"""Batch of each data rank: equal, by the given shares, or by the speed that each rank has in the first steps."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bootstrap.contract.shares import IN_STEP, RankBatch, parse_shares
from bootstrap.trainer.clock import StepClock
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.loop import Stepper
from bootstrap.trainer.mesh import data_rank, data_size, with_batches
from bootstrap.training.errors import ConfigurationError

logger = logging.getLogger(__name__)

INSTANCE_TYPE_VARIABLE = "GPUFLEET_INSTANCE_TYPE"
# Steps before the passes are timed (compilation, autotuning, cold caches), and steps that are.
WARMUP_STEPS = 5
TIMED_STEPS = 10
# A smaller gain is within the scatter of pass times, and with the same shares a resume stays bit-equal.
LEAST_GAIN = 0.02
# Halvings of the interval in which the shortest step lies: 2**-40 of it is below the clock's resolution.
_HALVINGS = 40


def rank_batches(config: TrainerConfig, mesh: DeviceMesh, *, micro_batch_limit: int | None) -> tuple[RankBatch, ...]:
    """Batch of every data rank, together the global batch; collective.

    Raises:
        ConfigurationError: sizes that do not add up; shares that differ between ranks; nothing to balance.
    """
    ranks = data_size(mesh)
    if config.shares:
        batches = _given(config, mesh)
        if micro_batch_limit is not None and max(batch.micro_batch for batch in batches) > micro_batch_limit:
            batches = limited(batches, micro_batch_limit, in_step=config.sharding in IN_STEP)
    else:
        equal = with_batches(config, ranks, micro_batch_limit=micro_batch_limit)
        batches = (RankBatch(equal.micro_batch, equal.grad_accum),) * ranks
    if config.balance == "measured" and min(batch.grad_accum for batch in batches) < 2:
        raise ConfigurationError(
            "--balance measured moves whole micro-batches between ranks and times those that do not reduce gradients, "
            f"and a rank has one micro-batch of {batches[0].micro_batch} samples: give a smaller --micro-batch, at "
            "most half of a rank's samples"
        )
    return batches


def with_batch(config: TrainerConfig, batches: Sequence[RankBatch], rank: int) -> TrainerConfig:
    """Fill in the batch sizes of one data rank."""
    own = batches[rank]
    return dataclasses.replace(
        config,
        global_batch=sum(batch.samples for batch in batches),
        micro_batch=own.micro_batch,
        grad_accum=own.grad_accum,
        activation_checkpointing=own.checkpointing or config.activation_checkpointing,
    )


def _given(config: TrainerConfig, mesh: DeviceMesh) -> tuple[RankBatch, ...]:
    ranks, place = data_size(mesh), data_rank(mesh)
    shares = parse_shares(config.shares)
    if isinstance(shares, list):
        if len(shares) != ranks:
            raise ConfigurationError(
                f"--shares has {len(shares)} entries, and the run {ranks} data ranks: give one each"
            )
        own = shares[place]
    else:
        name = os.environ.get(INSTANCE_TYPE_VARIABLE, "")
        if name not in shares:
            raise ConfigurationError(
                f"--shares names {', '.join(shares)}, and {INSTANCE_TYPE_VARIABLE} of this node is {name!r}: give its "
                "share, or a list by data rank"
            )
        own = shares[name]
    mine = (place, own, (config.shares, config.global_batch, config.balance))
    by_rank = [mine] * mesh.size()
    if mesh.size() > 1:
        dist.all_gather_object(by_rank, mine)
    if len(different := {settings for *_, settings in by_rank}) > 1:
        raise ConfigurationError(
            f"--shares, --global-batch and --balance differ between ranks: {sorted(different)}; give all the same"
        )
    batches = {number: batch for number, batch, *_ in by_rank}
    if any(batches[number] != batch for number, batch, *_ in by_rank):
        raise ConfigurationError("tensor or context ranks of one data rank are on two instance types of --shares")
    given = tuple(batches[number] for number in range(ranks))
    total = sum(batch.samples for batch in given)
    if config.global_batch in (0, total):
        return given
    passes = None
    if isinstance(shares, dict) and config.sharding not in IN_STEP:
        # Nodes came or went. The shares say how fast the ranks are, so they are scaled to the new number.
        pass_s = [1 / batch.grad_accum for batch in given]
        passes = fastest_split(pass_s, [batch.micro_batch for batch in given], config.global_batch)
    if passes is None:
        raise ConfigurationError(
            f"--shares of {ranks} data ranks are {total} samples, and --global-batch is {config.global_batch}: change "
            "one of them"
        )
    return with_passes(given, passes)


def with_passes(batches: Sequence[RankBatch], passes: Sequence[int]) -> tuple[RankBatch, ...]:
    """Give each rank another number of micro-batches of its size."""
    return tuple(batch._replace(grad_accum=number) for batch, number in zip(batches, passes, strict=True))


def limited(batches: Sequence[RankBatch], limit: int, *, in_step: bool) -> tuple[RankBatch, ...]:
    """Divide the same shares into micro-batches of at most ``limit`` samples, as many on each rank if ``in_step``."""
    if not in_step:
        sizes = [
            max(size for size in range(1, min(limit, batch.micro_batch) + 1) if batch.samples % size == 0)
            for batch in batches
        ]
        return tuple(
            batch._replace(micro_batch=size, grad_accum=batch.samples // size)
            for batch, size in zip(batches, sizes, strict=True)
        )
    common, largest = math.gcd(*(batch.samples for batch in batches)), max(batch.samples for batch in batches)
    for passes in range(batches[0].grad_accum, common + 1):
        if common % passes == 0 and largest <= limit * passes:
            return tuple(batch._replace(micro_batch=batch.samples // passes, grad_accum=passes) for batch in batches)
    raise ConfigurationError(
        f"out of GPU memory, and the shares {[batch.samples for batch in batches]} have no common number of "
        f"micro-batches of at most {limit} samples: take --sharding zero1, or other --shares"
    )


def fastest_split(pass_s: Sequence[float], micro_batches: Sequence[int], global_batch: int) -> list[int] | None:
    """Find the numbers of micro-batches, at least one a rank, whose slowest rank ends first; None if none add up.

    Args:
        pass_s: seconds of one micro-batch on each rank.
        micro_batches: samples of each rank's micro-batch.
        global_batch: samples of a step.
    """
    most = [global_batch // size for size in micro_batches]

    def reachable(limit_s: float) -> list[int]:
        """Sums of the first ranks' samples within ``limit_s``, a bit a sum, from no rank to all."""
        sums = [1]
        for seconds, size, cap in zip(pass_s, micro_batches, most, strict=True):
            further = min(cap, max(1, int(limit_s / seconds + 1e-9))) - 1
            bits, covered = sums[-1] << size, 0
            while covered < further:  # doubles the micro-batches that are covered
                step = min(covered + 1, further - covered)
                bits |= bits << step * size
                covered += step
            sums.append(bits & ((2 << global_batch) - 1))
        return sums

    low, high = max(pass_s), max(seconds * cap for seconds, cap in zip(pass_s, most, strict=True))
    if not reachable(high)[-1] >> global_batch & 1:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if reachable(middle)[-1] >> global_batch & 1:
            high = middle
        else:
            low = middle
    sums, left, passes = reachable(high), global_batch, [0] * len(pass_s)
    speed = [size / seconds for size, seconds in zip(micro_batches, pass_s, strict=True)]
    for rank in range(len(pass_s) - 1, -1, -1):
        size = micro_batches[rank]
        # The number nearest to the rank's part of the speed of those still open, among those that lead on.
        wanted = left * speed[rank] / sum(speed[: rank + 1]) / size
        allowed = max(1, int(high / pass_s[rank] + 1e-9))
        numbers = sorted(range(1, min(allowed, left // size) + 1), key=lambda number: abs(number - wanted))
        passes[rank] = next(number for number in numbers if sums[rank] >> (left - number * size) & 1)
        left -= passes[rank] * size
    return passes


class Balance:
    """Times the micro-batches of this process's first steps, and sets the shares once."""

    def __init__(self, batches: Sequence[RankBatch], mesh: DeviceMesh, stepper: Stepper, device: torch.device) -> None:
        self._batches, self._mesh, self._stepper = tuple(batches), mesh, stepper
        self._clock = StepClock(device)
        self._steps = 0

    def step(self) -> tuple[RankBatch, ...] | None:
        """Count a step: the new batches after the last timed one, where they are worth it; collective on that one."""
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
        # Tensor and context ranks of a data rank wait for their slowest.
        pass_s = [max(seconds for place, seconds in by_rank if place == rank) for rank in range(len(self._batches))]
        return self._weigh(pass_s)

    def _weigh(self, pass_s: list[float]) -> tuple[RankBatch, ...] | None:
        before = [batch.grad_accum for batch in self._batches]
        sizes, total = [batch.micro_batch for batch in self._batches], sum(batch.samples for batch in self._batches)
        passes = fastest_split(pass_s, sizes, total)
        assert passes is not None, "the present shares add up"
        now_s, then_s = (
            max(seconds * number for seconds, number in zip(pass_s, numbers, strict=True))
            for numbers in (before, passes)
        )
        measured = f"micro-batches take {min(pass_s):.4g} to {max(pass_s):.4g} s by rank"
        if then_s > now_s * (1 - LEAST_GAIN):
            logger.info("balance: %s; the shares stay", measured)
            return None
        logger.info(
            "balance: %s; micro-batches a step by data rank are now %s, before %s: computation of the slowest rank "
            "%.4g s, before %.4g s", measured, passes, before, then_s, now_s,
        )  # fmt: skip
        return with_passes(self._batches, passes)
