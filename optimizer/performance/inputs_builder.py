"""Build the inputs of a model, a recipe, hardware, a grid and a calibration."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from bootstrap.contract.trainer import powersgd_rank
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.units import GIB
from optimizer.performance import kernels
from optimizer.performance.calibration import Calibration
from optimizer.performance.fine_tuning import with_fine_tuning
from optimizer.performance.frameworks import Framework, framework_name, frameworks
from optimizer.performance.inputs import Coefficients, Inputs
from optimizer.performance.rates import (
    attention_flop_per_s,
    cycle_per_s,
    fp32_flop_per_s,
    link_rate,
    network_rate,
    outside_layers,
    peak_flop_per_s,
    visible_memory_gib,
)
from optimizer.performance.stacks import USUAL_SUBLAYERS, with_stacks
from optimizer.performance.types import CHECKPOINTINGS, Grid, Hardware, Recipe
from optimizer.workload.model import ModelSpec

# Bytes of one element in products and saved activations (https://docs.nvidia.com/deeplearning/transformer-engine).
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0}

# (state bytes a parameter, bytes the update moves a parameter, with one more read to clip gradients): arXiv:1910.02054,
# 3.1; Adafactor below 0.1 bytes for a matrix of 1024 x 1024 (arXiv:1804.04235, 4); bitsandbytes: two moments of one
# byte, with 4 bytes of scale for 256 elements each (arXiv:2110.02861, 2; optim/optimizer.py of 0.50). Its update moves
# 20.1 bytes and takes the time of 115: 58 ms for 1.24e9 parameters on H100 (finetuning_h100_202611.md).
OPTIMIZERS = {
    "adamw": (8.0, 32.0),
    "adam": (8.0, 32.0),
    "sgd": (4.0, 24.0),
    "adafactor": (0.1, 24.0),
    "adamw8bit": (2.0 + 8.0 / 256, 115.0),
}

# 8-bit copies of the weights, by rows and by columns (https://nvidia.github.io/TransformerEngine, low precision
# training, performance considerations).
FP8_COPIES_BYTES = 2.0

_ONES = Coefficients(**dict.fromkeys((field.name for field in fields(Coefficients)), 1.0))


def build_inputs(
    model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid, calibration: Calibration | None
) -> Inputs:
    """Build the inputs of every configuration of ``grid``; without a calibration coefficients are 1."""
    check_recipe(recipe)
    if recipe.precision == "fp8" and not model.layers:
        raise InvalidInputError(
            f"precision is fp8, and {model.name} is counted in samples",
            limit="fp32, tf32, fp16 or bf16",
            why="only linear layers compute in 8 bits, and their share of the model's products is not known",
            next_step="give --precision bf16",
        )
    recipe = replace(recipe, framework=framework_name(recipe.framework, cnn=model.convolutional))
    coefficients = calibration.coefficients(hardware.gpu, recipe) if calibration else _ONES
    link_byte_per_s, link_latency_s = link_rate(hardware)
    network_byte_per_s, network_latency_s = network_rate(hardware)
    framework = frameworks()[recipe.framework]
    settings: dict[str, Any] = {field.name: getattr(grid, field.name) for field in fields(Grid)}
    if grid.sequence_parallel is None:
        settings["sequence_parallel"] = framework.splits_sequence
    columns: dict[str, Any] = {name: np.asarray(value, dtype=np.float64) for name, value in settings.items()}
    state, traffic = OPTIMIZERS[recipe.optimizer]
    sixteen_bit = recipe.precision in ("fp16", "bf16", "fp8")
    fp16_autocast = recipe.precision == "fp16" and framework.cast_bytes > 0
    fused_fp8 = recipe.precision == "fp8" and framework.fused_kernels
    # A compiler pads products.
    padded = framework.pads_vocabulary or recipe.compiled
    misaligned = 1.0 if padded else kernels.output_projection_slowdown(recipe.precision, model.vocab_size)
    mixture = model.mixture_layers / model.layers if model.layers else 0.0
    shared_ffn = mixture * model.shared_ffn_size + (1.0 - mixture) * (model.dense_ffn_size or model.ffn_size)
    window = min(1.0, model.window / recipe.seq_len) if model.windowed_layers else 1.0
    inputs = Inputs(
        parameters=float(model.parameters),
        active_parameters=float(model.active_parameters),
        layers=float(model.layers),
        hidden=float(model.hidden_size),
        query=float(model.attention_heads * model.head_dim),
        kv=float(model.kv_heads * model.head_dim),
        heads=float(model.attention_heads),
        ffn=float(model.ffn_size),
        shared_ffn=shared_ffn,
        routed_ffn=mixture * model.ffn_size * model.experts_per_token,
        mlp_matrices=3.0 if model.gated_mlp else 2.0,
        experts_used=float(max(1, model.experts_per_token)),
        layer_matrix=float(model.active_layer_matrix_parameters),
        layer_parameters=float(model.layer_parameters),
        experts=float(model.experts),
        # A given parameter count may be below the architecture's.
        expert_parameters=min(float(model.experts * model.expert_matrix_parameters), float(model.layer_parameters)),
        mixture_layers=float(model.mixture_layers),
        dense_layer_parameters=float(model.dense_layer_parameters),
        latent=float(model.latent_attention.latent_width if model.latent_attention else 0),
        norms=float(model.norms_per_layer),
        # Under autocast each product casts its input: an encoder's queries, keys and values, as in stacks.py.
        input_casts=2.0 * (model.architecture == "encoder"),
        sublayers=USUAL_SUBLAYERS,
        head_norms=float(model.head_norms),
        windowed=model.windowed_layers / max(1, model.layers) if window < 1.0 else 0.0,
        window_scores=window * (2.0 - window),
        soft_cap=float(model.soft_cap),
        sinks=float(model.sinks),
        logits_soft_cap=float(model.logits_soft_cap),
        embedding_parameters=float(model.embedding_parameters),
        vocab=float(model.vocab_size),
        causal=1.0 if model.architecture == "decoder" else 0.0,
        copies_heads=0.0,
        t5_like=0.0,
        tokens=float(recipe.seq_len),
        keys=float(recipe.seq_len),
        head_tokens=float(recipe.seq_len),
        cnn_flops=float(model.flops_per_sample),
        cnn_activations=float(model.activations_per_sample),
        convolutions=float(model.convolutions),
        seq_len=float(recipe.seq_len),
        element_bytes=ELEMENT_BYTES[recipe.precision],
        low_precision=float(sixteen_bit),
        optimizer_state_bytes=state,
        optimizer_traffic_bytes=traffic,
        flash=float(recipe.attention == "flash" and not _without_kernel(model, framework)),
        compiled=float(recipe.compiled),
        half_gradients=float(recipe.gradient_compression in ("bf16", "fp16")),
        powersgd_rank=float(powersgd_rank(recipe.gradient_compression)),
        load_s_per_sample=1.0 / rate if (rate := recipe.samples_per_vcpu_s * hardware.loader_workers) else 0.0,
        trained=1.0,
        frozen_layers=0.0,
        trains_layers=1.0,
        trains_head=1.0,
        adapter_rank=0.0,
        adapts_mlp=0.0,
        four_bit=0.0,
        # 32-bit arithmetic needs no copy and no master.
        weight_bytes=framework.weight_bytes if sixteen_bit else 4.0,
        master_bytes=framework.master_bytes if sixteen_bit else 0.0,
        gradient_bytes=framework.gradient_bytes if sixteen_bit else 4.0,
        cast_bytes=framework.cast_bytes if sixteen_bit else 0.0,
        # 8-bit weights by rows and by columns take what 16-bit ones do.
        cached_bytes=FP8_COPIES_BYTES if fused_fp8 and not framework.fp8_weights else 0.0,
        gathered_bytes=_gathered_bytes(model, recipe, framework),
        reduce_bytes=framework.reduce_bytes if sixteen_bit else 4.0,
        bucket_bytes=framework.bucket_bytes,
        persistent_gradients=float(framework.persistent_gradients),
        residual_bytes=framework.residual_bytes if sixteen_bit and not fp16_autocast else 4.0,
        loss_bytes=framework.loss_bytes - _narrow_gradient(model, framework) * sixteen_bit,
        dropout=float(framework.dropout and model.has_dropout),
        llama_like=float(model.gated_mlp),
        selective_recompute=framework.selective_recompute,
        written_out=float(framework.written_out),
        fused_kernels=float(framework.fused_kernels),
        grouped_experts=float(framework.grouped_experts if recipe.experts is None else recipe.experts == "grouped"),
        autocast=float(sixteen_bit and framework.cast_bytes > 0),
        overlaps_data=float(framework.overlaps_data),
        hook_shards=float(framework.hook_shards),
        regathers_sequence=float(framework.regathers_sequence),
        balances_stages=float(framework.balances_stages),
        overlaps_tensor=float(framework.overlaps_tensor),
        gathers_per_layer=framework.gathers_per_layer,
        gathers_again=float(framework.gathers_again),
        loss_traffic_bytes=framework.loss_traffic_bytes,
        fsdp2=float(framework.fsdp2),
        own_ends=float(framework.own_ends),
        marks_last=float(framework.marks_last),
        # Gemma's norms, two a sublayer, stay written out (bootstrap/trainer/kernels.py).
        fused_norms=float(framework.fused_norms and model.norms_per_layer == 2),
        fused_rotary=float(framework.fused_rotary),
        masks_compiled=float(framework.masks_compiled),
        compiles_layers=float(framework.compiles_layers),
        splits_logits=float(framework.splits_logits),
        loss_turn_elements=framework.loss_turn_elements,
        peak_flop_per_s=peak_flop_per_s(hardware.gpu, recipe.precision),
        attention_flop_per_s=attention_flop_per_s(hardware.gpu, recipe.precision, framework.flash_kernel),
        expert_flop_per_s=peak_flop_per_s(hardware.gpu, _expert_precision(recipe.precision, framework)),
        head_flop_per_s=peak_flop_per_s(hardware.gpu, outside_layers(recipe.precision)) / misaligned,
        fp32_flop_per_s=fp32_flop_per_s(hardware.gpu, recipe.precision),
        cycle_per_s=cycle_per_s(hardware.gpu),
        throttling=kernels.throttling(hardware.gpu.architecture, recipe.precision),
        convolution=kernels.FP32_CONVOLUTION if recipe.precision == "fp32" else 1.0,
        quantise_bytes=kernels.QUANTISE_BYTES if fused_fp8 else 0.0,
        fp8_cast_bytes=_fp8_cast_bytes(recipe, framework),
        memory_byte_per_s=hardware.gpu.memory_bandwidth_gb_per_s * 1e9,
        link_byte_per_s=link_byte_per_s,
        link_latency_s=link_latency_s,
        network_byte_per_s=network_byte_per_s,
        network_latency_s=network_latency_s,
        gpus_per_node=float(max(1, hardware.gpus_per_node)),
        gpu_memory_bytes=visible_memory_gib(hardware) * GIB,
        coefficients=coefficients,
        **columns,
    )
    if model.profile is not None:
        return _with_module(inputs, model, recipe.precision)
    if model.encoder_layers:
        inputs = with_stacks(inputs, model, recipe)
    return with_fine_tuning(inputs, model, recipe)


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe with an unknown word or a number out of range."""
    if recipe.optimizer not in OPTIMIZERS:
        raise InvalidInputError(f"optimizer is {recipe.optimizer!r}", limit=f"one of {', '.join(OPTIMIZERS)}")
    if recipe.precision not in ELEMENT_BYTES:
        raise InvalidInputError(f"precision is {recipe.precision!r}", limit=f"one of {', '.join(ELEMENT_BYTES)}")
    if recipe.attention not in ("flash", "unfused"):
        raise InvalidInputError(f"attention is {recipe.attention!r}", limit="flash or unfused")
    if recipe.seq_len < 1:
        raise InvalidInputError(f"seq_len is {recipe.seq_len}", limit="a sequence has at least 1 token")


def _narrow_gradient(model: ModelSpec, framework: Framework) -> float:
    """Bytes a logit by which the gradient is narrower where Hugging Face leaves the widening to autocast.

    Its decoders widen the logits (loss/loss_utils.py, ForCausalLMLoss), and their gradient has 32 bits; the others give
    CrossEntropyLoss 16-bit logits: 10.0 and 12.0 bytes a logit alive at the peak (BERT, GPT-2: traced as in
    docs/models.md, torch 2.11, transformers 5.23, 2026-11-23).
    """
    at_once = framework.written_out and not framework.loss_turn_elements
    return 2.0 if at_once and model.architecture in ("encoder", "seq2seq", "speech") else 0.0


def _without_kernel(model: ModelSpec, framework: Framework) -> bool:
    """Return True where attention is written out for lack of a kernel.

    PyTorch's scaled_dot_product_attention takes no soft cap and no sinks (transformers 5.23, integrations/
    sdpa_attention.py, models/gemma2 and gpt_oss: _supports_sdpa is False).
    """
    return framework.written_out and (model.soft_cap or model.sinks)


def _expert_precision(precision: str, framework: Framework) -> str:
    """Precision of experts, which torchao does not cast.

    https://github.com/pytorch/ao, torchao/float8/float8_linear_utils.py, convert_to_float8_training
    """
    return precision if framework.fused_kernels else outside_layers(precision)


def _gathered_bytes(model: ModelSpec, recipe: Recipe, framework: Framework) -> float:
    if model.architecture == "cnn":
        # FSDP2 keeps 32 bits, and autocast casts (bootstrap/trainer/parallelize.py, _policy).
        return framework.weight_bytes
    narrow = recipe.precision == "fp8" and framework.fused_kernels and framework.fp8_weights
    return 1.0 if narrow else ELEMENT_BYTES[recipe.precision]


def _fp8_cast_bytes(recipe: Recipe, framework: Framework) -> float:
    if recipe.precision != "fp8" or framework.fused_kernels:
        return 0.0
    return kernels.COMPILED_FP8_CAST if recipe.compiled else kernels.FP8_CAST


def _with_module(x: Inputs, model: ModelSpec, precision: str) -> Inputs:
    """Replace the states of ``x`` by a profiled module's; frozen parameters have none."""
    profile = model.profile
    assert profile is not None
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
                why="a module is profiled without checkpointing, and with repeated blocks also with full",
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
        layer_parameters=float(profile.largest_unit_parameters),
        weight_bytes=profile.parameter_bytes / profile.total_parameters,
        gradient_bytes=4.0 * share,
        optimizer_state_bytes=x.optimizer_state_bytes * share,
        optimizer_traffic_bytes=x.optimizer_traffic_bytes * share,
        cast_bytes=0.0,  # counted in the profile
        reduce_bytes=4.0 * share,
        bucket_bytes=x.bucket_bytes * share,
    )
