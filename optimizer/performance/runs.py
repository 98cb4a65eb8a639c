"""Rows of measured (or to be estimated) runs: the columns of data/measured_runs.csv as model, run, hardware and grid.

`gpufleet estimate --batch` and the calibration read the same columns by the same rules. docs/estimator.md lists what
an empty cell means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optimizer.errors import GpufleetError, InvalidInputError
from optimizer.hardware import Gpu
from optimizer.performance.communication import link_of, network_of
from optimizer.performance.frameworks import framework_name
from optimizer.performance.inputs import Coefficients, Inputs, checkpointing_code, make_inputs, sharding_code
from optimizer.performance.legality import check_legal
from optimizer.performance.types import Grid, Hardware, Recipe
from optimizer.workload.model import BiasesAndNorms, ModelSpec, build_model, check_shape
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model
from optimizer.workload.size_rule import model_of_size

# Network of one GPU in a node that does not say: one card a GPU as in NVIDIA's reference systems, Gbit/s (DGX A100:
# 8 x 200, DGX H100 and H200: 8 x 400, DGX B200: 8 x 400, DGX-1 V100: 4 x 100 for 8), and 25 for PCIe cards
# (https://docs.nvidia.com/dgx). EC2 types have less: name the network, or use --instance-type.
NETWORK_GBIT_PER_S_PER_GPU = {"V100": 50.0, "A100": 200.0, "H100": 400.0, "H200": 400.0, "B200": 400.0, "B300": 800.0}
OTHER_NETWORK_GBIT_PER_S_PER_GPU = 25.0

# Tokens of one sequence where nobody says.
USUAL_SEQ_LEN = 2048
# Llama's rule for the width of a gated feed-forward block: 8/3 of the hidden size, rounded up to a multiple of this
# (https://github.com/meta-llama/llama, llama/model.py).
GATED_FFN_MULTIPLE = 256
# "7B" and the like, as a model's name.
SIZE = re.compile(r"[0-9][0-9_,.]*(e[0-9]+)?\s*[kmbgt]", re.IGNORECASE)

# Tokens of one optimizer step of large models that do not say: Llama 3 began at 4M (arXiv:2407.21783, 3.4.1).
USUAL_STEP_TOKENS = 4e6
MOST = 1e15  # a larger number in a cell is a mistake

# Words of the columns, with other spellings of the same.
ARCHITECTURES = {"decoder": "decoder", "llama": "decoder", "gpt": "decoder", "encoder": "encoder", "cnn": "cnn"}
SHARDINGS = {name: name for name in ("ddp", "zero1", "zero2", "zero3")}
SHARDINGS |= {"none": "ddp", "zero0": "ddp", "fsdp": "zero3", "fsdp2": "zero3"}
CHECKPOINTINGS = {name: name for name in ("none", "selective", "full")} | {
    "selective_op": "selective",
    "op": "selective",
}
PRECISIONS = {name: name for name in ("fp32", "tf32", "fp16", "bf16", "fp8")}
PRECISIONS |= {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8": "fp8"}
ATTENTIONS = {"flash": "flash", "sdpa": "flash", "fused": "flash", "unfused": "unfused", "eager": "unfused"}
EXPERTS = {"grouped": "grouped", "grouped_mm": "grouped", "loop": "loop", "eager": "loop"}
OPTIMIZERS = {"adamw": "adamw", "adam": "adam", "sgd": "sgd", "adafactor": "adafactor"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRun:
    """One row: what ``evaluate`` needs, one configuration."""

    model: ModelSpec
    recipe: Recipe
    hardware: Hardware
    grid: Grid
    gpus: int

    def inputs(self, coefficients: Coefficients) -> Inputs:
        """The row as Inputs, to be stacked with others."""
        link, network = link_of(self.hardware), network_of(self.hardware)
        return make_inputs(self.model, self.recipe, self.hardware, self.grid, coefficients, link, network)


def read_row(row: Mapping[str, Any], gpus: Mapping[str, Gpu]) -> RowRun:
    """Read one row.

    Args:
        row: column name to value; empty, NaN and None all mean "not given".
        gpus: the GPU table by key.

    Raises:
        GpufleetError: the row cannot be estimated; the message names the column, its value and what is known.
    """
    extra = row.get("")  # a list where the row is longer than the header; trailing commas are harmless
    if isinstance(extra, list) and any(cell.strip() for cell in extra):
        raise InvalidInputError(
            f"the row has {len(extra)} more cells than the header",
            limit="one cell a column",
            why="a comma within a cell that is not quoted shifts the others into wrong columns",
        )
    model = _model(row)
    cnn = model.architecture == "cnn"
    gpu = find_gpu(_text(row, "gpu"), gpus)

    count = _count(row, "gpus", default=1)
    per_node = min(_count(row, "gpus_per_node", default=min(8, count)), count)
    tensor = _count(row, "tensor_parallel", default=1)
    pipeline = _count(row, "pipeline_parallel", default=1)
    context = _count(row, "context_parallel", default=1)
    expert = _count(row, "expert_parallel", default=1)
    splits_sequence = _amount(row, "sequence_parallel", default=0, least=0) > 0
    if count % (tensor * pipeline * context):
        raise InvalidInputError(
            f"gpus is {count}",
            limit=f"a multiple of tensor {tensor} x pipeline {pipeline} x context {context}",
            why="every data-parallel rank has that many GPUs",
        )
    data = count // (tensor * pipeline * context)
    network = _amount(
        row,
        "network_gbit_per_s_per_node",
        default=default_network_gbit_per_s(gpu, per_node),
        least=0.001,
    )
    hardware = Hardware(
        gpu=gpu,
        gpus_per_node=per_node,
        interconnect="nvswitch" if gpu.nvlink_gb_per_s else "pcie",
        network_gbit_per_s=network,
        efa=True,
    )
    sharding = _word(row, "sharding", SHARDINGS, default=default_sharding(model, data * context))
    seq_len = 1 if cnn else _count(row, "seq_len", default=default_seq_len(model))
    micro_batch = _count(row, "micro_batch", default=1)
    virtual_stages = _virtual_stages(row, math.ceil(model.layers / pipeline))
    # Runs that split the model take as many micro-batches as make up a usual step, and keep the bubble small.
    usual_accumulation = 1
    if tensor * pipeline > 1:
        usual_accumulation = max(
            8 * pipeline if pipeline > 1 else 1, round(USUAL_STEP_TOKENS / (data * micro_batch * seq_len))
        )
        if virtual_stages > 1:
            usual_accumulation = math.ceil(usual_accumulation / pipeline) * pipeline
    framework = framework_name(_text(row, "framework"), cnn=cnn)
    if framework == "megatron" and sharding == "zero3":
        # Megatron-LM has no ZeRO-3: published runs that say both used DeepSpeed's (arXiv:2104.04473, 5.2).
        framework = "megatron-deepspeed"
    attention = _word(row, "attention", ATTENTIONS, default="flash")
    if framework == "megatron" and attention == "flash":
        framework = "megatron-core"
    if framework == "megatron-core" and sharding == "ddp":
        sharding = "zero1"  # its distributed optimizer (see frameworks.toml); tables of its runs do not repeat the flag
    recipe = Recipe(
        seq_len=seq_len,
        precision=_word(row, "precision", PRECISIONS, default="bf16"),  # type: ignore[arg-type]
        optimizer=_word(row, "optimizer", OPTIMIZERS, default="sgd" if cnn else "adamw"),  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        compiled=bool(_amount(row, "compiled", default=0, least=0)),
        framework=framework,
        experts=_word(row, "experts_implementation", EXPERTS, default="") or None,  # type: ignore[arg-type]
    )
    grid = Grid(
        nodes=math.ceil(count / per_node),
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        # A table's 0 is what it says by default: it does not take the split from a framework that always splits, nor
        # from experts, which need it.
        sequence_parallel=1 if splits_sequence or (expert > 1 and tensor > 1) else None,
        virtual_stages=virtual_stages,
        sharding=sharding_code(sharding),
        micro_batch=micro_batch,
        grad_accum=_count(row, "grad_accum", default=usual_accumulation),
        checkpointing=checkpointing_code(_word(row, "activation_checkpointing", CHECKPOINTINGS, default="none")),
    )
    check_legal(model, recipe, grid)
    return RowRun(model=model, recipe=recipe, hardware=hardware, grid=grid, gpus=count)


def default_sharding(model: ModelSpec, ranks: int) -> str:
    """Large language models are sharded over their data and context ranks; what fits one GPU is replicated."""
    return "zero3" if model.architecture == "decoder" and ranks > 1 else "ddp"


def default_seq_len(model: ModelSpec) -> int:
    """Tokens of a sequence where nobody says: USUAL_SEQ_LEN, or the model's most if that is less."""
    return min(USUAL_SEQ_LEN, model.max_seq_len or USUAL_SEQ_LEN)


def _model(row: Mapping[str, Any]) -> ModelSpec:
    """The model of a row: its columns, else the preset or the size that it names, else its parameter count."""
    architecture = _word(row, "architecture", ARCHITECTURES, default="")
    name = _text(row, "model")
    preset = presets().get(name.lower())
    if architecture == "cnn" or (not architecture and preset is not None and preset.architecture == "cnn"):
        return _cnn(row)
    if not _given(row, "layers") and not _given(row, "hidden_size"):
        if preset is not None and preset.architecture != "cnn":
            return preset.model(name)
        if architecture != "encoder" and SIZE.fullmatch(name):
            return resolve_model(name)
        if architecture != "encoder" and _given(row, "parameters"):
            return model_of_size(_count(row, "parameters"), name or "unnamed")
        raise InvalidInputError(
            f"model is {name!r}, without layers and hidden_size",
            limit="a preset, a size such as 7B, or a shape",
            why="memory and time follow from the shape",
            next_step="gpufleet estimate --help lists the presets",
        )
    return _transformer(row, architecture or "decoder")


def _cnn(row: Mapping[str, Any]) -> ModelSpec:
    name = _text(row, "model").lower()
    preset = presets().get(name)
    if preset is None or preset.architecture != "cnn":
        known = ", ".join(key for key, value in presets().items() if value.architecture == "cnn")
        raise InvalidInputError(
            f"model is {name!r} and architecture is cnn",
            limit=f"one of {known}",
            why="a CNN's FLOPs are published per model, not derived from columns",
        )
    return preset.model(name)


def _transformer(row: Mapping[str, Any], architecture: str) -> ModelSpec:
    name = _text(row, "model") or "unnamed"
    hidden = _count(row, "hidden_size")
    layers = _count(row, "layers")
    # One head is 128 wide in most published models of the last years (64 below 1024).
    heads = _count(row, "attention_heads", default=max(1, hidden // (128 if hidden >= 1024 else 64)))
    kv_heads = _count(row, "kv_heads", default=heads)
    gated = bool(_amount(row, "gated_mlp", default=float(_text(row, "architecture").lower() == "llama"), least=0))
    ffn = _count(
        row,
        "ffn_size",
        default=GATED_FFN_MULTIPLE * math.ceil(hidden * 8 / 3 / GATED_FFN_MULTIPLE) if gated else 4 * hidden,
    )
    # GPT-2's 50257, padded as training code does: an odd width would cost the output projection five times as much.
    vocab = _count(row, "vocab_size", default=32000 if gated else 50304)
    experts = _count(row, "experts", default=0, least=0)
    used = _count(row, "experts_per_token", default=min(2, experts), least=0)
    given = _amount(row, "parameters", default=0.0, least=0)

    def model(tied: bool) -> ModelSpec:
        return build_model(
            BiasesAndNorms(norm_bias=not gated),
            name=name,
            architecture="encoder" if architecture == "encoder" else "decoder",
            layers=layers,
            hidden_size=hidden,
            ffn_size=ffn,
            gated_mlp=gated,
            attention_heads=heads,
            kv_heads=kv_heads,
            head_dim=max(1, hidden // heads),
            vocab_size=vocab,
            tied_embeddings=tied,
            experts=experts,
            experts_per_token=used,
            source="columns of the row",
        )

    # GPT-2, MPT and BERT tie the output projection to the embedding, Llama and its kin of 4B and more do not.
    candidates = [model(True), model(False)]
    if given:
        # The given count decides, and stands: it knows biases, norms and positions that the columns do not.
        nearest = min(candidates, key=lambda candidate: abs(candidate.parameters - given))
        active = nearest.active_parameters if experts else round(given)
        return check_shape(replace(nearest, parameters=round(given), active_parameters=active))
    return check_shape(candidates[1] if gated else candidates[0])


def find_gpu(name: str, gpus: Mapping[str, Gpu]) -> Gpu:
    """A GPU by its key ("a100-80gb"), or by its name ("H100") where the table has one memory size of it.

    Raises:
        InvalidInputError: neither.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in gpus:
        return gpus[wanted]
    same = [gpu for gpu in gpus.values() if gpu.name.lower().replace(" ", "-") == wanted]
    if len(same) == 1:
        return same[0]
    known = [gpu.key for gpu in same] or list(gpus)
    raise InvalidInputError(f"gpu is {name!r}", limit=f"one of {', '.join(known)}")


def default_network_gbit_per_s(gpu: Gpu, gpus_per_node: int) -> float:
    """Network of a node that does not say, Gbit/s: a vendor reference system's (NETWORK_GBIT_PER_S_PER_GPU)."""
    return gpus_per_node * NETWORK_GBIT_PER_S_PER_GPU.get(gpu.name, OTHER_NETWORK_GBIT_PER_S_PER_GPU)


def _virtual_stages(row: Mapping[str, Any], layers_per_stage: int) -> int:
    """Chunks a pipeline rank, from "interleave=3" or from layers a chunk."""
    text = _text(row, "layers_per_virtual_stage")
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


def _given(row: Mapping[str, Any], column: str) -> bool:
    return _text(row, column) != ""


def _text(row: Mapping[str, Any], column: str) -> str:
    """A cell's text, "" where it is empty; "none" is a value of some columns, and empty in the others."""
    value = row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = str(value).strip()
    empty = ("nan", "null") if column in ("activation_checkpointing", "sharding") else ("nan", "null", "none")
    return "" if text.lower() in empty else text


def _amount(row: Mapping[str, Any], column: str, *, default: float | None = None, least: float) -> float:
    text = _text(row, column)
    if not text:
        if default is None:
            raise InvalidInputError(
                f"{column} is empty", limit=f"a number of at least {least:g}", why="there is no estimate without it"
            )
        return default
    try:
        value = {"true": 1.0, "false": 0.0}.get(text.lower())
        value = float(text) if value is None else value
    except ValueError as error:
        raise InvalidInputError(f"{column} is {text!r}", limit=f"a number of at least {least:g}") from error
    if not math.isfinite(value) or value < least:
        raise InvalidInputError(f"{column} is {text}", limit=f"a number of at least {least:g}")
    return value


def _count(row: Mapping[str, Any], column: str, *, default: int | None = None, least: int = 1) -> int:
    value = _amount(row, column, default=default, least=least)
    if value != round(value) or value > MOST:
        raise InvalidInputError(f"{column} is {value:g}", limit=f"a whole number from {least} to {MOST:g}")
    return round(value)


def _word(row: Mapping[str, Any], column: str, known: Mapping[str, str], *, default: str) -> str:
    text = _text(row, column).lower()
    if not text:
        return default
    if text not in known:
        raise InvalidInputError(f"{column} is {text!r}", limit=f"one of {', '.join(key for key in known if key)}")
    return known[text]


def row_error(error: GpufleetError) -> str:
    """An error on one line, for the ``error`` column."""
    return " ".join(str(error).split())
