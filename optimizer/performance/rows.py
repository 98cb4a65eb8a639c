"""Rows of data/measured_runs.csv as set-ups and estimates: cells, models, spellings, and values of empty cells."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.contract.fine_tuning import FROZEN, FULL_TRAINING, METHODS, PURE, TARGETS, FineTuning
from optimizer.contract.errors import GpufleetError, InvalidInputError, unreadable
from optimizer.contract.hardware import Gpu
from optimizer.contract.units import GIB
from optimizer.performance import types
from optimizer.performance.calibration import Calibration
from optimizer.performance.case import ELEMENT_BYTES, OPTIMIZERS
from optimizer.performance.frameworks import MEGATRON, framework_name, frameworks
from optimizer.performance.setups import (
    USUAL_GPUS_PER_NODE,
    Setup,
    build_hardware,
    build_recipe,
    data_ranks,
    default_sharding,
    find_gpu,
)
from optimizer.performance.table import estimate_case
from optimizer.performance.types import Grid
from optimizer.workload.model import BiasesAndNorms, ModelSpec, build_model, check_shape
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model
from optimizer.workload.size_rule import model_of_size

MOST = 1e15  # a larger number in a cell or flag is a mistake


class Row:
    """Cells by column; empty, NaN and None mean "not given". ``read`` notes the columns asked for."""

    def __init__(self, cells: Mapping[str, Any]) -> None:
        extra = cells.get("")  # a list where the row is longer than the header; trailing commas are harmless
        if isinstance(extra, list) and any(cell.strip() for cell in extra):
            raise InvalidInputError(
                f"the row has {len(extra)} more cells than the header",
                limit="one cell a column",
                why="a comma within a cell that is not quoted shifts the others into wrong columns",
            )
        self._cells = cells
        self.read: set[str] = set()

    def text(self, column: str) -> str:
        """Read the cell's text; "none" is a value of two columns, and empty in the others."""
        self.read.add(column)
        value = self._cells.get(column)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        text = str(value).strip()
        empty = ("nan", "null") if column in ("activation_checkpointing", "sharding") else ("nan", "null", "none")
        return "" if text.lower() in empty else text

    def number(self, column: str, *, default: float | None = None, least: float = 0) -> float:
        """Read a finite number; true is 1 and false 0."""
        text, limit = self.text(column), f"a number of at least {least:g}"
        if not text:
            if default is None:
                raise InvalidInputError(f"{column} is empty", limit=limit, why="there is no estimate without it")
            return default
        try:
            value = {"true": 1.0, "false": 0.0}.get(text.lower())
            value = float(text) if value is None else value
        except ValueError as error:
            raise InvalidInputError(f"{column} is {text!r}", limit=limit) from error
        if not math.isfinite(value) or value < least:
            raise InvalidInputError(f"{column} is {text}", limit=limit)
        return value

    def count(self, column: str, *, default: int | None = None, least: int = 1) -> int:
        """Read a whole number from ``least`` to MOST."""
        value = self.number(column, default=default, least=least)
        if value != round(value) or value > MOST:
            raise InvalidInputError(f"{column} is {value:g}", limit=f"a whole number from {least} to {MOST:g}")
        return round(value)

    def flag(self, column: str, *, default: bool = False) -> bool:
        """Read a number and tell if it is above 0."""
        return self.number(column, default=float(default)) > 0

    def word(self, column: str, known: Sequence[str], *, default: str, other: Mapping[str, str] | None = None) -> str:
        """Read a word of ``known``, or one that ``other`` spells otherwise."""
        text = self.text(column).lower() or default
        other = other or {}
        if text not in (default, *known, *other):
            raise InvalidInputError(f"{column} is {text!r}", limit=f"one of {', '.join((*known, *other))}")
        return other.get(text, text)


# Llama rounds 8/3 of the hidden size up to a multiple (https://github.com/meta-llama/llama, llama/model.py).
GATED_FFN_MULTIPLE = 256
SIZE = re.compile(r"[0-9][0-9_,.]*(e[0-9]+)?\s*[kmbgt]", re.IGNORECASE)

# Architectures that the columns of a shape do not describe.
_BY_NAME = ("cnn", "seq2seq", "image", "speech")


def read_model(row: Row) -> ModelSpec:
    """Read the model of a row."""
    other = {"llama": "decoder", "gpt": "decoder"}
    architecture = row.word("architecture", ("decoder", "encoder", *_BY_NAME), default="", other=other)
    name = row.text("model")
    preset = presets().get(name.lower())
    if architecture in _BY_NAME:
        return _read_by_name(row, architecture, name.lower())
    if not architecture and preset is not None and preset.architecture == "cnn":
        return preset
    if row.text("layers") or row.text("hidden_size"):
        return _read_transformer(row, architecture or "decoder", name or "unnamed")
    if preset is not None and preset.architecture != "cnn":
        return preset
    if architecture != "encoder" and SIZE.fullmatch(name):
        return resolve_model(name)
    if architecture != "encoder" and row.text("parameters"):
        return model_of_size(row.count("parameters"), name or "unnamed")
    raise InvalidInputError(
        f"model is {name!r}, without layers and hidden_size",
        limit="a preset, a size such as 7B, or a shape",
        why="memory and time follow from the shape",
        next_step="gpufleet estimate --help lists the presets",
    )


def _read_by_name(row: Row, architecture: str, name: str) -> ModelSpec:
    """Preset of a row's name, or of its model_type and parameters, as the reference trainer writes them."""
    known = {key: value for key, value in presets().items() if value.architecture == architecture}
    if name in known:
        return known[name]
    parameters = row.number("parameters", default=0.0)
    for preset in known.values():
        if (preset.config or {}).get("model_type") == name and preset.parameters == parameters:
            return preset
    raise InvalidInputError(
        f"model is {row.text('model')!r} and architecture is {architecture}",
        limit=f"one of {', '.join(known)}, or their model_type with their parameters",
        why="the columns describe one stack of like layers",
        next_step="give the name of a preset",
    )


def _read_transformer(row: Row, architecture: str, name: str) -> ModelSpec:
    hidden = row.count("hidden_size")
    layers = row.count("layers")
    # One head is 128 wide in most published models (64 below 1024).
    heads = row.count("attention_heads", default=max(1, hidden // (128 if hidden >= 1024 else 64)))
    kv_heads = row.count("kv_heads", default=heads)
    head_dim = row.count("head_dim", default=max(1, hidden // heads))
    gated = row.flag("gated_mlp", default=row.text("architecture").lower() == "llama")
    gated_ffn = GATED_FFN_MULTIPLE * math.ceil(hidden * 8 / 3 / GATED_FFN_MULTIPLE)
    ffn = row.count("ffn_size", default=gated_ffn if gated else 4 * hidden)
    # GPT-2's 50257, padded as training code does.
    vocab = row.count("vocab_size", default=32000 if gated else 50304)
    experts = row.count("experts", default=0, least=0)
    used = row.count("experts_per_token", default=min(2, experts), least=0)
    parameters = row.number("parameters", default=0.0)

    def build(tied: bool) -> ModelSpec:
        return build_model(
            BiasesAndNorms(norm_bias=not gated), name=name,
            architecture="encoder" if architecture == "encoder" else "decoder", layers=layers, hidden_size=hidden,
            ffn_size=ffn, gated_mlp=gated, attention_heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            vocab_size=vocab, tied_embeddings=tied, experts=experts, experts_per_token=used,
            source="columns of the row",
        )  # fmt: skip

    # GPT-2, MPT and BERT tie output projection and embedding, Llama of 4B and more does not.
    if not parameters:
        return check_shape(build(tied=not gated))
    # A given count stands: it includes biases, norms and positions.
    nearest = min((build(True), build(False)), key=lambda model: abs(model.parameters - parameters))
    active = nearest.active_parameters if experts else round(parameters)
    return check_shape(replace(nearest, parameters=round(parameters), active_parameters=active))


# Usual tokens of one optimizer step: Llama 3 began at 4M (arXiv:2407.21783, 3.4.1).
USUAL_STEP_TOKENS = 4e6

# Words of the columns, and other spellings of them.
OTHER_SHARDINGS = {"none": "ddp", "zero0": "ddp", "fsdp": "zero3", "fsdp2": "zero3"}
OTHER_CHECKPOINTINGS = {"selective_op": "selective", "op": "selective"}
PRECISIONS = (*ELEMENT_BYTES, PURE)
OTHER_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8": "fp8"}
OTHER_EXPERTS = {"grouped_mm": "grouped"}
OTHER_ATTENTIONS = {"sdpa": "flash", "fused": "flash", "eager": "unfused"}


def read_row(row: Row, gpus: Mapping[str, Gpu]) -> Setup:
    """Read one row; an error names the column, its value and the limit."""
    model = read_model(row)
    cnn = model.architecture == "cnn"
    gpu = find_gpu(row.text("gpu"), gpus)
    count = row.count("gpus", default=1)
    per_node = min(row.count("gpus_per_node", default=min(USUAL_GPUS_PER_NODE, count)), count)
    ranks = {name: row.count(f"{name}_parallel", default=1) for name in ("tensor", "pipeline", "context", "expert")}
    tensor, pipeline, context, expert = ranks.values()
    splits_sequence = row.flag("sequence_parallel")
    data = data_ranks(count, tensor, pipeline, context)
    network = row.number("network_gbit_per_s_per_node", default=0.0, least=0.001)
    hardware = build_hardware(gpu, per_node, network)
    tuning = _tuning(row)
    usual = default_sharding(model, data * context, pipeline, tuning)
    sharding = row.word("sharding", types.SHARDINGS, default=usual, other=OTHER_SHARDINGS)
    attention = row.word("attention", ("flash", "unfused"), default="flash", other=OTHER_ATTENTIONS)
    framework = framework_name(row.text("framework"), cnn=cnn)
    if framework == "megatron" and sharding == "zero3":
        # Megatron-LM has no ZeRO-3: such runs used DeepSpeed's (arXiv:2104.04473, 5.2).
        framework = "megatron-deepspeed"
    elif framework == "megatron" and attention == "flash":
        framework = "megatron-core"
    # Tables of large Megatron Core runs say ddp and no split, and the runs used its distributed optimizer and its split
    # of the sequence (Megatron-LM README at d98e8a6). Where states of 18 bytes a parameter are small, the cells hold.
    is_small = 18 * model.parameters / (tensor * pipeline) < gpu.memory_gib * GIB / 2
    splits: int | None = 1 if splits_sequence or (expert > 1 and tensor > 1) else None
    if framework in MEGATRON[1:]:
        if is_small:
            splits = int(splits_sequence) if row.text("sequence_parallel") else splits
        elif sharding == "ddp":
            sharding = "zero1"
    kinds = ("grouped", "loop") if frameworks()[framework].fused_kernels else ("grouped",)
    # A source's remarks name what no column does.
    remarks = row.text("uncertain")
    modules, layers = re.search(r"recomputes ([\w+]+)", remarks), re.search(r"activations of (\d+) layers", remarks)
    recipe = build_recipe(
        model,
        seq_len=None if cnn else row.count("seq_len", default=0) or None,
        framework=framework,
        gpu=gpu,
        precision=row.word("precision", PRECISIONS, default="bf16", other=OTHER_PRECISIONS),  # type: ignore[arg-type]
        optimizer=row.word("optimizer", tuple(OPTIMIZERS), default="sgd" if cnn else "adamw"),
        attention=attention,
        compiled=row.flag("compiled"),
        tuning=tuning,
        target_len=row.count("target_len", default=0, least=0) or None,
        recomputed=tuple(modules[1].split("+")) if modules else (),
        offloaded_layers=min(int(layers[1]), model.layers) if layers else 0,
        optimizer_instances=2 if "part of the data ranks" in remarks else 1,
        fused_loss="fused cross-entropy" in remarks,
        loops_experts=row.word("experts_implementation", kinds, default="grouped", other=OTHER_EXPERTS) == "loop",
    )
    names = types.CHECKPOINTINGS
    checkpointing = row.word("activation_checkpointing", names, default="none", other=OTHER_CHECKPOINTINGS)
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
        **ranks,
        sequence_parallel=splits,
        virtual_stages=virtual_stages,
        sharding=types.SHARDINGS.index(sharding),
        micro_batch=micro_batch,
        grad_accum=row.count("grad_accum", default=usual_accumulation),
        checkpointing=types.CHECKPOINTINGS.index(checkpointing),
    )
    return Setup(model=model, recipe=recipe, hardware=hardware, grid=grid, gpus=count)


def _tuning(row: Row) -> FineTuning:
    """Read the part of the model that trains; empty cells are full training."""
    frozen = row.text("frozen").lower() or "none"
    if not re.match(FROZEN, frozen):
        limit = "none, embedding, or a number of first layers"
        raise InvalidInputError(f"frozen is {frozen!r}", limit=limit)
    return FineTuning(
        method=row.word("method", METHODS, default="full"),
        lora_rank=row.count("lora_rank", default=FULL_TRAINING.lora_rank),
        lora_targets=row.word("lora_targets", TARGETS, default="all"),
        frozen=frozen,
    )


def _virtual_stages(row: Row, layers_per_stage: int) -> int:
    """Chunks a pipeline rank, from "interleave=3" or from layers a chunk."""
    text = row.text("layers_per_virtual_stage") or "interleave=1"
    number = text.removeprefix("interleave=")
    try:
        chunks = int(number) if number != text else math.ceil(layers_per_stage / float(text))
    except (ValueError, OverflowError, ZeroDivisionError):
        chunks = 0
    if not 1 <= chunks <= max(1, layers_per_stage):
        raise InvalidInputError(
            f"layers_per_virtual_stage is {text!r}",
            limit=f'a number of layers, or "interleave=" and a number of chunks: a stage has {layers_per_stage} layers',
        )
    return chunks


# Columns added to the input's, in order. Tokens are samples for a CNN.
COLUMNS = (
    "predicted_tokens_per_second_per_gpu", "predicted_peak_memory_gib", "predicted_step_time_s", "fits", "error",
    "predicted_p95_memory_gib", "fit", "predicted_relative_error",
)  # fmt: skip


def read_table(path: Path) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """Read the columns of a CSV ("-": standard input) and its rows, each with the number of its line."""
    name = Path("standard input") if str(path) == "-" else path
    try:
        binary = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        # Cells beyond the header gather under no name; the row then gets an error.
        reader = csv.DictReader(io.StringIO(binary.decode("utf-8-sig"), newline=""), restkey="", restval="")
        columns = list(reader.fieldnames or [])
        rows: list[tuple[int, dict[str, Any]]] = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        next_step = "gpufleet calibrate --template prints the columns and an example"
        raise InvalidInputError(unreadable(name, error), next_step=next_step) from error
    twice = sorted({name for name in columns if name and columns.count(name) > 1})
    if not columns or twice or (len(columns) == 1 and any(mark in columns[0] for mark in ";\t")):
        got = f"more than one column {', '.join(twice)}" if twice else f"the header {','.join(columns)[:60]!r}"
        raise InvalidInputError(f"{name} has {got}", limit="one column a name, separated by commas")
    return columns, rows


def estimate_row(row: Mapping[str, Any], gpus: Mapping[str, Gpu], calibration: Calibration) -> dict[str, Any]:
    """Estimate a row: its COLUMNS; a row that cannot be estimated has only ``error``."""
    result: dict[str, Any] = dict.fromkeys(COLUMNS)
    try:
        setup = read_row(Row(row), gpus)
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow gives the row an error below
            estimates = estimate_case(setup.case(), setup.coefficients(calibration))
    except GpufleetError as error:
        return result | {"error": "; ".join(" ".join(line.split()) for line in str(error).splitlines())}
    speed = float(estimates.tokens_per_second) / setup.gpus
    values = (speed, float(estimates.peak_memory_gib), float(estimates.step_time_s))
    if not all(math.isfinite(value) and value > 0 for value in values):
        return result | {"error": "the row's numbers are too large or too small to estimate"}
    p95_gib, fit = float(estimates.p95_memory_gib), str(estimates.fit)
    residual, _ = setup.speed_source(calibration)
    cells = (*values, bool(estimates.fits), None, p95_gib, fit, residual.relative_error)
    return result | dict(zip(COLUMNS, cells, strict=True))
