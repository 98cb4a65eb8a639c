"""Whole run of the reference trainer: device and process group, model, data, loop, evaluation, final weights."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from bootstrap.trainer import oom
from bootstrap.trainer.adapters import choose_trained
from bootstrap.trainer.clock import StepClock
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.data.dataset import Batch, Dataset
from bootstrap.trainer.data.loader import Loader
from bootstrap.trainer.data.open import open_samples as open_samples
from bootstrap.trainer.loop import BALANCE_TIMED_STEPS, BALANCE_WARMUP_STEPS, Stepper
from bootstrap.trainer.measured import MEASURED_STEPS, WARMUP_STEPS, record
from bootstrap.trainer.mesh import build_mesh, data_rank, data_size, with_batches
from bootstrap.trainer.models import build
from bootstrap.trainer.optimize import rate_share
from bootstrap.trainer.parallelize import parallelize
from bootstrap.trainer.report import Report
from bootstrap.trainer.weights import load_weights, save_adapters, save_weights, stage_weights, weights_digest
from bootstrap.training import SpotTolerantRun
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.facts import config_facts
from bootstrap.training.stores import URI_VARIABLE, Store, open_store

logger = logging.getLogger(__name__)

# Settings of a group of parameters that flags give, and a checkpoint holds too.
OF_THIS_START = ("initial_lr", "weight_decay")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """Parts of one run on this rank; ``config`` has the batch sizes of a data rank."""

    config: TrainerConfig
    device: torch.device
    mesh: DeviceMesh
    model: nn.Module
    stepper: Stepper
    facts: dict[str, Any]


def train(config: TrainerConfig) -> None:
    """Train to the last step, from the newest checkpoint where there is one; every rank calls it."""
    device = set_device(config)
    # Staging data may take longer than process groups wait.
    data = open_samples(config)
    held_out = open_samples(config, "val") if config.evaluate_every else None
    init_process_group(device)
    store = open_store(os.environ.get(URI_VARIABLE) or str(Path(config.out) / "checkpoints"))
    limit = oom.MicroBatchLimit(config, store)
    run = assemble(config, device, limit.value)
    with limit.halving(run.config):
        train_assembled(run, store, data, held_out)
    dist.destroy_process_group()


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
    torch.backends.cudnn.benchmark = config.family in ("cnn", "image") and not config.deterministic
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def init_process_group(device: torch.device) -> None:
    """Join the other ranks: NCCL for GPU tensors, gloo for those of the CPU."""
    # Without device_id: with it, init_device_mesh splits the gloo group with NCCL's options, and the process dies of
    # SIGSEGV (two H200, torch 2.11.0, 2026-11-22).
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def assemble(config: TrainerConfig, device: torch.device, micro_batch_limit: int | None = None) -> Assembled:
    """Build model, layout, optimizer and step on this rank; collective, after ``init_process_group``."""
    mesh = build_mesh(config, world_size=dist.get_world_size(), device_type=device.type)
    config = with_batches(config, data_size(mesh), micro_batch_limit=micro_batch_limit)
    # Every rank calls it: local rank 0 copies, the others wait.
    weights = str(stage_weights(config.weights)) if config.weights else ""
    whole = build(config)
    facts = run_facts(config, whole, weights)
    if config.family != "cnn":
        choose_trained(whole, config)
    model = parallelize(whole, config, mesh, device, weights)
    if weights:
        load_weights(model, weights)
    # Data ranks need different dropout; tensor ranks must drop the same elements of activations that all of them hold.
    torch.manual_seed(config.seed + 1 + data_rank(mesh))
    return Assembled(
        config=config, device=device, mesh=mesh, model=model, stepper=Stepper(config, mesh, model, device), facts=facts
    )


def run_facts(config: TrainerConfig, model: nn.Module, weights: str) -> dict[str, Any]:
    """Facts that a resume must have again, and that no tensor's shape tells; ``weights``: as staged."""
    settings: Any = getattr(model, "config", None)
    architecture = config.architecture if settings is None else json.loads(settings.to_json_string(use_diff=False))
    facts: dict[str, Any] = {"seq_len": config.seq_len, "target_len": config.seq_len, "method": config.method}
    # A resume may leave weights out where the checkpoint has all of them.
    if weights or not config.tuning.trains_all:
        facts["weights"] = weights_digest(weights) if weights else ""
    if config.tuning.adapts:
        facts["lora_alpha"] = config.lora_alpha
    return facts | config_facts(architecture, "architecture.")


def train_assembled(parts: Assembled, store: Store, data: Dataset, held_out: Dataset | None) -> None:
    """Train the parts on ``data`` to the last step, and write the final weights beside the checkpoints."""
    config, stepper, device = parts.config, parts.stepper, parts.device
    clock = StepClock(device)
    evaluated = _held_out_of_rank(parts, held_out) if held_out is not None else []
    own = [{name: group[name] for name in OF_THIS_START} for group in parts.stepper.optimizer.param_groups]

    def rehearse() -> None:
        stepper.rehearse(data.batch(torch.arange(config.micro_batch), device))

    with (
        Report(config, clock=clock, on_loss=lambda step, loss: run.report_loss(step, loss)) as report,
        SpotTolerantRun(
            parts.model,
            stepper.optimizer,
            mesh=parts.mesh,
            scheduler=stepper.scheduler,
            scaler=stepper.scale if stepper.scale.enabled else None,
            dataset_size=len(data),
            global_batch=config.global_batch,
            facts={**parts.facts, "data": data.digest},
            store=store,
            seed=config.seed,
            rehearsal=rehearse if isinstance(parts.model, DistributedDataParallel) else None,
            # The base is in --weights, or follows from the seed.
            save_frozen=False,
        ) as run,
        Loader(data, run.sample_indices, micro_batch=config.micro_batch, device=device) as loader,
    ):
        _follow_flags(parts, own)
        if run.step > config.steps:
            logger.warning(
                "%s has a checkpoint of step %d, and --steps is %d: nothing is left to train",
                *(store.uri, run.step, config.steps),
            )
        clock.restart()
        before, waited_s, has_equal_shares = run.step - 1, 0.0, True
        for step in run.steps(config.steps):
            result = stepper.step(loader.step(step))
            clock.tick()
            report.step(step + 1, result, data_wait_s=loader.wait_s)
            if step - before == WARMUP_STEPS:
                waited_s = loader.wait_s
            # A row of unequal ranks would tell the calibration the speed of none of them.
            if step - before == WARMUP_STEPS + MEASURED_STEPS and has_equal_shares:
                record(config, parts.model, clock, store, waited_s=loader.wait_s - waited_s)
            if config.balance == "measured" and step - before == BALANCE_WARMUP_STEPS:
                stepper.pass_clock = StepClock(device)
            is_timed = config.balance == "measured" and step - before == BALANCE_WARMUP_STEPS + BALANCE_TIMED_STEPS
            if is_timed and (passes := stepper.measured_shares()) is not None:
                has_equal_shares = False
                loader.close()  # has fetched ahead for the shares of before
                run.set_shares([config.micro_batch * number for number in passes])
                stepper.grad_accum = passes[data_rank(parts.mesh)]
            if held_out is not None and (step + 1) % config.evaluate_every == 0:
                if (loss := _evaluate(run, parts, held_out, evaluated)) is not None:
                    report.evaluation(step + 1, loss)
                clock.restart()
    uri = store.uri.rstrip("/")
    save_weights(parts.model, f"{uri}/weights", architecture=config.architecture)
    if config.tuning.adapts:
        save_adapters(parts.model, f"{uri}/adapters")


def _follow_flags(parts: Assembled, own: list[dict[str, Any]]) -> None:
    """Take rate and weight decay from this start's flags: a checkpoint brings those of the start that wrote it."""
    rate = rate_share(parts.config, parts.stepper.scheduler.last_epoch)
    for group, settings in zip(parts.stepper.optimizer.param_groups, own, strict=True):
        group |= settings
        group["lr"] = settings["initial_lr"] * rate
    parts.stepper.scheduler.base_lrs = [settings["initial_lr"] for settings in own]


def _evaluate(
    run: SpotTolerantRun, parts: Assembled, held_out: Dataset, indices: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Held-out loss; None where a notice comes meanwhile."""
    is_whole = True

    def batches() -> Iterator[Batch]:
        nonlocal is_whole
        for part in indices:
            if not (is_whole := run.goes_on()):
                return
            yield held_out.batch(part, parts.device)

    loss = parts.stepper.evaluate(batches())
    return loss if is_whole else None


def _held_out_of_rank(parts: Assembled, held_out: Dataset) -> Sequence[torch.Tensor]:
    """Indices of this rank's held-out micro-batches: the same in each evaluation, as many on each rank."""
    config, ranks, rank = parts.config, data_size(parts.mesh), data_rank(parts.mesh)
    each = min(config.evaluation_steps * config.global_batch, len(held_out)) // ranks
    if each == 0:
        raise ConfigurationError(
            f"--train-data {config.train_data} has {len(held_out)} held-out samples for {ranks} data ranks; "
            "give at least one a rank, or --evaluate-every 0"
        )
    return torch.split(torch.arange(rank * each, (rank + 1) * each), config.micro_batch)
