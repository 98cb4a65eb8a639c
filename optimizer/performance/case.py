"""A case: one model and recipe, on one kind of node, in one layout or many. Numbers that operations and memory share.

What follows from model, recipe and hardware is a number; a layout's columns are numbers or arrays that broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from bootstrap.contract.fine_tuning import EIGHT_BIT
from bootstrap.contract.trainer import span_lengths
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.units import GIB
from optimizer.performance import kernels
from optimizer.performance.fine_tuning import ADAPTER_BYTES, NF4_BYTES, trained_parameters
from optimizer.performance.frameworks import Framework, frameworks
from optimizer.performance.rates import (
    LEAST_FP32_SHARE,
    cycle_per_s,
    link_rate,
    network_rate,
    peak_flop_per_s,
    visible_memory_gib,
)
from optimizer.performance.types import CHECKPOINTINGS, FULL, NONE, ZERO1, Flag, Grid, Hardware, Number, Recipe
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
# Attention and feed-forward block of a plain layer; a decoder's with cross-attention has one more.
USUAL_SUBLAYERS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanLayer:
    """A model's layer; of an encoder with a decoder the mean over the layers, weighted by tokens.

    Costs that are linear in tokens and widths are exact with such means; attention's are with the mean number of keys.

    Attributes:
        tokens: of a sample in one layer.
        keys: that a token attends to, before a causal mask.
        head_tokens: of a sample that have logits.
        query, kv: width of all queries, and of all keys.
        matrix: weights that a token is multiplied with.
        attention_matrix: those of attention's projections.
        inner, routed: feed-forward widths that a token passes through: of all but routed experts, and of those.
        input_casts: 16-bit copies of a norm's output, a token, that products keep beyond the first.
        sublayers: attentions and feed-forward blocks.
        windowed: share of the layers whose window is shorter than the sequence.
        seen: share of causal scores in such a window.
    """

    tokens: float
    keys: float
    head_tokens: float
    query: float
    kv: float
    heads: float
    matrix: float
    attention_matrix: float
    inner: float
    routed: float
    norms: float
    input_casts: float
    sublayers: float
    windowed: float
    seen: float
    causal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes a parameter, means over the model's parameters (data/frameworks.toml explains them), and what follows.

    Attributes:
        optimizer, update: of the optimizer's state, and those that its step moves.
        cached: 8-bit copies of the weights.
        gathered: of a weight on the wire.
        residual: bytes of an element of the residual under autocast.
        trained: share of the parameters that have gradients.
    """

    weight: float
    master: float
    gradient: float
    cast: float
    cached: float
    gathered: float
    reduce: float
    bucket: float
    optimizer: float
    update: float
    residual: float
    autocast: bool
    trained: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of a GPU in the recipe's precision, and of its node: FLOP/s, byte/s, seconds.

    Attributes:
        cycles: of all multiprocessors together, 1/s.
        memory: of a large copy.
        load_s_per_sample: of one rank's loader.
    """

    peak: Number
    attention: Number
    expert: Number
    head: Number
    convolution: Number
    fp32: Number
    cycles: Number
    throttling: Number
    memory: Number
    link: Number
    link_latency_s: Number
    network: Number
    network_latency_s: Number
    gpus_per_node: Number
    gpu_memory_bytes: Number
    load_s_per_sample: Number


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model, a recipe and its code on one kind of node, with the columns of Grid."""

    model: ModelSpec
    recipe: Recipe
    code: Framework
    layer: MeanLayer
    state: StateBytes
    rates: Rates
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

    # Recipe

    @cached_property
    def element(self) -> float:
        """Bytes of an element in products and saved activations."""
        return ELEMENT_BYTES[self.recipe.precision]

    @cached_property
    def has_flash(self) -> bool:
        """True where attention has a fused kernel.

        PyTorch's scaled_dot_product_attention takes no soft cap and no sinks (transformers 5.23, integrations/
        sdpa_attention.py, models/gemma2 and gpt_oss: _supports_sdpa is False).
        """
        lacks_kernel = self.code.written_out and (self.model.soft_cap or self.model.sinks)
        return self.recipe.attention == "flash" and not lacks_kernel

    @cached_property
    def has_dropout(self) -> bool:
        """True where code and model drop."""
        return self.code.dropout and self.model.has_dropout

    @cached_property
    def has_fused_norms(self) -> bool:
        """True where norms that others write out are one kernel."""
        # Gemma's norms, two a sublayer, stay written out (bootstrap/trainer/kernels.py).
        return self.code.fused_norms and self.model.norms_per_layer == 2

    @cached_property
    def is_t5(self) -> bool:
        """True for T5: norms written out, a learned bias a score, dropout within the feed-forward block."""
        return self.model.architecture == "seq2seq"

    @cached_property
    def groups_experts(self) -> bool:
        """True where a mixture's experts are one grouped product, not a loop."""
        return self.code.grouped_experts if self.recipe.experts is None else self.recipe.experts == "grouped"

    @cached_property
    def has_fused_fp8(self) -> bool:
        """True for Transformer Engine's fp8, which keeps inputs of products in 8 bits."""
        return self.recipe.precision == "fp8" and self.code.fused_kernels

    @cached_property
    def casts_fp8(self) -> bool:
        """True for torchao's fp8, which casts the operands of plain PyTorch's products."""
        return self.recipe.precision == "fp8" and not self.code.fused_kernels

    @cached_property
    def trains_head(self) -> bool:
        """True where the output projection trains."""
        tuning = self.recipe.tuning
        return tuning.trains_all or not (tuning.adapts or self.model.tied_embeddings)

    @cached_property
    def live_share(self) -> float:
        """Share of the layers that the backward pass reaches."""
        return 1.0 - self.recipe.tuning.frozen_layers / max(self.model.layers, 1)

    @cached_property
    def repeats(self) -> Number:
        """1 where whole layers are computed again."""
        return np.where(self.checkpointing == FULL, 1.0, 0.0)

    @cached_property
    def checkpoints(self) -> Number:
        """1 where a part of each layer, or all, is computed again."""
        return np.where(self.checkpointing == NONE, 0.0, 1.0)

    # Layout

    @cached_property
    def ranks(self) -> Number:
        """Ranks that share states."""
        return self.data * self.context

    @cached_property
    def tokens(self) -> Number:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.layer.tokens / self.context

    @cached_property
    def head_tokens(self) -> Number:
        """Tokens of one micro-batch on one rank that have logits."""
        return self.micro_batch * self.layer.head_tokens / self.context

    @cached_property
    def split(self) -> Number:
        """Ranks that norms, residual and dropout are split over."""
        return np.where(self.sequence_parallel > 0, self.tensor, 1.0)

    @cached_property
    def stage_layers(self) -> Number:
        """Layers of the fullest pipeline stage."""
        head = np.where(self.pipeline > 1, self._head_layers, 0.0) if self.code.balances_stages else 0.0
        return np.minimum(np.ceil((self.model.layers + head) / self.pipeline), self.model.layers)

    @cached_property
    def last_stage_layers(self) -> Number:
        """Layers of the stage with the output projection."""
        if not self.code.balances_stages:
            return self.stage_layers
        balanced = np.clip(np.floor(self.stage_layers - self._head_layers), 0.0, None)
        return np.where(self.pipeline > 1, balanced, self.stage_layers)

    @property
    def _head_layers(self) -> float:
        """Output projection's parameters over a layer's, the weight that balanced stages count."""
        return self.table_parameters / max(self.layer.matrix, 1.0)

    @cached_property
    def stage_mixtures(self) -> Number:
        """Layers with experts of the fullest pipeline stage."""
        return np.minimum(self.stage_layers, self.model.mixture_layers)

    @cached_property
    def table_parameters(self) -> float:
        """Parameters of an embedding or an output projection."""
        return float(self.model.vocab_size * self.model.hidden_size)

    @cached_property
    def expert_parameters(self) -> float:
        """Parameters of a layer's experts; a given parameter count may be below the architecture's."""
        return min(self.model.experts * self.model.expert_matrix_parameters, self.layer_parameters)

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters of one layer; of a profiled module, of its largest unit."""
        profile = self.model.profile
        return float(profile.largest_unit_parameters) if profile else float(self.model.layer_parameters)

    @cached_property
    def expert_slices(self) -> Number:
        """Tensor ranks that share one expert: 1 where experts are spread over tensor ranks too (Megatron)."""
        return np.where(self.expert > self.data, 1.0, self.tensor)

    @cached_property
    def rank_layer_parameters(self) -> Number:
        """Parameters of one layer on one tensor rank; of a mixture not of a dense layer."""
        beside = (self.layer_parameters - self.expert_parameters) / self.tensor
        return beside + self.expert_parameters / self.expert / self.expert_slices

    @cached_property
    def stage_parameters(self) -> Number:
        """Parameters of the fullest rank's stage, tensor slice and experts, before sharding over data ranks.

        The fullest stage has one table: the first the embedding, the last the output projection.
        """
        return self._stage_parameters(self.rank_layer_parameters)

    @cached_property
    def shard_parameters(self) -> Number:
        """Parameters of a rank where data ranks share them: a stage's and tensor slice's, with all experts."""
        return self._stage_parameters(self.layer_parameters / self.tensor) / self.ranks

    def _stage_parameters(self, layer: Number) -> Number:
        tables, all_tables = self.table_parameters, float(self.model.embedding_parameters)
        # The first stage has the positions too.
        first = all_tables - tables if all_tables >= 2.0 * tables else all_tables
        table = np.where(self.pipeline > 1, first, all_tables) / self.tensor
        if not self.model.experts:
            return self.stage_layers * layer + table
        # The fullest stage has as few of a mixture's dense layers as can be.
        dense = (self.stage_layers - self.stage_mixtures) * self.model.dense_layer_parameters / self.tensor
        return self.stage_mixtures * layer + dense + table

    @cached_property
    def updated_parameters(self) -> Number:
        """Parameters that the fullest rank's optimizer updates."""
        return np.where(self.sharding >= ZERO1, self.shard_parameters, self.stage_parameters)

    @cached_property
    def rank_experts(self) -> Number:
        """Parameters of a stage's experts on one rank."""
        return self.stage_mixtures * self.expert_parameters / self.expert / self.expert_slices

    # Precision in a layout

    @cached_property
    def uses_fully_shard(self) -> Flag:
        """Flag states that torch's ``fully_shard`` shards."""
        return (self.code.fsdp2 > 0) & (self.sharding >= self.code.fsdp2) & (self.ranks > 1)

    @cached_property
    def is_narrow(self) -> Flag:
        """Flag Hugging Face's modules under FSDP2 or the trainer's tensor parallelism: 16 bits, no autocast."""
        if not self.code.written_out:
            return False
        return self.uses_fully_shard | (self.code.splits_logits & (self.tensor > 1))

    @cached_property
    def residual(self) -> Number:
        """Bytes of an element of the residual, which is as narrow as products where nothing is under autocast."""
        return np.where(self.is_narrow, min(self.element, self.state.residual), self.state.residual)

    @cached_property
    def experts_miss_autocast(self) -> bool:
        """True for mixtures whose grouped product computes in the weights' 32 bits unless FSDP gathers 16.

        Autocast skips torch's grouped product (https://github.com/pytorch/pytorch/issues/174763; transformers 5.23,
        integrations/moe.py, _grouped_mm).
        """
        return self.state.autocast and self.groups_experts and self.model.experts > 0

    @cached_property
    def experts_in_32_bits(self) -> Flag:
        """Flag mixtures whose products run in 32 bits under a 16-bit recipe."""
        return self.experts_miss_autocast & np.logical_not(self.is_narrow)

    @cached_property
    def groups_queries_in_32_bits(self) -> bool:
        """True for 32-bit grouped queries in PyTorch, which have no fused attention; not for means of unlike layers."""
        grouped = self.layer.kv < self.layer.query and self.layer.sublayers <= USUAL_SUBLAYERS
        return self.code.written_out and self.element > 2.0 and grouped

    @cached_property
    def compiles_scores(self) -> bool:
        """True for compiled non-causal attention with mask and dropout, which has no fused kernel."""
        compiled = self.code.written_out and self.code.masks_compiled and self.recipe.compiled
        return compiled and not self.layer.causal and self.has_dropout

    @cached_property
    def masked_share(self) -> float:
        """Share of the layers whose window PyTorch's attention gets as a mask: it computes all scores."""
        return self.layer.windowed if self.code.written_out and self.has_flash else 0.0


def build_case(model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid) -> Case:
    """Build the case of every configuration of ``grid``."""
    if recipe.precision == "fp8" and not model.layers:
        raise InvalidInputError(
            f"precision is fp8, and {model.name} is counted in samples",
            limit="fp32, tf32, fp16 or bf16",
            why="only linear layers compute in 8 bits, and their share of the model's products is not known",
            next_step="give --precision bf16",
        )
    code = frameworks()[recipe.framework]
    settings: dict[str, Any] = {field.name: getattr(grid, field.name) for field in fields(Grid)}
    if grid.sequence_parallel is None:
        settings["sequence_parallel"] = code.splits_sequence
    columns: dict[str, Any] = {name: np.asarray(value, dtype=np.float64) for name, value in settings.items()}
    if model.profile is not None:
        _check_module(model, recipe, code, columns["checkpointing"])
    return Case(
        model=model,
        recipe=recipe,
        code=code,
        layer=_mean_layer(model, recipe),
        state=_state_bytes(model, recipe, code),
        rates=_rates(model, recipe, code, hardware),
        **columns,
    )


def lengths(model: ModelSpec, recipe: Recipe) -> tuple[int, int]:
    """Tokens of a sample in the encoder and in the decoder."""
    if model.architecture == "seq2seq":
        return recipe.seq_len, recipe.target_len or span_lengths(recipe.seq_len)[1]
    return model.encoder_tokens, recipe.target_len or model.decoder_tokens


def _mean_layer(model: ModelSpec, recipe: Recipe) -> MeanLayer:
    mixture = model.mixture_layers / model.layers if model.layers else 0.0
    window = min(1.0, model.window / recipe.seq_len) if model.windowed_layers else 1.0
    layer = MeanLayer(
        tokens=float(recipe.seq_len),
        keys=float(recipe.seq_len),
        head_tokens=float(recipe.seq_len),
        query=float(model.attention_heads * model.head_dim),
        kv=float(model.kv_heads * model.head_dim),
        heads=float(model.attention_heads),
        matrix=float(model.active_layer_matrix_parameters),
        attention_matrix=float(model.attention_matrix_parameters),
        inner=mixture * model.shared_ffn_size + (1.0 - mixture) * (model.dense_ffn_size or model.ffn_size),
        routed=mixture * model.ffn_size * model.experts_per_token,
        norms=float(model.norms_per_layer),
        # Under autocast each product casts its input: an encoder's queries, keys and values.
        input_casts=2.0 * (model.architecture == "encoder"),
        sublayers=USUAL_SUBLAYERS,
        windowed=model.windowed_layers / max(1, model.layers) if window < 1.0 else 0.0,
        seen=window * (2.0 - window),
        causal=model.architecture == "decoder",
    )
    if not model.encoder_layers:
        return layer
    inputs, targets = (float(length) for length in lengths(model, recipe))
    encoder, decoder = float(model.encoder_layers), float(model.layers - model.encoder_layers)
    of_encoder, of_decoder = encoder * inputs, decoder * targets
    everywhere = of_encoder + of_decoder
    # Keys and values of cross-attention are made of the encoder's tokens, queries and outputs of the decoder's.
    queries = (everywhere + of_decoder) / everywhere
    keys = (everywhere + decoder * inputs) / everywhere
    scores = of_encoder * inputs + of_decoder * (0.5 * targets + inputs)
    projections = model.hidden_size * layer.query * 2.0 * (queries + keys)
    return replace(
        layer,
        tokens=everywhere / model.layers,
        keys=scores / (everywhere * queries),
        head_tokens=targets if decoder else 1.0,
        query=layer.query * queries,
        kv=layer.query * keys,
        heads=layer.heads * queries,
        matrix=projections + model.expert_matrix_parameters,
        attention_matrix=projections,
        norms=(2.0 * of_encoder + 3.0 * of_decoder) / everywhere,
        # Queries, keys, values and both gated products each cast their input (torch 2.11, ATen/autocast_mode.cpp: only
        # casts of parameters are cached); cross-attention's keys and values cast the encoder's.
        input_casts=2.0 * keys + float(model.gated_mlp),
        sublayers=USUAL_SUBLAYERS + decoder / model.layers,
        # A decoder's own scores, which a mask halves, are counted in the keys.
        causal=False,
    )


def _state_bytes(model: ModelSpec, recipe: Recipe, code: Framework) -> StateBytes:
    optimizer, update = OPTIMIZERS[recipe.optimizer]
    if code.nvidia_recipe and model.latent_attention:
        optimizer /= 2.0
    narrow = ELEMENT_BYTES[recipe.precision] == 2.0
    fused_fp8 = recipe.precision == "fp8" and code.fused_kernels
    gathered = 1.0 if fused_fp8 and code.fp8_weights else ELEMENT_BYTES[recipe.precision]
    state = StateBytes(
        # 32-bit arithmetic needs no copy and no master.
        weight=code.weight_bytes if narrow else 4.0,
        master=code.master_bytes if narrow else 0.0,
        gradient=code.gradient_bytes if narrow else 4.0,
        cast=code.cast_bytes if narrow else 0.0,
        # 8-bit weights by rows and by columns take what 16-bit ones do.
        cached=FP8_COPIES_BYTES if fused_fp8 and not code.fp8_weights else 0.0,
        # FSDP2 keeps a CNN's 32 bits, and autocast casts (bootstrap/trainer/parallelize.py, _policy).
        gathered=code.weight_bytes if model.architecture == "cnn" else gathered,
        reduce=code.reduce_bytes if narrow else 4.0,
        bucket=code.bucket_bytes,
        optimizer=optimizer,
        update=update,
        residual=4.0 if not narrow or (recipe.precision == "fp16" and code.cast_bytes > 0) else code.residual_bytes,
        autocast=narrow and code.cast_bytes > 0,
    )
    if model.profile is not None:
        # Frozen parameters have no states; the profile counts casts.
        trained = model.profile.trainable_parameters / model.profile.total_parameters
        trained *= model.profile.trainable_bytes / model.profile.trainable_parameters / 4.0
        state = replace(
            state, weight=model.profile.parameter_bytes / model.profile.total_parameters, cast=0.0, gradient=4.0,
            reduce=4.0,
        )  # fmt: skip
        return _trained_share(state, trained, trained=1.0)
    if recipe.pure:
        # https://docs.pytorch.org/docs/2.11/generated/torch.optim.AdamW.html: moments are made like the parameter.
        # Blockwise quantisation bounds the update with 8-bit moments, not the bytes it moves.
        halved = 1.0 if recipe.optimizer == EIGHT_BIT else 0.5
        state = replace(
            state, weight=2.0, gradient=2.0, reduce=2.0, cast=0.0, autocast=False, residual=2.0,
            bucket=0.5 * state.bucket, optimizer=halved * state.optimizer, update=halved * state.update,
        )  # fmt: skip
    tuning = recipe.tuning
    if tuning.trains_all:
        return state
    share = trained_parameters(model, tuning) / model.parameters
    state = replace(_trained_share(state, share, trained=share), cast=state.cast * share)
    if not tuning.adapts:
        return state
    # A base in the products' own type needs no copies.
    element = ELEMENT_BYTES[recipe.precision]
    weight = state.gathered
    if tuning.four_bit:
        matrices = model.layers * (model.attention_matrix_parameters + model.expert_matrix_parameters)
        weight += (NF4_BYTES - weight) * min(1.0, matrices / model.parameters)
    weight += share * (2.0 if recipe.pure else ADAPTER_BYTES)
    return replace(state, weight=weight, residual=element, cast=0.0, autocast=False)


def _trained_share(state: StateBytes, share: float, *, trained: float) -> StateBytes:
    """States of the trained ``share`` alone, as means over all parameters."""
    names = ("master", "gradient", "reduce", "bucket", "optimizer", "update")
    return replace(state, trained=trained, **{name: getattr(state, name) * share for name in names})


def _rates(model: ModelSpec, recipe: Recipe, code: Framework, hardware: Hardware) -> Rates:
    gpu, precision = hardware.gpu, recipe.precision
    link, link_latency_s = link_rate(hardware)
    network, network_latency_s = network_rate(hardware)
    peak = peak_flop_per_s(gpu, precision)
    # Outside the layers' products nothing is in 8 bits (https://docs.nvidia.com/deeplearning/transformer-engine).
    outside = peak_flop_per_s(gpu, "bf16") if precision == "fp8" else peak
    if ELEMENT_BYTES[precision] > 2.0:
        attention = kernels.ATTENTION_32_BIT * peak_flop_per_s(gpu, "fp32")
    else:
        attention = outside * kernels.attention_share(gpu.architecture, code.flash_kernel)
    # A compiler pads products.
    padded = code.pads_vocabulary or recipe.compiled
    loads = recipe.samples_per_vcpu_s * hardware.loader_workers
    return Rates(
        peak=peak,
        attention=attention,
        # https://github.com/pytorch/ao, torchao/float8/float8_linear_utils.py, convert_to_float8_training: no experts
        expert=peak if code.fused_kernels else outside,
        head=outside / (1.0 if padded else kernels.output_projection_slowdown(precision, model.vocab_size)),
        convolution=peak * (kernels.FP32_CONVOLUTION if precision == "fp32" else 1.0),
        fp32=peak_flop_per_s(gpu, "fp32") if gpu.peak_tflop_per_s.get("fp32") else peak * LEAST_FP32_SHARE,
        cycles=cycle_per_s(gpu),
        throttling=kernels.throttling(gpu.architecture, precision),
        memory=gpu.memory_bandwidth_gb_per_s * 1e9 * kernels.MEMORY_EFFICIENCY,
        link=link,
        link_latency_s=link_latency_s,
        network=network,
        network_latency_s=network_latency_s,
        gpus_per_node=float(max(1, hardware.gpus_per_node)),
        gpu_memory_bytes=visible_memory_gib(hardware) * GIB,
        load_s_per_sample=1.0 / loads if loads else 0.0,
    )


def _check_module(model: ModelSpec, recipe: Recipe, code: Framework, checkpointing: Number) -> None:
    """Refuse a recipe that a module was not profiled with."""
    profile = model.profile
    assert profile is not None
    if profile.passed("16-bit" if ELEMENT_BYTES[recipe.precision] == 2.0 else "32-bit", "none") is None:
        raise InvalidInputError(
            f"precision is {recipe.precision}, and {profile.name} is stored in 16 bits",
            limit="bf16 or fp16",
            why="its arithmetic is as wide as its parameters",
            next_step="give --precision bf16, or build the module in float32",
        )
    for kind in np.unique(checkpointing):
        if CHECKPOINTINGS[int(kind)] not in model.checkpointings:
            raise InvalidInputError(
                f"activation_checkpointing is {CHECKPOINTINGS[int(kind)]}",
                limit=f"{' or '.join(model.checkpointings)} for {profile.name}",
                why="a module is profiled without checkpointing, and with repeated blocks also with full",
            )
    if code.master_bytes > 0 and ELEMENT_BYTES[recipe.precision] == 2.0:
        raise InvalidInputError(
            f"{profile.name} is a profiled module, and the framework keeps weights of its own",
            limit="plain PyTorch (torch, torchvision, torchtitan, composer-fsdp)",
            next_step="leave out --framework",
        )
