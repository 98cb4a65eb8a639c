"""Rows of data/measured_runs.csv as set-ups and estimates: columns, spellings, and values of empty cells."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bootstrap.contract.fine_tuning import FROZEN, FULL_TRAINING, FineTuning
from optimizer.contract.errors import GpufleetError, InvalidInputError, describe_wrong, unreadable
from optimizer.contract.hardware import Gpu
from optimizer.contract.units import GIB
from optimizer.performance import setups, types
from optimizer.performance.calibration import Calibration
from optimizer.performance.case import Case
from optimizer.performance.confidence import SPLITS
from optimizer.performance.frameworks import MEGATRON, framework_name, frameworks
from optimizer.performance.table import estimate_case
from optimizer.performance.types import Graphs, Grid, Hardware, Recipe
from optimizer.workload.model import ModelSpec, build_model, check_shape
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model
from optimizer.workload.size_rule import model_of_size


def _to_number(text: str, limit: str = "a number") -> float:
    try:
        return float({"true": "1", "false": "0"}.get(text.lower(), text))
    except ValueError as error:
        raise ValueError(limit) from error


def _to_flag(text: str) -> bool:
    if (number := _to_number(text, limit := "true, false, or a number of at least 0")) < 0:
        raise ValueError(limit)
    return number > 0


def _spelled(**other: str) -> BeforeValidator:
    """Read a word in lower case, or its ``other`` spelling."""
    return BeforeValidator(lambda text: other.get(text.lower(), text.lower()))


def _like(pattern: str, words: str) -> BeforeValidator:
    """Read a text of a pattern, which ``words`` say."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text.lower()):
            raise ValueError(words)
        return text.lower()

    return BeforeValidator(read)


Real = Annotated[float, BeforeValidator(_to_number), Field(ge=0, allow_inf_nan=False)]
# A larger count is a mistake.
Whole = Annotated[int, BeforeValidator(_to_number), Field(ge=0, le=10**15)]
Count = Annotated[int, BeforeValidator(_to_number), Field(ge=1, le=10**15)]
Flag = Annotated[bool, BeforeValidator(_to_flag)]
# Columns of a shape, which are read where layers or hidden_size are given.
_SHAPE = (
    "attention_heads", "kv_heads", "head_dim", "ffn_size", "gated_mlp", "vocab_size", "experts", "experts_per_token",
)  # fmt: skip


class Row(BaseModel):
    """Columns of a row (docs/estimator.md); the value of an empty cell that follows from other cells is None."""

    model_config = ConfigDict(frozen=True)

    model: str = ""
    architecture: Annotated[
        Literal["", "decoder", "llama", "encoder", "cnn", "seq2seq", "image", "speech"], _spelled(gpt="decoder")
    ] = ""
    layers: Count | None = None
    hidden_size: Count | None = None
    attention_heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn_size: Count | None = None
    gated_mlp: Flag | None = None
    vocab_size: Count | None = None
    experts: Whole = 0
    experts_per_token: Whole | None = None
    parameters: Real = 0.0
    gpu: str = ""
    gpus: Count = 1
    gpus_per_node: Count | None = None
    network_gbit_per_s_per_node: Annotated[Real, Field(ge=0.001)] | None = None
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1
    sequence_parallel: Flag | None = None
    layers_per_virtual_stage: Annotated[
        str, _like(r"(interleave=)?[1-9]\d{0,5}(\.0+)?", 'a number of layers, or "interleave=" and a number of chunks')
    ] = "interleave=1"
    sharding: Annotated[
        Literal["ddp", "zero1", "zero2", "zero3"] | None,
        _spelled(zero0="ddp", fsdp="zero3", fsdp2="zero3"),
    ] = None
    micro_batch: Count = 1
    grad_accum: Count | None = None
    activation_checkpointing: Annotated[
        Literal["none", "selective", "full"], _spelled(selective_op="selective", op="selective")
    ] = "none"
    seq_len: Count | None = None
    target_len: Whole = 0
    precision: Annotated[
        types.RecipePrecision, _spelled(float32="fp32", float16="fp16", bfloat16="bf16", float8="fp8")
    ] = "bf16"
    precision_real: str = ""
    optimizer: Annotated[types.OptimizerName | None, _spelled()] = None
    attention: Annotated[types.Attention, _spelled(sdpa="flash", fused="flash", eager="unfused")] = "flash"
    compiled: Flag = False
    cuda_graphs: Flag | None = None
    date: Annotated[str, BeforeValidator(lambda text: text[:7] if re.match(r"20\d\d-\d\d", text) else "")] = ""
    framework: str = ""
    experts_implementation: Annotated[Literal["grouped", "loop"], _spelled(grouped_mm="grouped")] = "grouped"
    method: Annotated[Literal["full", "lora", "qlora"], _spelled()] = "full"
    lora_rank: Count = FULL_TRAINING.lora_rank
    lora_targets: Annotated[Literal["all", "attention"], _spelled()] = "all"
    frozen: Annotated[str, _like(FROZEN, "none, embedding, or a number of first layers")] = "none"
    uncertain: str = ""

    @classmethod
    def read(cls, cells: Mapping[str, Any]) -> Self:
        """Read cells by column; an empty cell, nan, null and none are not given."""
        extra = cells.get("")  # a list where the row is longer than the header; trailing commas are harmless
        if isinstance(extra, list) and any(cell.strip() for cell in extra):
            raise InvalidInputError(
                f"the row has {len(extra)} more cells than the header",
                limit="one cell a column",
                why="a comma within a cell that is not quoted shifts the others into wrong columns",
            )
        texts = {
            name: str(cell).strip() for name, cell in cells.items() if cell is not None and name in cls.model_fields
        }
        empty = ("", "nan", "null", "none")
        given = {name: text for name, text in texts.items() if text.lower() not in empty}
        if not given.keys() & {"layers", "hidden_size"}:
            model = given.get("model", "")
            unread = (*_SHAPE, *["parameters"] * bool(model.lower() in presets() or SIZE.fullmatch(model)))
            given = {name: text for name, text in given.items() if name not in unread}
        if texts.get("sharding", "").lower() == "none":  # a spelling of ddp
            given["sharding"] = "ddp"
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            column, limit = str(error.errors()[0]["loc"][0]), describe_wrong(error.errors()[0])
            if column not in given:
                raise InvalidInputError(f"{column} is empty", why="there is no fit without it") from error
            limit = limit.removeprefix("must be ").removesuffix(" is needed")
            raise InvalidInputError(f"{column} is {given[column]!r}", limit=limit) from error


# Llama rounds 8/3 of the hidden size up to a multiple (https://github.com/meta-llama/llama, llama/model.py).
GATED_FFN_MULTIPLE = 256
SIZE = re.compile(r"[0-9][0-9_,.]*(e[0-9]+)?\s*[kmbgt]", re.IGNORECASE)


def read_model(row: Row) -> ModelSpec:
    """Read the model of a row."""
    known = presets()
    preset = known.get(row.model.lower())
    if row.architecture in ("cnn", "seq2seq", "image", "speech"):  # the columns of a shape do not describe these
        return _read_by_name(row)
    if not row.architecture and preset is not None and preset.architecture == "cnn":
        return preset
    if row.layers or row.hidden_size:
        return _read_transformer(row)
    if preset is not None and preset.architecture != "cnn":
        return preset
    if row.architecture != "encoder" and SIZE.fullmatch(row.model):
        return resolve_model(row.model)
    if row.architecture != "encoder" and row.parameters:
        return model_of_size(round(row.parameters), row.model or "unnamed")
    raise InvalidInputError(
        f"model is {row.model!r}, without layers and hidden_size",
        limit="a preset, a size such as 7B, or a shape",
        why="memory and time follow from the shape",
        next_step="gpufleet estimate --help lists the presets",
    )


def _read_by_name(row: Row) -> ModelSpec:
    """Preset of a row's name, or of its model_type and parameters, as the reference trainer writes them."""
    known = {name: preset for name, preset in presets().items() if preset.architecture == row.architecture}
    for name, preset in known.items():
        is_like = (preset.config or {}).get("model_type") == row.model.lower() and preset.parameters == row.parameters
        if name == row.model.lower() or is_like:
            return preset
    raise InvalidInputError(
        f"model is {row.model!r} and architecture is {row.architecture}",
        limit=f"one of {', '.join(known)}, or their model_type with their parameters",
        why="the columns describe one stack of like layers",
        next_step="give the name of a preset",
    )


def _read_transformer(row: Row) -> ModelSpec:
    layers, hidden = row.layers, row.hidden_size
    if not layers or not hidden:
        raise InvalidInputError(f"{'hidden_size' if layers else 'layers'} is empty", why="a shape has both")
    # One head is 128 wide in most published models (64 below 1024).
    heads = row.attention_heads or max(1, hidden // (128 if hidden >= 1024 else 64))
    gated = row.architecture == "llama" if row.gated_mlp is None else row.gated_mlp
    gated_ffn = GATED_FFN_MULTIPLE * math.ceil(hidden * 8 / 3 / GATED_FFN_MULTIPLE)

    def build(tied: bool, parameters: int | None = None) -> ModelSpec:
        return build_model(
            norm_bias=not gated, name=row.model or "unnamed",
            architecture="encoder" if row.architecture == "encoder" else "decoder", layers=layers,
            hidden_size=hidden, ffn_size=row.ffn_size or (gated_ffn if gated else 4 * hidden), gated_mlp=gated,
            attention_heads=heads, kv_heads=row.kv_heads or heads, head_dim=row.head_dim or max(1, hidden // heads),
            # GPT-2's 50257, padded as training code does.
            vocab_size=row.vocab_size or (32000 if gated else 50304), tied_embeddings=tied, experts=row.experts,
            experts_per_token=min(2, row.experts) if row.experts_per_token is None else row.experts_per_token,
            parameters=parameters, source="columns of the row",
        )  # fmt: skip

    # GPT-2, MPT and BERT tie output projection and embedding, Llama of 4B and more does not.
    if row.parameters < 1:
        return check_shape(build(tied=not gated))
    # A given count stands: it includes biases, norms and positions.
    tied = min((True, False), key=lambda tied: abs(build(tied).parameters - row.parameters))
    return check_shape(build(tied, round(row.parameters)))


# Share of the tokens that BERT predicts (arXiv:1810.04805, 3.1), the only ones with logits in NVIDIA's code for MLPerf
# (--dense_seq_output in its configs of mlcommons/training_results_v3.1).
MASKED = 0.15
# Before this torchtitan gave attention to FlashAttention 2 on Hopper too (torchtitan/models/attention.py at e7c0cae).
TORCHTITAN_CUDNN_SINCE = "2025-07"
# Usual tokens of one optimizer step: Llama 3 began at 4M (arXiv:2407.21783, 3.4.1).
USUAL_STEP_TOKENS = 4e6


def read_row(row: Row, gpus: Mapping[str, Gpu]) -> Case:
    """Read one row; an error names the column, its value and the limit."""
    model, gpu = read_model(row), setups.find_gpu(row.gpu, gpus)
    cnn = model.architecture == "cnn"
    data = setups.data_ranks(row.gpus, row.tensor_parallel, row.pipeline_parallel, row.context_parallel)
    tuning = FineTuning(method=row.method, lora_rank=row.lora_rank, lora_targets=row.lora_targets, frozen=row.frozen)
    sharding = row.sharding or setups.default_sharding(
        model, data * row.context_parallel, row.pipeline_parallel, tuning
    )
    framework, sharding, splits = _read_code(row, model, gpu, sharding)
    recipe = setups.build_recipe(
        model,
        seq_len=None if cnn else row.seq_len,
        framework=framework,
        gpu=gpu,
        precision=row.precision,
        flash2=framework == "torchtitan" and "" < row.date < TORCHTITAN_CUDNN_SINCE,
        scales_blocks=row.precision == "fp8" and row.precision_real.lower() == "mxfp8",
        optimizer=row.optimizer or ("sgd" if cnn else "adamw"),
        attention=row.attention,
        compiled=row.compiled,
        tuning=tuning,
        target_len=row.target_len or None,
        loops_experts=row.experts_implementation == "loop",
        **_read_remarks(row.uncertain, model.layers),
    )
    per_node = min(row.gpus_per_node or setups.USUAL_GPUS_PER_NODE, row.gpus)
    chunks = _read_chunks(row, model.layers)
    grid = Grid(
        nodes=math.ceil(row.gpus / per_node),
        data=data,
        **{name: getattr(row, f"{name}_parallel") for name in SPLITS},
        sequence_parallel=splits,
        virtual_stages=chunks,
        sharding=types.SHARDINGS.index(sharding),
        micro_batch=row.micro_batch,
        grad_accum=row.grad_accum or _usual_accumulation(row, data, recipe.seq_len, chunks),
        checkpointing=types.CHECKPOINTINGS.index(row.activation_checkpointing),
    )
    hardware = setups.build_hardware(gpu, per_node, row.network_gbit_per_s_per_node)
    recipe = replace(recipe, graphs=_graphs(row, model, recipe, hardware, grid))
    return setups.build_case(model, recipe, hardware, grid)


def _read_code(row: Row, model: ModelSpec, gpu: Gpu, sharding: str) -> tuple[str, str, bool | None]:
    """Read the framework, its sharding, and if it splits the sequence (None: as the framework does)."""
    framework = framework_name(row.framework, cnn=model.architecture == "cnn")
    if framework == "megatron" and sharding == "zero3":
        # Megatron-LM has no ZeRO-3: such runs used DeepSpeed's (arXiv:2104.04473, 5.2).
        framework = "megatron-deepspeed"
    elif framework == "megatron" and row.attention == "flash":
        framework = "megatron-core"
    if row.experts_implementation == "loop" and not frameworks()[framework].fused_kernels:
        raise InvalidInputError("experts_implementation is 'loop'", limit=f"grouped with framework {framework}")
    splits = True if row.sequence_parallel or (row.expert_parallel > 1 and row.tensor_parallel > 1) else None
    if framework not in MEGATRON[1:]:
        return framework, sharding, splits
    # Tables of large Megatron Core runs say ddp and no split, and the runs used its distributed optimizer and its split
    # of the sequence (Megatron-LM README at d98e8a6). Where states of 18 bytes a parameter are small, the cells hold.
    state_bytes = 18 * model.parameters / (row.tensor_parallel * row.pipeline_parallel)
    if state_bytes < gpu.memory_gib * GIB / 2:
        return framework, sharding, splits if row.sequence_parallel is None else row.sequence_parallel
    return framework, "zero1" if sharding == "ddp" else sharding, splits


def _read_remarks(remarks: str, most_layers: int) -> dict[str, Any]:
    """Read fields of a Recipe from a source's remarks, which name what no column does."""
    modules, layers = re.search(r"recomputes ([\w+]+)", remarks), re.search(r"activations of (\d+) layers", remarks)
    return {
        "recomputed": tuple(modules[1].split("+")) if modules else (),
        "offloaded_layers": min(int(layers[1]), most_layers) if layers else 0,
        "optimizer_instances": 2 if "part of the data ranks" in remarks else 1,
        "fused_loss": "fused cross-entropy" in remarks,
        "packed": 2 if "two samples packed" in remarks else 1,
        "labelled": MASKED if "fused BERT code" in remarks else 1.0,
    }


def _read_chunks(row: Row, layers: int) -> int:
    """Read the chunks of a pipeline stage."""
    prefix, _, number = row.layers_per_virtual_stage.rpartition("=")
    count = int(float(number))  # table programs write 2.0 where other rows have none
    return count if prefix else max(1, math.ceil(math.ceil(layers / row.pipeline_parallel) / count))


def _usual_accumulation(row: Row, data: int, seq_len: int, chunks: int) -> int:
    """Micro-batches of a run that splits the model: they make up a usual step, and keep the bubble small."""
    stages = row.pipeline_parallel
    if row.tensor_parallel * stages == 1:
        return 1
    usual = max(8 * stages if stages > 1 else 1, round(USUAL_STEP_TOKENS / (data * row.micro_batch * seq_len)))
    return usual if chunks == 1 else math.ceil(usual / stages) * stages


# Megatron-Bridge 0.5.0, whose recipes of mixtures in mxfp8 on one node or on GB200 and GB300 are the first to capture
# the whole iteration, hide the exchange, fuse the experts' products and attend in 8 bits (cuda_graph_impl,
# moe_a2a_overlap, cutedsl_fused_grouped_mlp and fp8_dot_product_attention of qwen3_workload_base_configs.py).
WHOLE_MIXTURES_SINCE = "2026-06"


def _graphs(row: Row, model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid) -> Graphs:
    """Read what NVIDIA's code replays; without cell and remark, what its recipes do on Blackwell.

    They capture dense models without tensor ranks, stages and ZeRO-3 as a whole: Llama 3 8B in
    llama3_workload_base_configs.py of Megatron-Bridge 0.4.1 and in config_common_cg.sh of MLPerf Training 5.1
    (mlcommons/training_results_v5.1 at 441d65f, Dell).
    """
    mixture = bool(model.experts)
    if mixture:
        is_whole = recipe.precision == "fp8" and row.date >= WHOLE_MIXTURES_SINCE
        is_whole &= grid.nodes == 1 or hardware.gpus_per_node > setups.USUAL_GPUS_PER_NODE
    else:
        is_whole = grid.tensor == grid.pipeline == 1 and grid.sharding != types.ZERO3
    is_whole &= recipe.framework == "nemo" and hardware.gpu.architecture.startswith("Blackwell")
    given = row.cuda_graphs
    if not (is_whole or bool(re.search("(^|; ?)CUDA graphs", row.uncertain)) if given is None else given):
        return "none"
    return "whole" if not mixture else "fused" if is_whole else "part"


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
        setup = read_row(Row.read(row), gpus)
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow gives the row an error below
            estimates = estimate_case(setup, setup.coefficients(calibration))
    except GpufleetError as error:
        return result | {"error": "; ".join(" ".join(line.split()) for line in str(error).splitlines())}
    speed = float(estimates.tokens_per_second / setup.gpus)
    values = (speed, float(estimates.peak_memory_gib), float(estimates.step_time_s))
    if not all(math.isfinite(value) and value > 0 for value in values):
        return result | {"error": "the row's numbers are too large or too small to estimate"}
    p95_gib, fit = float(estimates.p95_memory_gib), str(estimates.fit)
    residual, _ = setup.speed_source(calibration)
    cells = (*values, bool(estimates.fits), None, p95_gib, fit, residual.relative_error)
    return result | dict(zip(COLUMNS, cells, strict=True))
