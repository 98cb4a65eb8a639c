"""Costs of single kernels: bytes by operation, shares of the peak, host time.

Measured on H200 with torch 2.11 and transformers 5.23 in November 2026 (h200_ops_202611.md, with the other files in
tests/benchmarks/results) unless said otherwise. Pairs are (forward, backward); bytes are those that a large copy moves
in the time of the operation, or counted from the code.
"""

from __future__ import annotations

from typing import Literal

FlashKernel = Literal["flash1", "flash2", "vendor"]

# Share of the datasheet's memory bandwidth that a large copy reaches: 4.25 of 4.8 TB/s.
MEMORY_EFFICIENCY = 0.885

# Bytes a byte of the tensor's element. LayerNorm, and RMSNorm in one kernel.
NORM = (3.0, 4.3)
# Hugging Face's RMSNorm, five kernels, bytes an element of 16 bits, which are widened; of fp32 40 and 96 count alike.
WRITTEN_NORM = (57.0, 112.0)
# Mask of a sliding window, bytes a score: made of booleans in each layer, and read (Mistral and Gemma 3).
MASK = (20.0, 0.0)
# Residual sum; backward, of the branches' gradients.
RESIDUAL = (3.0, 3.0)
# Gradient of T5's bias, bytes a score a byte of the element: written for each sample, and read by their sum (counted).
BIAS_GRADIENT = 2.0
# Whisper's copy of queries, keys and values to the attention kernel's order (modeling_whisper.py): 10.2 to 10.5 bytes
# an element and pass on H100 (encoders_h100_202611.md); its scaling of the queries, counted.
COPIED_HEADS, SCALED_QUERIES = 5.15, 2.0
# Dropout's mask and its gradient; the rest is read and written by the bias and the residual sum.
DROPOUT = (0.5, 1.5)
GELU = (2.5, 3.4)
SWIGLU, COMPILED_SWIGLU = (5.4, 9.2), (3.0, 5.0)
# Passes over the copied tokens of a mixture, fused (Megatron-LM, megatron/core/transformer/moe/moe_utils.py); bytes an
# element of Hugging Face's (integrations/moe.py, grouped_mm_experts_forward), counted.
PERMUTE, WRITTEN_PERMUTE = (3.5, 5.5), (28.0, 52.0)
# Hugging Face's NewGELUActivation: eight kernels in fp32, bytes an element, counted.
WRITTEN_GELU = (70.0, 135.0)
# gpt-oss's experts, bytes an element, counted from Megatron-LM at d98e8a6: the second product's bias times the router's
# probability, their sum, join and cast in 32 bits (_apply_bias of transformer/moe/experts.py), and the clamps in front
# of the fused gate (weighted_bias_quick_geglu_impl of fusions/fused_bias_geglu.py).
BIASED_OUTPUT, CLAMPED_GATE = (28.0, 40.0), (16.0, 20.0)
# Rotary positions written out, bytes an element.
WRITTEN_ROTARY = 43.0
FUSED_ROTARY = 2.5
# Under autocast each of five linear layers casts its input (6 bytes) and its gradient back, three times as long.
CASTS = (5.0, 15.0)
# Bytes of the score matrix a byte of its element. Megatron-LM's fused softmax; written out with an fp32 softmax: 55 and
# 60 bytes a score, of 32-bit inputs 38 and 36.
FUSED_SCORES = (6.5, 9.5)
WRITTEN_SCORES = (27.0, 30.0)
WRITTEN_SCORES_32_BIT = (9.5, 9.0)
# Further bytes a byte of the element, of soft-capped scores or logits (26.0 a score or logit in 16 bits, Gemma 2); of a
# sink beside each row of scores, counted (models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward).
SOFT_CAP = (6.0, 7.0)
SINKS = (5.0, 6.0)
# Compiled: 42 bytes a score, and two of six products on CUDA cores at half their rate (BERT, h200_kernels_202611.md).
COMPILED_SCORES = (11.5, 9.4)
FP32_BATCHED = 0.5
# FLOPs of 32 bits as long as dropout's random number a score: 0.95 ps forward, 0.4 to 0.8 backward (sequences of 256 to
# 8192, heads of 64 and 128, h200_kernels_202611.md).
ATTENTION_DROPOUT = (64.0, 40.0)
# Time of fused attention with a mask over that without: Llama, compiled, 1.6 to 2.0.
MASKED_ATTENTION = 1.75
# Joins of a context ring's outputs, bytes a query's element and turn (torch's context_parallel, two ranks, sequences of
# 16k to 64k, h200_x2_context_experts_202611.md).
RING_JOIN = 250.0
# Time of torch's grouped 16-bit product of experts over a dense one (as above).
GROUPED_SLOWER = 1.25
# NVIDIA's code for mixtures, least error over the mixtures of data/nvidia_runs.csv (2026-11-29): what each tile of its
# grouped products costs beside its arithmetic, in elements of the inner dimension (by turns the hidden size and an
# expert's width: small experts are slow), share of the exchange that shows, host time of a layer over a dense one's.
FUSED_GROUPED_INNER, FUSED_EXCHANGE, FUSED_MIXTURE_HOST = 1080.0, 0.38, 2.04
# Share of that host time left with CUDA graphs, which capture attention, router and preprocessing of a layer, neither
# exchange nor experts (cuda_graph_scope of Megatron-Bridge's recipes): 8 of 16 ms (Qwen3 235B, nvidia_202611.md).
GRAPHED_MIXTURE_HOST = 0.5
# FSDP2's copies in the stream of the computation, bytes a parameter: of the whole after an all-gather, of gradients to
# 32 bits before a reduction (4.3 and 4.9 ms of Llama 1B over two H100, trainer_torchtitan_2xh100_202611.md).
GATHER_COPY, REDUCTION_COPY = 5.0, 11.5
# Bytes a 16-bit logit of a compiled cross-entropy; eager 55.
COMPILED_CROSS_ENTROPY = 12.1
# Kernels of a layer's forward pass, twice as many backward, and the seconds that each takes to start and to drain: 1.1
# us (CUDA graph) to 3.3 us.
WRITTEN_KERNELS, FUSED_KERNELS = 40.0, 20.0
KERNEL_S = 1.86e-6
# Share of the bytes of a product's sides that take time beside its arithmetic: 0.4 to 1.1.
PRODUCT_TRAFFIC = 0.72
# Host time of a step beside its layers: 1 to 4 ms (h200_hosts_202611.md).
HOST_S_PER_STEP = 1.3e-3
# Share of communication beside computation that shows all the same.
EXPOSED_COMMUNICATION = 0.48

# Tensors that NewGELUActivation keeps for its backward pass beyond its input: 12.2 to 12.4 bytes an element (GPT-2).
WRITTEN_GELU_TENSORS = 3.0
# Casts that a tensor rank keeps whole: five products each cast a norm's output, which gave 5 of 6 bytes without the
# sequence split and 8 of 10 with it (Llama 3B over four ranks).
REPEATED_CASTS = 5.0
# Widened and normalised queries and keys that a norm over heads keeps beside its output: 6.0 bytes in all with it
# (Qwen 3 against Llama).
HEAD_NORM_BYTES = 4.0

# Sequence at which flash attention is half as fast as at a very long one: causal blocks on the diagonal are computed in
# full.
CAUSAL_HALF_LENGTH, HALF_LENGTH = 430.0, 160.0

# Reads and writes of convolution outputs by kernels other than convolutions, counted by a profile of ResNet-50.
CNN_PASSES = 12.7
# Multiprocessor cycles beyond the time of these bytes, in any precision (256 images, h200_kernels_202611.csv). Batch
# norms take some an output (ResNet-50 1.2, ResNet-18 1.6); a ResNet's first convolution and max pooling some an image
# (5.4 ms, of which the bytes count 0.65).
CNN_CYCLES = 1.4
STEM_CYCLES = 4.9e6
# Share of both left when compiled.
COMPILED_CNN = 0.58
# Speed of convolutions on CUDA cores over matrix products there.
FP32_CONVOLUTION = 0.67

# Share of a layer's host time left when compiled.
COMPILED_HOST = 0.5
# Host time of a layer of Hugging Face's Llama over GPT-2's or BERT's.
LLAMA_HOST = 1.4
# FSDP's extra host time, layers: a step of Llama 410M takes 102 ms on two GPUs, 40 with DDP (measured_runs.csv).
FSDP_HOST = 2.3
# DTensor dispatches every operation in Python: 178 ms for the 16 layers of Llama 1B on two GPUs (measured_runs.csv).
# The reference trainer's tensor ranks dispatch none, and are counted alike: the host takes 0.28 to 0.31 s for the 28
# layers of Llama 3B, 0.24 estimated (trainer_host_2xh100_202611.txt).
DTENSOR_HOST = 6.0
# Host time of one tensor-parallel collective: 60 to 109 us (h200_hosts_202611.md).
HOST_S_PER_COLLECTIVE = 82e-6
# Layers whose host time equals that of embedding, head and loss (vTrain's rows, chosen_constants_202611.md).
END_LAYERS = 2.0

# Bytes of a weight in NF4 with double quantisation (QLoRA, section 3): half a byte, one byte of scale for 64 weights,
# and 4 bytes of its scale for 256 of those.
NF4_BYTES = 0.5 + 1.0 / 64 + 4.0 / (64 * 256)
# Adapters over a 16-bit base are in 32 bits (peft, get_peft_model, autocast_adapter_dtype).
ADAPTER_BYTES = 4.0
# Bytes a token moves at an adapter's wide sides, in units of an element. Forward: the product with A reads the input;
# that with B writes its output, which is scaled (read, written) and added to the base's (two reads, a write). Backward:
# the gradient is scaled (read, written) and read by two products; the product with A writes the input's gradient, which
# is added to the base's (two reads, a write), and its weight gradient reads the input.
ADAPTER_INPUT = (1.0, 5.0)
ADAPTER_OUTPUT = (6.0, 4.0)
# Fused code scales within the product with B.
FUSED_ADAPTER_OUTPUT = (4.0, 2.0)
# Time of products with a frozen base in fused fp8 over that of trained weights: least error over the runs with adapters
# of data/nvidia_runs.csv (2026-11-28).
FROZEN_FP8_PRODUCT = 1.1
# Kernels of one adapter forward and backward: two products, scaling, sum; four products, scaling, sum. Of one 4-bit
# weight: its scales, their offset, the weights.
ADAPTER_KERNELS = (4.0, 6.0)
FOUR_BIT_KERNELS = 3.0
# Host time of these kernels over a layer's own, with peft's Python between them: a layer of Llama 1B takes the host 2.1
# times as long with seven adapters, 1.8 with four (H200, steps less their update, finetuning_h200_202611.md).
ADAPTER_HOST = 2.0
# Share of the memory bandwidth at which 4-bit weights are widened. Assumed; seven runs of QLoRA on H200 are met within
# 8% (finetuning_h200_202611.md).
WIDENING_EFFICIENCY = 0.5

# Fused fp8: largest magnitude, scale and cast of each product's input, bytes an element.
QUANTISE_BYTES = 6.0
# torchao's float8 (one scale a tensor), bytes an element of a product's sides and pass: 0.86 of the 58 to 69 (compiled
# 3.6 to 3.9) of a cast (h200_fp8_202611.md), as 14 casts go to 15 sides of Llama's layer, and weights are cast twice.
FP8_CAST, COMPILED_FP8_CAST = 52.0, 3.2

# Share of the dense peak on long sequences with heads of 128. On A100 FlashAttention 2 has 0.50 to 0.73, its first
# version 0.25 to 0.40 (arXiv:2307.08691, abstract). "vendor" is cuDNN's from Hopper on, FlashAttention 2 before; an
# architecture without a figure has Ampere's.
FLASH2 = {"Ampere": 0.60, "Hopper": 0.34, "Blackwell": 0.34}
CUDNN = {"Hopper": 0.57, "Blackwell": 0.57}
FLASH1_OVER_FLASH2 = 0.55
# 32-bit inputs use no tensor cores: 34 of 67 TFLOP/s.
ATTENTION_32_BIT = 0.51

# Extra time of arithmetic at the power limit: products of 8192 cubed take 1.19 times as long after 2.5 s as in the
# first 30 ms in 16 bits, 1.18 in 8, 1.20 in tf32, 1.00 in fp32 (h200_ops_202611.md). Steps with 0.56 arithmetic show
# none, with 0.7 to 0.8 2 to 3% (h200_kernels_202611.md); a cube fits both. A100s show none.
THROTTLING = {"Hopper": 0.19}
THROTTLED_FROM, THROTTLING_POWER = 0.5, 3.0

# Slowdown where a side is no multiple of 8 elements (16 bytes): 50257 columns against 50304, 5.7 in 16 bits and 3.0 in
# tf32; 30522 (even) 2.9.
ODD_SIDE, EVEN_SIDE, ODD_SIDE_TF32 = 5.7, 2.9, 3.0


def attention_share(architecture: str, kernel: FlashKernel) -> float:
    """Share of the 16-bit peak of ``kernel`` on an ``architecture`` ("Blackwell Ultra")."""
    family = architecture.split()[0]
    flash2 = FLASH2.get(family, FLASH2["Ampere"])
    if kernel == "vendor":
        return CUDNN.get(family, flash2)
    return flash2 * (FLASH1_OVER_FLASH2 if kernel == "flash1" else 1.0)


def throttling(architecture: str, precision: str) -> float:
    """Extra share of time of arithmetic alone at the power limit."""
    return 0.0 if precision == "fp32" else THROTTLING.get(architecture.split()[0], 0.0)


def output_projection_slowdown(precision: str, vocab_size: int) -> float:
    """Time of the output projection over that with ``vocab_size`` a multiple of 8."""
    if vocab_size % 8 == 0 or precision == "fp32":
        return 1.0
    if precision == "tf32":
        return ODD_SIDE_TF32 if vocab_size % 4 else 1.0
    return ODD_SIDE if vocab_size % 2 else EVEN_SIDE
