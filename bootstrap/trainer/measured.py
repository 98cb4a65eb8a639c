"""Measured run: speed and memory of the first steady steps, written once a start beside the checkpoints.

``gpufleet status`` shows the row against the plan's estimate; ``gpufleet calibrate --from-stack`` takes it
(``contract/measured.py``).
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import statistics
import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bootstrap.contract.codec import to_text
from bootstrap.contract.measured import Measured, MeasuredRow, object_name
from bootstrap.trainer.clock import StepClock
from bootstrap.trainer.config import TrainerConfig
from bootstrap.training.state import unwrap
from bootstrap.training.stores import Store

logger = logging.getLogger(__name__)

# Compilation, autotuning, cold caches and the allocator's growth are over by then.
WARMUP_STEPS = 10
MEASURED_STEPS = 50
# Columns of a row that are settings of the run.
_CONFIGURED = (
    "optimizer", "seq_len", "precision", "sharding", "tensor_parallel", "pipeline_parallel", "context_parallel",
    "activation_checkpointing", "micro_batch", "grad_accum",
)  # fmt: skip


def record(config: TrainerConfig, model: nn.Module, clock: StepClock, store: Store, *, waited_s: float) -> None:
    """Write the row of the last ``MEASURED_STEPS`` steps, which waited ``waited_s`` for data; collective.

    The one wait for the device in a run. Rank 0 writes beside the training: while S3 does not answer, a write takes
    minutes. The final checkpoint is written later.
    """
    measured = _measure(config, clock, waited_s)
    if os.environ.get("RANK", "0") == "0":
        row = measured_row(config, model, measured, os.environ)
        threading.Thread(target=_write, args=(store, row), name="measured-run", daemon=True).start()


def _measure(config: TrainerConfig, clock: StepClock, waited_s: float) -> Measured:
    """Measurement of the slowest and fullest rank."""
    clock.synchronize()
    durations = sorted(clock.durations_s[-MEASURED_STEPS:])
    p95 = durations[min(len(durations) - 1, round(0.95 * len(durations)))]
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()  # 0 without a GPU
    facts = torch.tensor(
        [statistics.median(durations), p95, waited_s / sum(durations), *(peak / 2**30 for peak in peaks)],
        dtype=torch.float64,
        device=clock.device,
    )
    if dist.is_initialized():
        dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    step_time_s, p95_s, wait_share, allocated_gib, reserved_gib = facts.tolist()
    return Measured(
        steps=len(durations),
        step_time_s=step_time_s,
        step_time_p95_s=p95_s,
        tokens_per_second=config.global_batch * config.seq_len / step_time_s,
        data_wait_share=min(1.0, wait_share),
        peak_allocated_gib=allocated_gib,
        peak_reserved_gib=reserved_gib,
    )


def _write(store: Store, row: MeasuredRow) -> None:
    name, measured = object_name(row.run_id, uuid.uuid4().hex[:12]), row.measured
    try:
        store.write(name, [to_text(row).encode()])
    except Exception as error:  # noqa: BLE001 - a row is not worth a training
        logger.error("the measured run is not recorded: %s", error)
    else:
        logger.info(
            "measured over %d steps: %.4f s/step, %.1f GiB; recorded in %s/%s",
            *(measured.steps, measured.step_time_s, row.peak_memory_gib, store.uri, name),
        )


def measured_row(
    config: TrainerConfig, model: nn.Module, measured: Measured, environment: Mapping[str, str]
) -> MeasuredRow:
    """Row of a run; ``config`` has the micro-batch and accumulation that the run really has."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    is_cnn, has_gpu = config.family == "cnn", torch.cuda.is_available()
    library = "torchvision" if is_cnn else "transformers"
    gpus_per_node = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return MeasuredRow(
        run_id=environment.get("GPUFLEET_RUN", "") or "local",
        at=datetime.now(UTC).replace(microsecond=0),
        stack=environment.get("GPUFLEET_STACK", ""),
        instance_type=environment.get("GPUFLEET_INSTANCE_TYPE", ""),
        nodes=-(-ranks // gpus_per_node),
        versions={
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda or "none",
            library: importlib.metadata.version(library),
        },
        measured=measured,
        predicted=config.predicted,
        model=config.kind,
        architecture=config.family,
        parameters=_parameters(model),
        **{name: getattr(config, name) for name in _CONFIGURED},
        **_tuning(config),
        **(_shape(unwrap(model)) if config.family in ("decoder", "encoder") else {}),
        gpu=environment.get("GPUFLEET_GPU", "") or (torch.cuda.get_device_name() if has_gpu else "cpu"),
        gpu_memory_gib=torch.cuda.get_device_properties().total_memory / 2**30 if has_gpu else 0.0,
        gpus=ranks,
        gpus_per_node=gpus_per_node,
        sequence_parallel=1 if config.sequence_parallel else 0,
        framework="torchvision" if is_cnn else "gpufleet",
        attention="flash",  # scaled_dot_product_attention; a CNN has none
        compiled=1 if config.compiled else 0,
        tokens_per_second_per_gpu=measured.tokens_per_second / ranks,
        peak_memory_gib=measured.peak_allocated_gib,
        reserved_memory_gib=measured.peak_reserved_gib,
    )


def _parameters(model: nn.Module) -> int:
    """Parameters of the model without its adapters; a packed 4-bit weight counts its unpacked elements."""
    return sum(
        math.prod(parameter.quant_state.shape) if hasattr(parameter, "quant_state") else parameter.numel()
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    )


def _tuning(config: TrainerConfig) -> dict[str, Any]:
    """Columns of a run that trains a part of the model."""
    tuning = config.tuning
    if tuning.adapts:
        return {"method": tuning.method, "lora_rank": tuning.lora_rank, "lora_targets": tuning.lora_targets}
    return {} if tuning.trains_all else {"frozen": tuning.frozen}


def _shape(model: Any) -> dict[str, Any]:
    """Shape columns of a decoder or encoder, by the names that its config maps its own to."""
    settings = model.config
    heads = settings.num_attention_heads
    names = [name for name, _ in model.named_modules()]
    return {
        "layers": settings.num_hidden_layers,
        "hidden_size": settings.hidden_size,
        "ffn_size": _ffn_size(settings),
        "gated_mlp": int(any(name.endswith(("gate_proj", "gate_up_proj")) for name in names)),
        "attention_heads": heads,
        "kv_heads": getattr(settings, "num_key_value_heads", None) or heads,
        "head_dim": getattr(settings, "head_dim", None) or settings.hidden_size // heads,
        "vocab_size": settings.vocab_size,
    }


def _ffn_size(settings: Any) -> int:
    for name in ("intermediate_size", "n_inner", "ffn_dim"):  # llama, gpt2, opt
        if size := getattr(settings, name, None):
            return int(size)
    return int(getattr(settings, "expansion_ratio", 4)) * int(settings.hidden_size)  # mpt; gpt2's default
