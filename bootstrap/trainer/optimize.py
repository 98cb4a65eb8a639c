"""Optimizer, learning-rate schedule, gradient clipping and fp16 loss scale."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.models import library
from bootstrap.training.errors import TrainingError

# Last part of a wsd schedule, in which the rate falls (arXiv:2405.18392 finds 10 to 20% enough).
DECAY_SHARE = 0.2
# Cosine and linear end at this part of the peak rate.
LAST_SHARE = 0.1


class _OnOwnParts:
    """Updates this rank's part of each DTensor as a plain tensor: the dispatch of 250 DTensors takes the host 14 ms."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:  # parameters, gradients, moments, numbers of steps
            tensors[:] = map(local, tensors)
        return has_complex


class AdamW(_OnOwnParts, torch.optim.AdamW):
    """torch's AdamW."""


class Adam(_OnOwnParts, torch.optim.Adam):
    """torch's Adam."""


def build_optimizer(config: TrainerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer; vectors (norms, biases) have no weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim >= 2) is wanted] for wanted in (True, False))
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in decays if parameters]
    # A step that is not fused keeps about 4 bytes a parameter more, which the plan does not count.
    fused = next(model.parameters()).is_cuda
    match config.optimizer:
        case "adamw":
            return AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=fused)
        case "adam":
            return Adam(groups, lr=config.learning_rate, fused=fused)
        case "adamw8bit":
            optimizer: torch.optim.Optimizer = library("bitsandbytes").optim.AdamW8bit(
                groups, lr=config.learning_rate, betas=(0.9, 0.95)
            )
            return optimizer
        case "sgd":
            # torch 2.11 has no fused SGD of DTensors.
            fused = fused and not any(isinstance(p, DTensor) for p in model.parameters())
            return torch.optim.SGD(groups, lr=config.learning_rate, momentum=0.9, fused=fused)
        case _:
            return torch.optim.Adafactor(groups, lr=config.learning_rate)


def build_scheduler(config: TrainerConfig, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Build the schedule; call its ``step()`` after each optimizer step."""
    return LambdaLR(optimizer, lambda step: rate_share(config, step))


def rate_share(config: TrainerConfig, step: int) -> float:
    """Share of the peak learning rate in ``step``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    match config.schedule:
        case "cosine":
            return LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        case "linear":
            return LAST_SHARE + (1 - LAST_SHARE) * max(0.0, 1 - done)
        case "wsd":
            return min(1.0, max(0.0, 1 - done) / DECAY_SHARE)
        case _:
            return 1.0


class DivergedError(TrainingError):
    """Loss or gradients are not finite; another start from the same checkpoint would come to the same."""

    def __init__(self, finding: str) -> None:
        super().__init__(
            f"{finding}. Look at the samples, and try a lower --learning-rate, more --warmup-steps or --clip-norm 1"
        )


class LossScale:
    """Dynamic loss scale of fp16.

    torch's GradScaler looks for infinities on each rank by itself; ranks that hold parts of the gradients must agree,
    so here the norm of all gradients decides.
    """

    GROWTH_INTERVAL = 2000
    # Megatron-LM and DeepSpeed end at it too: gradients that overflow unscaled are not too small for fp16.
    LEAST = 1.0

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 2.0**16 if enabled else 1.0
        self._finite_steps = 0

    def takes_step(self, norm: torch.Tensor) -> bool:
        """Update the scale; False where the optimizer must skip the step. Waits for the GPU.

        DivergedError: the gradients overflow at the least scale.
        """
        if not self.enabled:
            return True
        finite = bool(norm.isfinite())
        self._finite_steps = self._finite_steps + 1 if finite else 0
        if not finite:
            if self.value <= self.LEAST:
                raise DivergedError(
                    f"the gradients' norm is {float(norm)}, and steps that were left out halved fp16's loss scale to "
                    f"{self.value:g}; --precision bf16 has the range of fp32"
                )
            self.value /= 2
        elif self._finite_steps % self.GROWTH_INTERVAL == 0:
            self.value *= 2
        return finite

    def state_dict(self) -> dict[str, Any]:
        """State to save."""
        return {"value": self.value, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.value, self._finite_steps = state["value"], state["finite_steps"]


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Norm of all gradients together, over all ranks, float32 on the device."""
    held: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            held.setdefault(_holders(parameter.grad), []).append(local(parameter.grad))
    # Each of n ranks with the same part counts 1 / n of it. A tensor of shares would wait for the GPU to be copied.
    squares = [torch.stack(torch._foreach_norm(same)).float().square().sum() / (n or 1) for n, same in held.items()]
    total = torch.stack(squares).sum()
    if any(held):
        dist.all_reduce(total)
    return total.sqrt()


def scale_gradients(parameters: list[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply all gradients by a scalar on the device."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor.float())  # one kernel for many, which takes no factor of another type


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Part of a tensor that this rank holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _holders(gradient: torch.Tensor) -> int:
    """Ranks that hold the same part of a distributed gradient; 0 where it is a plain tensor, the same on all ranks."""
    if not isinstance(gradient, DTensor):
        return 0
    mesh = gradient.device_mesh
    return math.prod(mesh.size(number) for number, place in enumerate(gradient.placements) if place.is_replicate())
