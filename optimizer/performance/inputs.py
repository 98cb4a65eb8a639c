"""Model, run, hardware and grid as plain numbers, so that memory and time are arithmetic over arrays.

Every field of Inputs is a number or an array, and all of them broadcast: `evaluate` has one model and a grid of
configurations, the calibration and `estimate --batch` have one model, one GPU and one configuration a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optimizer.errors import DataMissingError, InvalidInputError
from optimizer.hardware import Gpu
from optimizer.performance import kernels
from optimizer.performance.frameworks import Framework, framework_name, frameworks
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS, Grid, Hardware, Recipe
from optimizer.units import GIB
from optimizer.workload.model import ModelSpec

if TYPE_CHECKING:
    from optimizer.workload.profile.records import ModuleProfile

Number = Any  # a float, or an array of floats: numpy's own types do not say "either" without noise

# Share of the memory EC2 gives for a GPU that nvidia-smi shows: a T4 keeps its error correction in it, 15360 of 16384
# MiB. H100 and H200 show 0.4% less, which the margin for fragmentation covers, A100, A10G, L4 and L40S no less
# (https://github.com/modal-labs/modal-client/pull/2797, 2025-01-23).
VISIBLE = {"T4": 15360 / 16384, "T4G": 15360 / 16384}

# Bytes of one element in the matrix products and saved activations; tf32 is fp32 in memory, fp8 keeps activations in
# 16 bits (https://docs.nvidia.com/deeplearning/transformer-engine).
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0}

# (state bytes a parameter, bytes the update moves a parameter: reads and writes of fp32 parameter and state, and the
# gradient read once more to be clipped). Adam keeps two fp32 moments, SGD one momentum (arXiv:1910.02054, 3.1);
# Adafactor's row and column sums are below 0.1 bytes for a matrix of 1024 x 1024 (arXiv:1804.04235, 4).
OPTIMIZERS = {"adamw": (8.0, 32.0), "adam": (8.0, 32.0), "sgd": (4.0, 24.0), "adafactor": (0.1, 24.0)}

# fp32 over the 16-bit peak of a GPU whose datasheet has no fp32: less than of any in the table that has (B300 1/30).
LEAST_FP32_SHARE = 1 / 34

# Copies of the layers' weights in 8 bits, by rows and by columns, which Hopper's products need both of
# (https://nvidia.github.io/TransformerEngine, low precision training, performance considerations).
FP8_COPIES_BYTES = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """The fitted numbers of one run (see calibration.py); each a number or an array."""

    matmul_efficiency: Number
    matmul_traffic: Number
    attention_efficiency: Number
    elementwise_traffic: Number
    overhead: Number
    kernel_s: Number
    host_s_per_layer: Number
    host_s_per_step: Number
    exposed_communication: Number
    network_efficiency: Number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """Numbers the equations use; the first dataclass that holds a quantity says what it is.

    Two are equal only if they are one, so that what was worked out of an Inputs can be kept with it.
    """

    # ModelSpec
    parameters: Number
    active_parameters: Number
    layers: Number
    hidden: Number
    query: Number
    kv: Number
    heads: Number
    ffn: Number
    mlp_matrices: Number
    experts_used: Number
    layer_matrix: Number
    layer_parameters: Number
    experts: Number
    expert_parameters: Number
    embedding_parameters: Number
    vocab: Number
    causal: Number
    cnn_flops: Number
    cnn_activations: Number
    convolutions: Number
    # Run
    seq_len: Number
    element_bytes: Number
    low_precision: Number
    optimizer_state_bytes: Number
    optimizer_traffic_bytes: Number
    flash: Number
    compiled: Number
    # Framework
    weight_bytes: Number
    master_bytes: Number
    gradient_bytes: Number
    cast_bytes: Number
    cached_bytes: Number
    reduce_bytes: Number
    bucket_bytes: Number
    persistent_gradients: Number
    residual_bytes: Number
    loss_bytes: Number
    dropout: Number
    llama_like: Number
    selective_recompute: Number
    written_out: Number
    fused_kernels: Number
    grouped_experts: Number
    autocast: Number
    overlaps_data: Number
    overlaps_tensor: Number
    gathers_per_layer: Number
    gathers_again: Number
    loss_traffic_bytes: Number
    # Hardware
    peak_flop_per_s: Number
    attention_flop_per_s: Number
    expert_flop_per_s: Number
    head_flop_per_s: Number
    fp32_flop_per_s: Number
    throttling: Number
    quantise_bytes: Number
    fp8_cast_bytes: Number
    convolution: Number
    memory_byte_per_s: Number
    link_byte_per_s: Number
    link_latency_s: Number
    network_byte_per_s: Number
    network_latency_s: Number
    gpus_per_node: Number
    gpu_memory_bytes: Number
    # Grid
    nodes: Number
    data: Number
    tensor: Number
    pipeline: Number
    context: Number
    expert: Number
    sequence_parallel: Number
    virtual_stages: Number
    sharding: Number
    micro_batch: Number
    grad_accum: Number
    checkpointing: Number
    # Calibration
    coefficients: Coefficients
    # What a profiled module costs; None for a model whose costs follow from the numbers above (see samples.py).
    module: ModuleProfile | None = None


def peak_flop_per_s(gpu: Gpu, precision: str) -> float:
    """Dense peak of ``gpu`` in ``precision``, FLOP/s.

    Raises:
        DataMissingError: the GPU does not run that precision, by its datasheet.
    """
    peak = gpu.peak_tflop_per_s.get(precision)
    if not peak:
        has = ", ".join(name for name, value in gpu.peak_tflop_per_s.items() if value)
        raise DataMissingError(
            f"{gpu.name} has no {precision} peak in the GPU table",
            limit=f"it runs {has}",
            why=f"the vendor's datasheet gives no such rate ({gpu.source})",
            next_step="choose another --precision or GPU",
        )
    return float(peak) * 1e12


def _fp32_flop_per_s(gpu: Gpu, precision: str) -> float:
    """Arithmetic in 32 bits whatever the recipe's precision, FLOP/s.

    Dropout inside attention, what a compiler makes of scores, and a mixture's experts that miss the recipe's precision
    (memory.experts_in_32_bits).
    """
    if gpu.peak_tflop_per_s.get("fp32"):
        return peak_flop_per_s(gpu, "fp32")
    return peak_flop_per_s(gpu, precision) * LEAST_FP32_SHARE


def _fp8_cast_bytes(recipe: Recipe, framework: Framework) -> float:
    """Bytes an element that plain PyTorch moves to cast an operand of a product to 8 bits; 0 where none is cast so."""
    if recipe.precision != "fp8" or framework.fused_kernels:
        return 0.0
    return kernels.COMPILED_FP8_CAST if recipe.compiled else kernels.FP8_CAST


def attention_flop_per_s(gpu: Gpu, precision: str, kernel: kernels.FlashKernel) -> float:
    """Speed of fused attention on long sequences with heads of 128, FLOP/s.

    Raises:
        DataMissingError: the GPU does not run that precision.
    """
    if precision in ("fp32", "tf32"):
        return kernels.ATTENTION_32_BIT * peak_flop_per_s(gpu, "fp32")
    return peak_flop_per_s(gpu, _outside_layers(precision)) * kernels.attention_share(gpu.architecture, kernel)


def _outside_layers(precision: str) -> str:
    """Only the layers' products run in 8 bits: attention and the output projection stay in 16.

    https://docs.nvidia.com/deeplearning/transformer-engine
    """
    return "bf16" if precision == "fp8" else precision


def _of_experts(precision: str, framework: Framework) -> str:
    """What a mixture's experts compute in: torchao casts linear layers, which Hugging Face's are not.

    https://github.com/pytorch/ao, torchao/float8/float8_linear_utils.py, convert_to_float8_training
    """
    return precision if framework.fused_kernels else _outside_layers(precision)


def make_inputs(
    model: ModelSpec,
    recipe: Recipe,
    hardware: Hardware,
    grid: Grid,
    coefficients: Coefficients,
    link: tuple[float, float],
    network: tuple[float, float],
) -> Inputs:
    """Put everything ``evaluate`` was given into numbers.

    Args:
        model, run, hardware, grid: as given to ``evaluate``.
        coefficients: fitted numbers for this run.
        link: bus bandwidth (byte/s) and latency (s) of collectives inside a node.
        network: bandwidth of one node's network (byte/s, all cards) and latency (s) of collectives across nodes.

    Raises:
        DataMissingError: the GPU does not run the precision.
        InvalidInputError: a number out of range, or a module that cannot be trained so.
    """
    check_recipe(recipe)
    if recipe.precision == "fp8" and not model.layers:
        raise InvalidInputError(
            f"precision is fp8, and {model.name} is counted in samples",
            limit="fp32, tf32, fp16 or bf16",
            why="only linear layers compute in 8 bits, and which of its products are theirs is not known",
            next_step="give --precision bf16",
        )
    framework = frameworks()[framework_name(recipe.framework)]
    state, traffic = OPTIMIZERS[recipe.optimizer]
    sixteen_bit = recipe.precision in ("fp16", "bf16", "fp8")
    fused_fp8 = recipe.precision == "fp8" and framework.fused_kernels
    # A compiler pads products that do not align, as does code that pads its vocabulary.
    padded = framework.pads_vocabulary or recipe.compiled
    misaligned = 1.0 if padded else kernels.output_projection_slowdown(recipe.precision, model.vocab_size)
    found = Inputs(
        parameters=float(model.parameters),
        active_parameters=float(model.active_parameters),
        layers=float(model.layers),
        hidden=float(model.hidden_size),
        query=float(model.attention_heads * model.head_dim),
        kv=float(model.kv_heads * model.head_dim),
        heads=float(model.attention_heads),
        ffn=float(model.ffn_size),
        mlp_matrices=3.0 if model.gated_mlp else 2.0,
        experts_used=float(max(1, model.experts_per_token)),
        layer_matrix=float(model.active_layer_matrix_parameters),
        layer_parameters=float(model.layer_parameters),
        experts=float(model.experts),
        # Of one layer, all experts; a given count of parameters may be less than the architecture's.
        expert_parameters=min(float(model.experts * model.expert_matrix_parameters), float(model.layer_parameters)),
        embedding_parameters=float(model.embedding_parameters),
        vocab=float(model.vocab_size),
        causal=1.0 if model.architecture == "decoder" else 0.0,
        cnn_flops=float(model.flops_per_sample),
        cnn_activations=float(model.activations_per_sample),
        convolutions=float(model.convolutions),
        seq_len=float(recipe.seq_len),
        element_bytes=ELEMENT_BYTES[recipe.precision],
        low_precision=float(sixteen_bit),
        optimizer_state_bytes=state,
        optimizer_traffic_bytes=traffic,
        flash=float(recipe.attention == "flash"),
        compiled=float(recipe.compiled),
        # Without 16-bit arithmetic there is no copy, no master, and every element is 4 bytes.
        weight_bytes=framework.weight_bytes if sixteen_bit else 4.0,
        master_bytes=framework.master_bytes if sixteen_bit else 0.0,
        gradient_bytes=framework.gradient_bytes if sixteen_bit else 4.0,
        cast_bytes=framework.cast_bytes if sixteen_bit else 0.0,
        cached_bytes=FP8_COPIES_BYTES if fused_fp8 else 0.0,
        reduce_bytes=framework.reduce_bytes if sixteen_bit else 4.0,
        bucket_bytes=framework.bucket_bytes,
        persistent_gradients=float(framework.persistent_gradients),
        residual_bytes=framework.residual_bytes if sixteen_bit else 4.0,
        loss_bytes=framework.loss_bytes,
        # Llama and its kin have no dropout, RMSNorm and rotary positions; GPT-2, MPT and BERT have LayerNorm.
        dropout=float(framework.dropout and not model.gated_mlp),
        llama_like=float(model.gated_mlp),
        selective_recompute=framework.selective_recompute,
        written_out=float(framework.written_out),
        fused_kernels=float(framework.fused_kernels),
        grouped_experts=float(framework.grouped_experts if recipe.experts is None else recipe.experts == "grouped"),
        # Only autocast keeps 16-bit copies of 32-bit weights.
        autocast=float(sixteen_bit and framework.cast_bytes > 0),
        overlaps_data=float(framework.overlaps_data),
        overlaps_tensor=float(framework.overlaps_tensor),
        gathers_per_layer=framework.gathers_per_layer,
        gathers_again=float(framework.gathers_again),
        loss_traffic_bytes=framework.loss_traffic_bytes,
        peak_flop_per_s=peak_flop_per_s(hardware.gpu, recipe.precision),
        attention_flop_per_s=attention_flop_per_s(hardware.gpu, recipe.precision, framework.flash_kernel),
        expert_flop_per_s=peak_flop_per_s(hardware.gpu, _of_experts(recipe.precision, framework)),
        head_flop_per_s=peak_flop_per_s(hardware.gpu, _outside_layers(recipe.precision)) / misaligned,
        fp32_flop_per_s=_fp32_flop_per_s(hardware.gpu, recipe.precision),
        throttling=kernels.throttling(hardware.gpu.architecture, recipe.precision),
        convolution=kernels.FP32_CONVOLUTION if recipe.precision == "fp32" else 1.0,
        quantise_bytes=kernels.QUANTISE_BYTES if fused_fp8 else 0.0,
        fp8_cast_bytes=_fp8_cast_bytes(recipe, framework),
        memory_byte_per_s=hardware.gpu.memory_bandwidth_gb_per_s * 1e9,
        link_byte_per_s=link[0],
        link_latency_s=link[1],
        network_byte_per_s=network[0],
        network_latency_s=network[1],
        gpus_per_node=float(max(1, hardware.gpus_per_node)),
        gpu_memory_bytes=visible_memory_gib(hardware) * GIB,
        **_settings(grid, framework),
        coefficients=coefficients,
    )
    return _with_module(found, model, recipe.precision)


def _with_module(x: Inputs, model: ModelSpec, precision: str) -> Inputs:
    """``x`` with the states of a profiled module: as many bytes as it stores, and none for what is not trained.

    Raises:
        InvalidInputError: the module was not profiled in that precision, or code with weights of its own trains it.
    """
    profile = model.profile
    if profile is None:
        return x
    if profile.passed("16-bit" if x.low_precision > 0 else "32-bit", "none") is None:
        raise InvalidInputError(
            f"precision is {precision}, and {profile.name} is stored in 16 bits",
            limit="bf16 or fp16",
            why="its arithmetic is as wide as its parameters",
            next_step="give --precision bf16, or build the module in float32",
        )
    for kind in np.unique(x.checkpointing):
        if CHECKPOINTINGS[int(kind)] not in model.checkpointings:
            raise InvalidInputError(
                f"activation_checkpointing is {CHECKPOINTINGS[int(kind)]}",
                limit=f"{' or '.join(model.checkpointings)} for {profile.name}",
                why="a module is profiled without it and, where it has repeated blocks, with their inputs kept alone",
            )
    if x.master_bytes > 0:
        raise InvalidInputError(
            f"{profile.name} is a profiled module, and the framework keeps weights of its own",
            limit="plain PyTorch (torch, torchvision, torchtitan, composer-fsdp)",
            next_step="leave out --framework",
        )
    trained = profile.trainable_parameters / profile.total_parameters
    element = profile.trainable_bytes / profile.trainable_parameters
    share = trained * element / 4.0  # of fp32 states of all parameters
    return replace(
        x,
        module=profile,
        # The largest part that FSDP gathers at once.
        layer_parameters=float(profile.largest_unit_parameters),
        weight_bytes=profile.parameter_bytes / profile.total_parameters,
        gradient_bytes=4.0 * share,
        optimizer_state_bytes=x.optimizer_state_bytes * share,
        optimizer_traffic_bytes=x.optimizer_traffic_bytes * share,
        cast_bytes=0.0,  # counted in the profile
        reduce_bytes=4.0 * share,
        bucket_bytes=x.bucket_bytes * share,
    )


def visible_memory_gib(hardware: Hardware) -> float:
    """Memory of one GPU that the driver shows, GiB: EC2's figure, less what error correction takes (VISIBLE)."""
    memory_gib = hardware.gpu_memory_gib or hardware.gpu.memory_gib
    return memory_gib * VISIBLE.get(hardware.gpu.name, 1.0)


def check_recipe(recipe: Recipe) -> None:
    """Refuse a run whose words or numbers mean nothing.

    Raises:
        InvalidInputError: the field, its value and what is known.
    """
    if recipe.optimizer not in OPTIMIZERS:
        raise InvalidInputError(f"optimizer is {recipe.optimizer!r}", limit=f"one of {', '.join(OPTIMIZERS)}")
    if recipe.precision not in ELEMENT_BYTES:
        raise InvalidInputError(f"precision is {recipe.precision!r}", limit=f"one of {', '.join(ELEMENT_BYTES)}")
    if recipe.attention not in ("flash", "unfused"):
        raise InvalidInputError(f"attention is {recipe.attention!r}", limit="flash or unfused")
    if recipe.seq_len < 1:
        raise InvalidInputError(f"seq_len is {recipe.seq_len}", limit="a sequence has at least 1 token")


def _settings(grid: Grid, framework: Framework) -> dict[str, Number]:
    """The arrays of ``grid`` as floats; what it leaves open is what the framework does."""
    settings = {field.name: getattr(grid, field.name) for field in fields(Grid)}
    if grid.sequence_parallel is None:
        settings["sequence_parallel"] = framework.splits_sequence
    return {name: np.asarray(value, dtype=np.float64) for name, value in settings.items()}


def grid_shape(grid: Grid) -> tuple[int, ...]:
    """The shape all arrays of ``grid`` broadcast to."""
    return np.broadcast_shapes(*(np.shape(getattr(grid, field.name)) for field in fields(Grid)))


def code(names: Sequence[str], value: str, field: str) -> int:
    """Position of ``value`` in SHARDINGS or CHECKPOINTINGS.

    Raises:
        InvalidInputError: it is not in there.
    """
    if value not in names:
        raise InvalidInputError(f"{field} is {value!r}", limit=f"one of {', '.join(names)}")
    return names.index(value)


def sharding_code(value: str) -> int:
    """Code of a sharding: "ddp", "zero1", "zero2" or "zero3"."""
    return code(SHARDINGS, value, "sharding")


def checkpointing_code(value: str) -> int:
    """Code of activation checkpointing: "none", "selective" or "full"."""
    return code(CHECKPOINTINGS, value, "activation_checkpointing")


def stack(rows: Sequence[Inputs]) -> Inputs:
    """Join Inputs of single configurations into one of arrays, one element a row."""
    coefficients = Coefficients(**_stacked([row.coefficients for row in rows]))
    return Inputs(**_stacked(rows, leave_out=("coefficients", "module")), coefficients=coefficients)


def _stacked(rows: Sequence[Any], leave_out: Sequence[str] = ()) -> Mapping[str, Any]:
    names = [field.name for field in fields(rows[0]) if field.name not in leave_out]
    return {name: np.array([getattr(row, name) for row in rows], dtype=np.float64).reshape(-1) for name in names}


def to_gib(number_of_bytes: Number) -> Number:
    """Bytes as GiB."""
    return number_of_bytes / GIB
