"""Whole run of the reference trainer: device and process group, model, data, loop, evaluation."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from bootstrap.trainer import oom
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.loop import Stepper
from bootstrap.trainer.mesh import build_mesh, data_rank, data_size, with_batches
from bootstrap.trainer.models import build
from bootstrap.trainer.optimize import LossScale, build_optimizer, build_scheduler
from bootstrap.trainer.parallelize import parallelize

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """Parts of one run on this rank; ``config`` has the batch sizes of the ranks there are."""

    config: TrainerConfig
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    scale: LossScale
    stepper: Stepper
    data_rank: int
    data_size: int


def set_device(config: TrainerConfig) -> torch.device:
    """Choose this rank's device, and the arithmetic of 32-bit products."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = config.precision != "fp32"
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Convolutions of one shape: the fastest algorithm, measured once.
    torch.backends.cudnn.benchmark = config.family == "cnn" and not config.deterministic
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def assemble(config: TrainerConfig, device: torch.device) -> Assembled:
    """Build model, layout, optimizer and step on this rank; collective, after ``init_process_group``."""
    mesh = build_mesh(config, world_size=dist.get_world_size(), device_type=device.type)
    ranks, rank = data_size(mesh), data_rank(mesh)
    config = with_batches(config, ranks, micro_batch_limit=oom.micro_batch_limit())
    model = parallelize(build(config), config, mesh, device)
    # Dropout differs between data ranks; tensor ranks drop the same elements of what they hold whole.
    torch.manual_seed(config.seed + 1 + rank)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer)
    scale = LossScale(config.precision == "fp16")
    return Assembled(
        config=config,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scale=scale,
        stepper=Stepper(config, mesh, model, optimizer, scheduler, scale, device),
        data_rank=rank,
        data_size=ranks,
    )


def init_process_group(device: torch.device) -> None:
    """Join the other ranks: NCCL for GPU tensors, gloo for those of the CPU."""
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
