"""One training step and one evaluation of a laid-out model: forward and backward passes, accumulation, clipping.

The loss is the mean over all labels of the global batch, whatever the layout and however many labels a sample has.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bootstrap.trainer import kernels
from bootstrap.trainer.clock import StepClock
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.data.dataset import Batch
from bootstrap.trainer.loss import IGNORED, cross_entropy
from bootstrap.trainer.mesh import data_rank, data_size
from bootstrap.trainer.optimize import LossScale, build_optimizer, build_scheduler, gradient_norm, scale_gradients
from bootstrap.trainer.parallelize import HALF, autocasts
from bootstrap.trainer.tensor_parallel import first_token, partial_parameters, sum_gradients

logger = logging.getLogger(__name__)

# For --balance measured: steps before the passes are timed (compilation, autotuning, cold caches), and steps that are.
BALANCE_WARMUP_STEPS = 5
BALANCE_TIMED_STEPS = 10
# A smaller gain is within the scatter of pass times, and with the same shares a resume stays bit-equal.
LEAST_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class StepResult:
    """Mean loss of the global batch, norm of its gradients (0 without clipping), both on the device; the rate used."""

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    learning_rate: float


class Stepper:
    """Runs steps of one model on this rank; each call is collective."""

    def __init__(self, config: TrainerConfig, mesh: DeviceMesh, model: nn.Module, device: torch.device) -> None:
        self._config, self._mesh, self._model, self._device = config, mesh, model, device
        self.optimizer = build_optimizer(config, model)
        self.scheduler = build_scheduler(config, self.optimizer)
        self.scale = LossScale(config.precision == "fp16")
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._autocast = HALF.get(config.precision) if autocasts(config, mesh) else None
        self._tensor_group = mesh.get_group("tp") if config.tensor_parallel > 1 else None
        self._partial = partial_parameters(model)
        self._compiles_loss = config.compiled or self._can_compile_loss()
        # Labels of the global batch, if none is masked. DDP and FSDP2 take the mean of the ranks that divide samples
        # and sequences; a gradient must be the sum.
        self._labels = config.global_batch * config.seq_len
        self._summing = data_size(mesh) * mesh["cp"].size()
        self._tensor_ranks = mesh["tp"].size()
        self._first_label = first_token(mesh["tp"], config.architecture.get("vocab_size", 0))
        self.grad_accum = config.grad_accum
        """Micro-batches of this rank in a step."""
        self.pass_clock: StepClock | None = None
        """Times forward and backward passes that wait for no other data rank, where set."""

    def _can_compile_loss(self) -> bool:
        if self._config.family in ("cnn", "image"):  # few logits
            return False
        can = kernels.can_compile(self._device.type)
        if self._tensor_group is not None:
            # The written-out loss exchanges parts once a turn, the compiled one once.
            votes = torch.tensor(can, dtype=torch.int32, device=self._device)
            dist.all_reduce(votes, dist.ReduceOp.MIN, self._tensor_group)
            can = bool(votes)
        return can

    def step(self, micro_batches: Iterable[Batch]) -> StepResult:
        """Train on this rank's micro-batches of one step, ``grad_accum`` of them."""
        config = self._config
        # Not torch.tensor, which copies from the host: that would wait for the whole step before.
        weight = torch.full((), self._summing * self.scale.value / self._labels, device=self._device)
        sums = torch.zeros(2, device=self._device, dtype=torch.float64)
        timed = self._timed_passes()
        for number, batch in enumerate(micro_batches):
            last = number == self.grad_accum - 1
            if number in timed:
                timed[number].restart()
            with self._reducing(last):
                loss, labels = self._loss(batch, weight)
                loss.backward()  # type: ignore[no-untyped-call]
            if number in timed:
                timed[number].tick()
            sums += torch.stack([loss.detach(), labels.float()])
        if self._tensor_group is not None:
            sum_gradients(self._partial, self._tensor_group)
        self._sum_over_samples(sums)
        # The masked labels of an encoder differ from step to step; 1 exactly where none is masked.
        factor = self._labels / (sums[1] * self.scale.value)
        norm = torch.zeros((), device=self._device)
        if config.clip_norm or self.scale.enabled:
            norm = gradient_norm(self._parameters) * factor
        if config.clip_norm:
            factor = factor * (config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if config.clip_norm or config.family == "encoder" or self.scale.enabled:
            scale_gradients(self._parameters, factor)
        if self.scale.takes_step(norm):
            self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss=sums[0] / sums[1], gradient_norm=norm, learning_rate=rate)

    def measured_shares(self) -> list[int] | None:
        """Micro-batches of each data rank by the passes that ``pass_clock`` timed, where they gain; collective."""
        clock, self.pass_clock = self.pass_clock, None
        assert clock is not None
        clock.synchronize()
        mine = (data_rank(self._mesh), statistics.median(clock.durations_s))
        by_rank = [mine] * self._mesh.size()
        if self._mesh.size() > 1:
            dist.all_gather_object(by_rank, mine)
        ranks, before = data_size(self._mesh), self.grad_accum
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

    def rehearse(self, batch: Batch) -> None:
        """Run one forward and backward pass, after which DDP's buckets have their final layout."""
        loss, _ = self._loss(batch, torch.ones((), device=self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Batch]) -> torch.Tensor:
        """Mean loss of this and all other ranks' micro-batches, on the device."""
        self._model.eval()
        sums = torch.zeros(2, device=self._device, dtype=torch.float64)
        for batch in micro_batches:
            loss, labels = self._loss(batch, torch.ones((), device=self._device))
            sums += torch.stack([loss, labels.float()])
        self._sum_over_samples(sums)
        self._model.train()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return sums[0] / sums[1]

    def _loss(self, batch: Batch, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses of a micro-batch's part on this rank, and the number of its labels."""
        batch = self._part_of_sequences(batch)
        labels = batch.pop("labels")
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            if self._config.family == "cnn":
                output = self._model(batch["images"])
            elif self._config.family == "image":
                output = self._model(pixel_values=batch["images"]).logits
            else:
                output = self._model(**batch).logits
        loss = cross_entropy(
            output,
            labels,
            weight=weight,
            group=self._tensor_group,
            first=self._first_label,
            compiled=self._compiles_loss,
        )
        return loss, (labels != IGNORED).sum()

    def _part_of_sequences(self, batch: Batch) -> Batch:
        batch = dict(batch)
        ranks, part = self._mesh["cp"].size(), self._mesh["cp"].get_local_rank()
        if ranks > 1 or self._config.sequence_parallel:
            tokens = self._config.seq_len // ranks
            positions = torch.arange(self._config.seq_len, device=self._device)[None]
            batch = {name: tensor[:, part * tokens : (part + 1) * tokens] for name, tensor in batch.items()}
            batch["position_ids"] = positions[:, part * tokens : (part + 1) * tokens]
        return batch

    def _timed_passes(self) -> dict[int, StepClock]:
        """Clock by number of the pass: not of the last, which reduces, nor of the first, in which ZeRO-1 gathers."""
        if self.pass_clock is None:
            return {}
        return dict.fromkeys(range(1, self.grad_accum - 1) or range(self.grad_accum - 1), self.pass_clock)

    def _reducing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Reduce gradients after the last micro-batch only, where the layout has room for the sum of all before."""
        model = self._model
        if isinstance(model, DistributedDataParallel):
            return contextlib.nullcontext() if last else model.no_sync()
        if isinstance(model, FSDPModule):
            if self._config.sharding in ("ddp", "zero1"):
                model.set_requires_gradient_sync(last)
            if self._config.sharding in ("zero1", "zero2"):
                model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
        return contextlib.nullcontext()

    def _sum_over_samples(self, sums: torch.Tensor) -> None:
        """Sum over all ranks; tensor ranks, which have the same samples and losses, count once."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
            sums /= self._tensor_ranks


def fastest_split(pass_s: Sequence[float], passes: int) -> list[int]:
    """Share out ``passes`` micro-batches, at least one a rank, so that the slowest rank ends first.

    ``pass_s``: seconds of a micro-batch on each rank.
    """
    numbers = [1] * len(pass_s)
    for _ in range(passes - len(pass_s)):
        first = min(range(len(pass_s)), key=lambda rank: (numbers[rank] + 1) * pass_s[rank])
        numbers[first] += 1
    return numbers
