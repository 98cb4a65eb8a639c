"""Gradient compression by DDP's communication hooks, for slow links (docs/trainer.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bootstrap.contract.trainer import powersgd_rank
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.state import Stateful

# PowerSGD's authors and torch's documentation leave the first tenth of the steps uncompressed, 1,000 at most:
# https://docs.pytorch.org/docs/2.11/ddp_comm_hooks.html
POWERSGD_WARMUP_SHARE = 0.1
POWERSGD_WARMUP_STEPS = 1000


def compress_gradients(
    model: nn.Module, compression: str, *, precision: str, steps: int, warmup_steps: int = 0
) -> dict[str, Stateful]:
    """Register the hook of ``compression`` (none, bf16, fp16, powersgd-RANK); call it before the first forward pass.

    Returns what a checkpoint must hold for an exact resume: ``extra`` of SpotTolerantRun.

    Raises:
        ConfigurationError: the model is not wrapped in DistributedDataParallel; PowerSGD with fp16.
    """
    if compression == "none":
        return {}
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"gradient compression {compression} is a hook of DistributedDataParallel, and this layout reduces its "
            "gradients without it (sharded states, or one rank): use --sharding ddp, or --gradient-compression none"
        )
    group = model.process_group
    if compression in ("bf16", "fp16"):
        hook = default_hooks.bf16_compress_hook if compression == "bf16" else default_hooks.fp16_compress_hook
        model.register_comm_hook(group, hook)
        return {}
    rank = powersgd_rank(compression)
    if not rank:
        raise ConfigurationError(f"gradient compression {compression!r}: expected none, bf16, fp16 or powersgd-RANK")
    if precision == "fp16":
        raise ConfigurationError(
            "PowerSGD keeps what it left out of a gradient for the next step, and fp16's loss scale changes between "
            "steps: use --precision bf16, or --gradient-compression bf16"
        )
    warmup = max(warmup_steps, min(POWERSGD_WARMUP_STEPS, int(steps * POWERSGD_WARMUP_SHARE)))
    compressor = PowerSgd(model, rank=rank, warmup_steps=warmup)
    # DDP refuses annotations that are text, as this module's are.
    model.register_comm_hook(None, lambda _, bucket: compressor.hook(bucket))
    return {"powersgd": compressor}


class PowerSgd:
    """PowerSGD with a state that a checkpoint can hold.

    Each rank keeps the part of its gradients that compression left out. Only the mean over the ranks of these errors
    enters the reduced gradient (every product with the low-rank factors is linear and averaged), so ``state_dict`` sets
    each rank's error to the mean: the checkpoint has one copy, and fits any number of ranks.
    """

    def __init__(self, model: DistributedDataParallel, *, rank: int, warmup_steps: int) -> None:
        self._group = model.process_group
        self._device = next(model.parameters()).device
        self._is_first_pass = True
        # At least 2: DDP lays its buckets out anew after the first backward pass.
        self._state = PowerSGDState(
            self._group, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, warmup_steps), random_seed=0
        )

    def hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Reduce one bucket; the first pass of a process is not compressed, as its buckets are not the final ones."""
        if self._is_first_pass:
            self._is_first_pass = not bucket.is_last()
            return default_hooks.allreduce_hook(self._group, bucket)
        error = self._state.error_dict.get(bucket.index())
        if error is not None and error.numel() != bucket.buffer().numel():
            raise ConfigurationError(
                f"the checkpoint's PowerSGD state is of other gradient buckets ({error.numel()} elements, now "
                f"{bucket.buffer().numel()}): keep DDP's bucket_cap_mb, or resume with another compression"
            )
        future = powerSGD_hook(self._state, bucket)
        if self._device.type == "cpu":
            # PowerSGD's later collectives start from gloo's threads: with two buckets on their way, in another order on
            # each rank. NCCL's futures call back at once, in this thread.
            future.wait()
        return future

    def state_dict(self) -> Mapping[str, Any]:
        """State of the next step; collective."""
        errors = self._state.error_dict
        for bucket in sorted(errors):
            mean = errors[bucket] / self._group.size()
            dist.all_reduce(mean, group=self._group)
            errors[bucket] = mean
        kind, keys, position, *rest = self._state.rng.get_state(legacy=True)
        return {
            "step": self._state.iter,
            "random": [kind, [int(key) for key in keys], int(position), *rest],
            "errors": dict(errors),
            "qs": dict(self._state.q_memory_dict),
            "p_elements": {bucket: p.numel() for bucket, p in self._state.p_memory_dict.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._state.iter = state_dict["step"]
        self._state.rng.set_state(tuple(state_dict["random"]))
        self._state.error_dict = {bucket: error.to(self._device) for bucket, error in state_dict["errors"].items()}
        qs = {bucket: q.to(self._device) for bucket, q in state_dict["qs"].items()}
        self._state.q_memory_dict = qs
        # Every pass computes the other factors anew; only their memory counts.
        self._state.p_memory_dict = {
            bucket: qs[bucket].new_empty(elements) for bucket, elements in state_dict["p_elements"].items()
        }
