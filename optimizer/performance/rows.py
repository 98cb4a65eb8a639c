"""Rows of data/measured_runs.csv as set-ups: spellings, and values of empty cells."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bootstrap.contract.fine_tuning import FULL_TRAINING, FineTuning
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.hardware import Gpu
from optimizer.contract.units import GIB
from optimizer.performance import types
from optimizer.performance.cells import Row
from optimizer.performance.frameworks import MEGATRON, framework_name
from optimizer.performance.row_models import read_model
from optimizer.performance.setups import (
    USUAL_GPUS_PER_NODE,
    Setup,
    build_hardware,
    build_recipe,
    check_words,
    data_ranks,
    default_sharding,
    find_gpu,
)
from optimizer.performance.types import Grid

# Usual tokens of one optimizer step: Llama 3 began at 4M (arXiv:2407.21783, 3.4.1).
USUAL_STEP_TOKENS = 4e6

# Spellings of the columns' words.
SHARDINGS = {name: name for name in ("ddp", "zero1", "zero2", "zero3")}
SHARDINGS |= {"none": "ddp", "zero0": "ddp", "fsdp": "zero3", "fsdp2": "zero3"}
CHECKPOINTINGS = {name: name for name in ("none", "selective", "full")}
CHECKPOINTINGS |= {"selective_op": "selective", "op": "selective"}
PRECISIONS = {name: name for name in ("fp32", "tf32", "fp16", "bf16", "fp8")}
PRECISIONS |= {"pure-bf16": "pure-bf16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8": "fp8"}
ATTENTIONS = {"flash": "flash", "sdpa": "flash", "fused": "flash", "unfused": "unfused", "eager": "unfused"}
EXPERTS = {"grouped": "grouped", "grouped_mm": "grouped", "loop": "loop", "eager": "loop"}
OPTIMIZERS = {name: name for name in ("adamw", "adam", "sgd", "adafactor", "adamw8bit")}


def read_row(row: Row, gpus: Mapping[str, Gpu]) -> Setup:
    """Read one row; an error names the column, its value and the limit."""
    model = read_model(row)
    cnn = model.architecture == "cnn"
    gpu = find_gpu(row.text("gpu"), gpus)
    count = row.count("gpus", default=1)
    per_node = min(row.count("gpus_per_node", default=min(USUAL_GPUS_PER_NODE, count)), count)
    tensor = row.count("tensor_parallel", default=1)
    pipeline = row.count("pipeline_parallel", default=1)
    context = row.count("context_parallel", default=1)
    expert = row.count("expert_parallel", default=1)
    splits_sequence = row.flag("sequence_parallel")
    data = data_ranks(count, tensor, pipeline, context)
    network = row.number("network_gbit_per_s_per_node", default=0.0, least=0.001)
    hardware = build_hardware(gpu, per_node, network)
    compression = row.text("gradient_compression").lower() or "none"
    tuning = _tuning(row)
    usual = default_sharding(model, data * context, pipeline, compression, tuning)
    sharding = row.word("sharding", SHARDINGS, default=usual)
    attention = row.word("attention", ATTENTIONS, default="flash")
    framework, sharding = _framework(framework_name(row.text("framework"), cnn=cnn), sharding, attention)
    # Tables of large Megatron Core runs say ddp and no split, and the runs used its distributed optimizer and its split
    # of the sequence (Megatron-LM README at d98e8a6). Where states of 18 bytes a parameter are small, the cells hold.
    is_small = 18 * model.parameters / (tensor * pipeline) < gpu.memory_gib * GIB / 2
    splits: int | None = 1 if splits_sequence or (expert > 1 and tensor > 1) else None
    if framework in MEGATRON[1:]:
        if is_small:
            splits = int(splits_sequence) if row.given("sequence_parallel") else splits
        elif sharding == "ddp":
            sharding = "zero1"
    recipe = build_recipe(
        model,
        seq_len=None if cnn else row.count("seq_len", default=0) or None,
        framework=framework,
        gpu=gpu,
        precision=row.word("precision", PRECISIONS, default="bf16"),  # type: ignore[arg-type]
        optimizer=row.word("optimizer", OPTIMIZERS, default="sgd" if cnn else "adamw"),  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        compiled=row.flag("compiled"),
        gradient_compression=compression,
        tuning=tuning,
        target_len=row.count("target_len", default=0, least=0) or None,
        experts=row.word("experts_implementation", EXPERTS, default="") or None,  # type: ignore[arg-type]
    )
    micro_batch = row.count("micro_batch", default=1)
    virtual_stages = _virtual_stages(row, math.ceil(model.layers / pipeline))
    # Runs that split the model make up a usual step, and keep the bubble small.
    usual_accumulation = 1
    if tensor * pipeline > 1:
        least = 8 * pipeline if pipeline > 1 else 1
        usual_accumulation = max(least, round(USUAL_STEP_TOKENS / (data * micro_batch * recipe.seq_len)))
        if virtual_stages > 1:
            usual_accumulation = math.ceil(usual_accumulation / pipeline) * pipeline
    grid = Grid(
        nodes=math.ceil(count / per_node),
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        sequence_parallel=splits,
        virtual_stages=virtual_stages,
        sharding=types.SHARDINGS.index(sharding),
        micro_batch=micro_batch,
        grad_accum=row.count("grad_accum", default=usual_accumulation),
        checkpointing=types.CHECKPOINTINGS.index(row.word("activation_checkpointing", CHECKPOINTINGS, default="none")),
    )
    return Setup(model=model, recipe=recipe, hardware=hardware, grid=grid, gpus=count)


def _tuning(row: Row) -> FineTuning:
    """Read the part of the model that trains; empty cells are full training."""
    method, targets = row.text("method").lower() or "full", row.text("lora_targets").lower() or "all"
    frozen = row.text("frozen").lower() or "none"
    check_words(method, targets, frozen)
    rank = row.count("lora_rank", default=FULL_TRAINING.lora_rank)
    return FineTuning(method=method, lora_rank=rank, lora_targets=targets, frozen=frozen)


def row_error(error: GpufleetError) -> str:
    """Format an error on one line, for the ``error`` column."""
    return "; ".join(" ".join(line.split()) for line in str(error).splitlines())


def _framework(framework: str, sharding: str, attention: str) -> tuple[str, str]:
    """Framework and sharding that a published Megatron run really used."""
    if framework == "megatron" and sharding == "zero3":
        # Megatron-LM has no ZeRO-3: such runs used DeepSpeed's (arXiv:2104.04473, 5.2).
        framework = "megatron-deepspeed"
    if framework == "megatron" and attention == "flash":
        framework = "megatron-core"
    return framework, sharding


def _virtual_stages(row: Row, layers_per_stage: int) -> int:
    """Chunks a pipeline rank, from "interleave=3" or from layers a chunk."""
    text = row.text("layers_per_virtual_stage")
    if not text:
        return 1
    try:
        if text.startswith("interleave="):
            chunks = int(text.removeprefix("interleave="))
        else:
            chunks = math.ceil(layers_per_stage / float(text))
    except (ValueError, OverflowError, ZeroDivisionError):
        chunks = 0
    if not 1 <= chunks <= max(1, layers_per_stage):
        raise InvalidInputError(
            f"layers_per_virtual_stage is {text!r}",
            limit=f'a number of layers, or "interleave=" and a number of chunks: a stage has {layers_per_stage} layers',
        )
    return chunks
