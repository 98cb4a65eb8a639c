"""A case: one model and recipe, on one kind of node, in one layout or many; the symbols of the equations.

What follows from model, recipe and hardware is a number; a layout's columns are numbers or arrays that broadcast.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, Self

import numpy as np

from bootstrap.contract.fine_tuning import EIGHT_BIT
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.units import GIB
from optimizer.performance import kernels
from optimizer.performance.calibration import Calibration, Coefficients, Residual
from optimizer.performance.confidence import SPLITS, speed_source
from optimizer.performance.fine_tuning import trained_parameters
from optimizer.performance.frameworks import Framework, frameworks
from optimizer.performance.rates import LEAST_FP32_SHARE, cycle_per_s, link_rate, network_rate, peak_flop_per_s
from optimizer.performance.types import CHECKPOINTINGS, FULL, NONE, ZERO1, Floats, Grid, Hardware, Number, Recipe
from optimizer.workload.model import ModelSpec

# Bytes of one element in products and saved activations (https://docs.nvidia.com/deeplearning/transformer-engine).
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0}

# (state bytes a parameter, bytes the update moves a parameter, with one more read to clip gradients): arXiv:1910.02054,
# 3.1; Adafactor below 0.1 bytes for a matrix of 1024 x 1024 (arXiv:1804.04235, 4); bitsandbytes: two moments of one
# byte, with 4 bytes of scale for 256 elements each (arXiv:2110.02861, 2; optim/optimizer.py of 0.50). Its update moves
# 20.1 bytes and takes the time of 115: 58 ms for 1.24e9 parameters on H100 (2026-11-24).
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
# Tokens of the fullest expert rank over the mean: ST-MoE's capacity (arXiv:2202.08906, 2022-02).
EXPERT_CAPACITY = 1.25


class Rates:
    """Rates of a GPU in the recipe's precision, and of its node: FLOP/s, byte/s, seconds."""

    def __init__(self, model: ModelSpec, recipe: Recipe, code: Framework, hardware: Hardware) -> None:
        gpu, precision = hardware.gpu, recipe.precision
        self.link, self.link_latency_s = link_rate(hardware)
        self.network, self.network_latency_s = network_rate(hardware)
        self.gpus_per_node = float(hardware.gpus_per_node)
        self.gpu_memory_bytes = gpu.visible_memory_gib * GIB
        self.memory = gpu.memory_bandwidth_gb_per_s * 1e9 * kernels.MEMORY_EFFICIENCY  # of a large copy
        self.cycles = cycle_per_s(gpu)  # of all multiprocessors together
        # Transformer Engine's cuBLAS workspace (get_cublas_workspace_size_bytes of its pytorch/cpp_extensions/gemm.py).
        is_small = gpu.architecture in ("Volta", "Turing", "Ampere", "Ada Lovelace")
        self.product_workspace: Number = 2.0**22 if is_small else 2.0**25
        self.throttling: Number = kernels.throttling(gpu.architecture, precision)
        self.peak = peak_flop_per_s(gpu, precision)
        self.fp32 = peak_flop_per_s(gpu, "fp32") if gpu.peak_tflop_per_s.get("fp32") else self.peak * LEAST_FP32_SHARE
        self.convolution = self.peak * (kernels.FP32_CONVOLUTION if precision == "fp32" else 1.0)
        # Outside the layers' products nothing is in 8 bits (https://docs.nvidia.com/deeplearning/transformer-engine).
        outside = peak_flop_per_s(gpu, "bf16") if precision == "fp8" else self.peak
        if ELEMENT_BYTES[precision] > 2.0:
            self.attention = kernels.ATTENTION_32_BIT * peak_flop_per_s(gpu, "fp32")
        else:
            peak = self.peak if recipe.graphs == "fused" else outside
            kernel = "flash2" if recipe.flash2 else code.flash_kernel
            self.attention = peak * kernels.attention_share(gpu.architecture, kernel)
        # https://github.com/pytorch/ao, torchao/float8/float8_linear_utils.py, convert_to_float8_training: no experts
        self.expert = self.peak if code.fused_kernels else outside
        # A compiler pads products.
        padded = not code.written_out or recipe.compiled
        self.head = outside / (1.0 if padded else kernels.output_projection_slowdown(precision, model.vocab_size))
        loads = recipe.samples_per_vcpu_s * hardware.loader_workers
        self.load_s_per_sample = 1.0 / loads if loads else 0.0  # of one rank's loader


class Case:
    """A model, a recipe and its code on one kind of node, in the layouts of a Grid, whose columns it has by name."""

    def __init__(self, model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid) -> None:
        if recipe.precision == "fp8" and not model.layers:
            raise InvalidInputError(
                f"precision is fp8, and {model.name} is counted in samples",
                limit="fp32, tf32, fp16 or bf16",
                why="only linear layers compute in 8 bits, and their share of the model's products is not known",
                next_step="give --precision bf16",
            )
        self.model, self.recipe, self.hardware, self.code = model, recipe, hardware, frameworks()[recipe.framework]
        if model.profile is not None:
            _check_module(model, recipe, grid.checkpointing)
        self._read_layer()
        self._read_recipe()
        self._read_bytes()
        self.rates = Rates(model, recipe, self.code, hardware)
        self._lay_out(grid)

    def moved(self, *, rates: Rates | None = None, **columns: Floats) -> Self:
        """Build the same case with other columns of the layout, and other rates."""
        own = copy(self)
        own.rates = rates or self.rates
        own._lay_out(replace(self.grid, **columns))
        return own

    @property
    def pipelines(self) -> bool:
        """Tell if one configuration's pipeline stages are on several nodes."""
        return bool(self.pipeline > 1 and self.nodes > 1)

    def coefficients(self, calibration: Calibration) -> Coefficients:
        """Look up the fitted numbers."""
        return calibration.coefficients(self.hardware.gpu, self.recipe)

    def speed_source(self, calibration: Calibration) -> tuple[Residual, str]:
        """The error of one configuration's speed, and its source in words."""
        splits = [name for name in SPLITS if getattr(self.grid, name) > 1]
        return speed_source(calibration, self.model, self.recipe, self.hardware, self.grid.nodes, splits)

    def _read_layer(self) -> None:
        """Set the numbers of a layer; of an encoder with a decoder the mean over the layers, weighted by tokens.

        Costs that are linear in tokens and widths are exact with such means; attention's are with the mean of keys.
        """
        model, recipe = self.model, self.recipe
        self.table_parameters = float(model.vocab_size * model.hidden_size)  # embedding or output projection
        # A layer; of a profiled module its largest unit.
        profile = model.profile
        self.layer_parameters = float(profile.largest_unit_parameters if profile else model.layer_parameters)
        # A layer's experts; a given parameter count may be below the architecture's.
        self.expert_parameters = min(model.experts * model.expert_matrix_parameters, self.layer_parameters)
        mixture = model.mixture_layers / model.layers if model.layers else 0.0
        window = min(1.0, model.window / recipe.seq_len) if model.windowed_layers else 1.0
        self.sample_tokens = float(recipe.seq_len)  # tokens of a sample in one layer
        self.keys = float(recipe.seq_len) / recipe.packed  # keys that a token attends to, before a causal mask
        self.sample_head_tokens = recipe.seq_len * recipe.labelled  # tokens of a sample that have logits
        self.query = float(model.attention_heads * model.head_dim)  # width of all queries
        self.kv = float(model.kv_heads * model.head_dim)  # width of all keys
        self.heads = float(model.attention_heads)
        self.matrix = float(model.active_layer_matrix_parameters)  # weights that a token is multiplied with
        self.attention_matrix = float(model.attention_matrix_parameters)  # those of attention's projections
        # Feed-forward widths that a token passes through: of all but routed experts, and of those.
        self.inner = mixture * model.shared_ffn_size + (1.0 - mixture) * (model.dense_ffn_size or model.ffn_size)
        self.routed = mixture * model.ffn_size * model.experts_per_token
        self.norms = float(model.norms_per_layer)
        # 16-bit copies of a norm's output that products keep beyond the first: under autocast each product casts its
        # input, an encoder's queries, keys and values.
        self.input_casts = 2.0 * (model.architecture == "encoder")
        self.sublayers = 1.0  # attentions and feed-forward blocks, over a plain layer's two
        # Share of the layers whose window is shorter than the sequence, and of causal scores that windows leave.
        self.windowed = model.windowed_layers / max(1, model.layers) if window < 1.0 else 0.0
        self.seen = 1.0 - self.windowed * (1.0 - window * (2.0 - window))
        self.causal = model.architecture == "decoder"
        if not model.encoder_layers:
            return
        inputs, targets = (float(length) for length in lengths(model, recipe))
        encoder, decoder = float(model.encoder_layers), float(model.layers - model.encoder_layers)
        of_encoder, of_decoder = encoder * inputs, decoder * targets
        everywhere = of_encoder + of_decoder
        # Keys and values of cross-attention are made of the encoder's tokens, queries and outputs of the decoder's.
        queries = (everywhere + of_decoder) / everywhere
        keys = (everywhere + decoder * inputs) / everywhere
        self.attention_matrix = model.hidden_size * self.query * 2.0 * (queries + keys)
        self.matrix = self.attention_matrix + model.expert_matrix_parameters
        self.sample_tokens = everywhere / model.layers
        # A decoder's own scores, which a mask halves, are counted in the keys.
        self.keys = (of_encoder * inputs + of_decoder * (0.5 * targets + inputs)) / (everywhere * queries)
        self.causal = False
        self.sample_head_tokens = targets if decoder else 1.0
        self.kv = self.query * keys
        self.query, self.heads = self.query * queries, self.heads * queries
        self.norms = (2.0 * of_encoder + 3.0 * of_decoder) / everywhere
        # Queries, keys, values and both gated products each cast their input (torch 2.11, ATen/autocast_mode.cpp: only
        # casts of parameters are cached); cross-attention's keys and values cast the encoder's.
        self.input_casts = 2.0 * keys + float(model.gated_mlp)
        self.sublayers = 1.0 + 0.5 * decoder / model.layers

    def _read_recipe(self) -> None:
        """Set what follows from the recipe, the code and the model."""
        model, recipe, code = self.model, self.recipe, self.code
        self.element = ELEMENT_BYTES[recipe.precision]  # bytes in products and saved activations
        # PyTorch's scaled_dot_product_attention takes no soft cap and no sinks (transformers 5.23, integrations/
        # sdpa_attention.py, models/gemma2 and gpt_oss: _supports_sdpa is False).
        lacks_kernel = code.written_out and bool(model.soft_cap or model.sinks)
        # Share of the layers whose window PyTorch's attention gets as a mask: it computes all scores.
        has_masks = code.written_out and recipe.attention == "flash" and not lacks_kernel
        self.masked_share = self.windowed if has_masks else 0.0
        # Nor has it a kernel for grouped queries in 32 bits (means of unlike layers are not such), nor has a
        # compiler one for attention that is not causal and drops.
        grouped = self.kv < self.query and self.sublayers <= 1.0
        lacks_kernel |= code.written_out and self.element > 2.0 and grouped
        self.compiles_whole = code.written_out and recipe.compiled and not code.compiles_layers
        self.by_hand = not (code.fused_kernels or recipe.compiled)  # several kernels where one would do
        self.has_dropout = code.dropout and model.has_dropout
        lacks_kernel |= self.compiles_whole and not self.causal and self.has_dropout
        self.has_flash = recipe.attention == "flash" and not lacks_kernel
        # Gemma's norms, two a sublayer, stay written out (bootstrap/trainer/kernels.py).
        self.has_fused_norms = code.fused_norms and model.norms_per_layer == 2
        # T5 writes norms out, learns a bias a score, and drops within the feed-forward block.
        self.is_t5 = model.architecture == "seq2seq"
        # Transformer Engine keeps inputs of products in 8 bits, torchao casts the operands of PyTorch's products.
        self.has_fused_fp8 = recipe.precision == "fp8" and code.fused_kernels
        self.casts_fp8 = recipe.precision == "fp8" and not code.fused_kernels
        self.input_element = 1.0 if self.has_fused_fp8 else self.element  # bytes of a product's kept input
        tuning = recipe.tuning
        self.trains_head = tuning.trains_all or not (tuning.adapts or model.tied_embeddings)
        # Share of the layers that the backward pass reaches.
        self.live_share = 1.0 - tuning.frozen_layers / max(model.layers, 1)
        self.live_layers = model.layers * (1.0 + 2.0 * self.live_share) / 3.0  # a frozen layer has one pass of three

    def _read_bytes(self) -> None:
        """Set bytes a parameter, means over the model's parameters (data/frameworks.toml explains them)."""
        model, recipe, code, tuning = self.model, self.recipe, self.code, self.recipe.tuning
        narrow = self.element == 2.0
        # 32-bit arithmetic needs no copy and no master.
        self.weight_bytes = code.weight_bytes if narrow else 4.0
        self.master_bytes = code.master_bytes if narrow else 0.0
        self.gradient_bytes = code.gradient_bytes if narrow else 4.0
        self.cast_bytes = code.cast_bytes if narrow else 0.0
        # 8-bit weights by rows and by columns take what 16-bit ones do.
        self.cached_bytes = FP8_COPIES_BYTES if self.has_fused_fp8 and not code.fp8_weights else 0.0
        # Bytes of a weight on the wire. FSDP2 keeps a CNN's 32 bits, and autocast casts (bootstrap/trainer/
        # parallelize.py, _policy).
        self.gathered_bytes = 1.0 if self.has_fused_fp8 and code.fp8_weights else self.element
        if model.architecture == "cnn":
            self.gathered_bytes = code.weight_bytes
        self.reduce_bytes = code.reduce_bytes if narrow else 4.0
        self.bucket_bytes = code.bucket_bytes
        self.optimizer_bytes, self.update_bytes = OPTIMIZERS[recipe.optimizer]
        if code.nvidia_recipe and model.latent_attention:
            self.optimizer_bytes /= 2.0
        # Bytes of an element of the residual under autocast.
        wide = not narrow or (recipe.precision == "fp16" and code.cast_bytes > 0)
        self.wide_residual = 4.0 if wide else code.residual_bytes
        self.autocast = narrow and code.cast_bytes > 0
        self.trained = 1.0  # share of the parameters that have gradients
        if model.profile is not None:
            # Frozen parameters have no states; the profile counts casts.
            self.weight_bytes = model.profile.parameter_bytes / model.profile.total_parameters
            self.cast_bytes, self.gradient_bytes, self.reduce_bytes = 0.0, 4.0, 4.0
            share = model.profile.trainable_parameters / model.profile.total_parameters
            self._share_states(share * model.profile.trainable_bytes / model.profile.trainable_parameters / 4.0)
            return
        if recipe.pure:
            # https://docs.pytorch.org/docs/2.11/generated/torch.optim.AdamW.html: moments are made like the parameter.
            # Blockwise quantisation bounds the update with 8-bit moments, not the bytes it moves.
            halved = 1.0 if recipe.optimizer == EIGHT_BIT else 0.5
            self.weight_bytes = self.gradient_bytes = self.reduce_bytes = self.wide_residual = 2.0
            self.cast_bytes, self.autocast = 0.0, False
            self.bucket_bytes *= 0.5
            self.optimizer_bytes *= halved
            self.update_bytes *= halved
        self.trained = trained_parameters(model, tuning) / model.parameters
        self._share_states(self.trained)
        self.cast_bytes *= self.trained
        if not tuning.adapts:
            return
        # A base in the products' own type needs no copies.
        self.weight_bytes = self.gathered_bytes
        if tuning.four_bit:
            matrices = model.layers * (model.attention_matrix_parameters + model.expert_matrix_parameters)
            self.weight_bytes += (kernels.NF4_BYTES - self.weight_bytes) * min(1.0, matrices / model.parameters)
        self.weight_bytes += self.trained * (2.0 if recipe.pure else kernels.ADAPTER_BYTES)
        self.wide_residual, self.cast_bytes, self.autocast = self.element, 0.0, False

    def _share_states(self, share: float) -> None:
        """Give states to the trained ``share`` alone, as means over all parameters."""
        for name in ("master", "gradient", "reduce", "bucket", "optimizer", "update"):
            setattr(self, f"{name}_bytes", getattr(self, f"{name}_bytes") * share)

    def _lay_out(self, grid: Grid) -> None:
        """Set the columns of the layouts, and what follows from them."""
        model, code, self.grid = self.model, self.code, grid
        split = code.splits_sequence if grid.sequence_parallel is None else grid.sequence_parallel
        columns: dict[str, Number] = {
            name: np.asarray(value, dtype=np.float64)
            for name, value in (vars(grid) | {"sequence_parallel": split}).items()
        }
        self.nodes, self.data, self.tensor = (columns[name] for name in ("nodes", "data", "tensor"))
        self.pipeline, self.context, self.expert = (columns[name] for name in ("pipeline", "context", "expert"))
        self.sequence_parallel, self.virtual_stages = columns["sequence_parallel"], columns["virtual_stages"]
        self.sharding, self.checkpointing = columns["sharding"], columns["checkpointing"]
        self.micro_batch, self.grad_accum = columns["micro_batch"], columns["grad_accum"]
        tensor, pipeline = self.tensor, self.pipeline
        # 1 where whole layers are computed again, and where a part of each layer, or all, is.
        self.repeats: Number = np.where(self.checkpointing == FULL, 1.0, 0.0)
        self.checkpoints: Number = np.where(self.checkpointing == NONE, 0.0, 1.0)
        self.ranks: Number = self.data * self.context  # ranks that share states
        self.gpus: Number = self.ranks * tensor * pipeline
        self.global_batch: Number = self.data * self.micro_batch * self.grad_accum  # samples of a step
        # Tokens of one micro-batch on one rank, and those that have logits.
        self.tokens: Number = self.micro_batch * self.sample_tokens / self.context
        self.head_tokens: Number = self.micro_batch * self.sample_head_tokens / self.context
        # Ranks that norms, residual and dropout are split over.
        self.split: Number = np.where(self.sequence_parallel > 0, tensor, 1.0)
        # Layers of the fullest stage and of the stage with the output projection, which balanced stages count as
        # layers by its parameters, and NVIDIA's recipes as one beside the embedding's where layers do not fill the
        # chunks; those with experts.
        uneven = model.layers % (pipeline * self.virtual_stages) > 0
        self.counts_ends: Number = np.where(code.nvidia_recipe & (pipeline > 1) & uneven, 1.0, 0.0)
        head = np.where(self.counts_ends > 0, 1.0, self.table_parameters / max(self.matrix, 1.0) * code.balances_stages)
        head = head * (pipeline > 1)
        full = np.ceil((model.layers + head + self.counts_ends) / pipeline)
        self.stage_layers: Number = np.minimum(full, model.layers)
        self.last_stage_layers: Number = np.maximum(np.floor(self.stage_layers - head), 0.0)
        self.stage_mixtures: Number = np.minimum(self.stage_layers, model.mixture_layers)
        self._count_parameters()
        # States that torch's ``fully_shard`` shards.
        self.uses_fully_shard = (code.fsdp2 > 0) & (self.sharding >= code.fsdp2) & (self.ranks > 1)
        # Hugging Face's modules under FSDP2 or the trainer's tensor parallelism: 16 bits, no autocast.
        self.is_narrow = code.written_out & (self.uses_fully_shard | (code.splits_logits & (tensor > 1)))
        # Bytes of an element of the residual, which is as narrow as products where nothing is under autocast.
        narrow = min(self.element, self.wide_residual)
        self.residual: Number = np.where(self.is_narrow, narrow, self.wide_residual)
        # Code whose backward pass needs what eager operations keep. Tensor ranks' collectives cut compiled layers into
        # parts, which do so too (36.0 GiB of Llama 3B with two tensor ranks, 4.5% less than eager; two H100, torch
        # 2.11, trainer_torchtitan_2xh100_202611.md).
        compiled = np.where(code.compiles_layers & (tensor > 1), 0.0, 1.0 * self.recipe.compiled)
        self.is_eager: Number = code.written_out * (1.0 - compiled)
        # Tensors that the activation function keeps; a compiler, or one kernel, recomputes the gate's product.
        gate = (model.gated_mlp and not code.fused_gate) * (1.0 - compiled)
        self.gate_inputs: Number = model.matrices_per_ffn - 1.0 + gate
        # Mixtures whose products run in 32 bits under a 16-bit recipe: autocast skips torch's grouped product
        # (https://github.com/pytorch/pytorch/issues/174763; transformers 5.23, integrations/moe.py, _grouped_mm).
        self.experts_in_32_bits = self.autocast & np.logical_not(self.is_narrow)
        self.expert_element: Number = np.where(self.experts_in_32_bits, 4.0, self.element)
        # Rows of the fullest expert rank over the mean, and those kept: NVIDIA's routers are forced to balance.
        self.capacity: Number = np.where(self.expert > 1, EXPERT_CAPACITY, 1.0)
        self.kept_capacity: Number = 1.0 if code.nvidia_recipe else self.capacity
        # Bytes a token of the rows that experts get.
        rows = model.mixture_layers / max(model.layers, 1) * model.experts_per_token * self.kept_capacity
        self.dispatched: Number = self.expert_element * model.hidden_size * rows
        # Ranks of a node, which share its network.
        self.local: Number = np.minimum(self.gpus / self.nodes, self.rates.gpus_per_node)

    def _count_parameters(self) -> None:
        """Set the parameters that a rank holds and updates."""
        tensor = self.tensor
        # Tensor ranks that share one expert: 1 where experts are spread over tensor ranks too (Megatron).
        self.expert_slices: Number = np.where(self.expert > self.ranks, 1.0, tensor)
        # Parameters of one layer on one tensor rank; of a mixture not of a dense layer.
        experts = self.expert_parameters / self.expert / self.expert_slices
        self.rank_layer_parameters: Number = (self.layer_parameters - self.expert_parameters) / tensor + experts
        self.rank_experts: Number = self.stage_mixtures * experts  # of a stage's experts on one rank
        # Parameters of the fullest rank's stage, tensor slice and experts, before sharding over data ranks, and where
        # these share all of them with all experts.
        self.stage_parameters: Number = self._stage_parameters(self.rank_layer_parameters)
        self.shard_parameters: Number = self._stage_parameters(self.layer_parameters / tensor) / self.ranks
        # Parameters that the fullest rank's optimizer updates.
        self.updated_parameters: Number = np.where(self.sharding >= ZERO1, self.shard_parameters, self.stage_parameters)

    def _stage_parameters(self, layer: Number) -> Number:
        """Parameters of the fullest stage, which has one table: the first the embedding, the last the projection."""
        tables, all_tables = self.table_parameters, float(self.model.embedding_parameters)
        # The first stage has the positions too.
        first = all_tables - tables if all_tables >= 2.0 * tables else all_tables
        table = np.where(self.pipeline > 1, first, all_tables) / self.tensor
        table = np.where(self.counts_ends > 0, np.maximum(table - layer, 0.0), table)  # it has a layer less beside it
        # The fullest stage has as few of a mixture's dense layers as can be.
        dense = (self.stage_layers - self.stage_mixtures) * (self.model.dense_layer_parameters / self.tensor)
        return self.stage_mixtures * layer + dense + table


def lengths(model: ModelSpec, recipe: Recipe) -> tuple[int, int]:
    """Tokens of a sample in the encoder and in the decoder."""
    if model.architecture == "seq2seq":
        return recipe.seq_len, recipe.target_len or span_targets(recipe.seq_len)
    return model.encoder_tokens, recipe.target_len or model.decoder_tokens


def span_targets(seq_len: int) -> int:
    """Tokens of T5's targets beside ``seq_len`` tokens of its input: 114 beside 512.

    Span corruption replaces 15% of a text, in spans of three on average (arXiv:1910.10683, section 3.1.4), and takes
    the longest text whose input fits: a sentinel stands for each span in the input, the targets are the spans behind
    their sentinels, and both end with a token (compute_input_and_target_lengths of
    https://github.com/huggingface/transformers, examples/flax/language-modeling/run_t5_mlm_flax.py, 2021-07).
    """

    def lengths_of(tokens: int) -> tuple[int, int]:
        noise = max(1, round(tokens * 0.15))
        spans = max(1, round(noise / 3))
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = max(1, int(seq_len / 0.9) - 8)  # the input has some nine tenths of the text
    while lengths_of(tokens + 1)[0] <= seq_len:
        tokens += 1
    return lengths_of(tokens)[1]


def _check_module(model: ModelSpec, recipe: Recipe, checkpointing: Any) -> None:
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
