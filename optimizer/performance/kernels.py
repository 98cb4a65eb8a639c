"""Costs of single kernels: bytes by operation, shares of the peak, host time.

Measured on one H200 with torch 2.11 (tests/benchmarks/results/h200_ops_202611.md) unless said otherwise. Pairs are
(forward, backward); bytes are those a large copy moves in the operation's time.
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
# Mask of a sliding window, bytes a score: made of booleans in each layer, and read (Mistral and Gemma 3 with a window,
# docs/models.md, torch 2.11, transformers 5.23, 2026-11-22).
MASK = (20.0, 0.0)
# Residual sum; backward, of the branches' gradients.
RESIDUAL = (3.0, 3.0)
# Gradient of T5's bias, bytes a score a byte of the element: written for each sample, and read by their sum (counted).
BIAS_GRADIENT = 2.0
# Whisper's copy of queries, keys and values to the attention kernel's order, by strides (transformers 5.23,
# modeling_whisper.py): 10.2 to 10.5 bytes an element and pass; its scaling of the queries, counted (H100, torch 2.11,
# encoders_h100_202611.md).
COPIED_HEADS, SCALED_QUERIES = 5.15, 2.0
# Dropout's mask and its gradient; the rest is read and written by the bias and the residual sum.
DROPOUT = (0.5, 1.5)
GELU = (2.5, 3.4)
SWIGLU, COMPILED_SWIGLU = (5.4, 9.2), (3.0, 5.0)
# Passes over the copied tokens of a mixture, fused (Megatron-LM, megatron/core/transformer/moe/moe_utils.py); bytes an
# element of Hugging Face's (grouped_mm_experts_forward in integrations/moe.py of transformers 5.23), counted.
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
# Further bytes a byte of the element, of soft-capped scores or logits (26.0 a score or logit in 16 bits, Gemma 2,
# docs/models.md, torch 2.11, transformers 5.23, 2026-11-22); of a sink beside each row of scores: its concatenation,
# their maximum and their difference, counted (models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward).
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
# Speed of torch's grouped 16-bit product of experts over a dense one (as above).
GROUPED_PRODUCT = 0.8
# NVIDIA's code for mixtures, least error over the mixtures of data/nvidia_runs.csv (2026-11-28): speed of its grouped
# product over a dense one, share of the exchange that shows, and host time of a layer over a dense one's.
FUSED_GROUPED_PRODUCT, FUSED_EXCHANGE, FUSED_MIXTURE_HOST = 0.6, 0.58, 1.74
# FSDP2's copies in the stream of the computation, bytes a parameter: of the whole after an all-gather, of gradients to
# 32 bits before a reduction (4.3 and 4.9 ms of Llama 1B over two H100, all but the last layer gathered twice,
# trainer_torchtitan_2xh100_202611.md). The copy before an all-gather has a stream of its own.
GATHER_COPY, REDUCTION_COPY = 5.0, 11.5
# Bytes a 16-bit logit of a compiled cross-entropy; eager 55.
COMPILED_CROSS_ENTROPY = 12.1
# Kernels of a layer's forward pass, twice as many backward, and the seconds that each takes to start and to drain: 1.1
# us (CUDA graph) to 3.3 us on H200 (h200_ops_202611.md).
WRITTEN_KERNELS, FUSED_KERNELS = 40.0, 20.0
KERNEL_S = 1.86e-6
# Share of the bytes of a product's sides that take time beside its arithmetic: 0.4 to 1.1 on H200 (h200_ops_202611.md).
PRODUCT_TRAFFIC = 0.72
# Host time of a step beside its layers: 1 to 4 ms on H200 (h200_hosts_202611.md).
HOST_S_PER_STEP = 1.3e-3
# Share of communication beside computation that shows all the same.
EXPOSED_COMMUNICATION = 0.48

# Tensors that NewGELUActivation keeps for its backward pass beyond its input: 12.2, 12.3 and 12.4 bytes an element on
# H200 (GPT-2 and GPT-2 XL in bf16, GPT-2 in tf32, torch 2.11, 2026-11-21).
WRITTEN_GELU_TENSORS = 3.0
# Casts that a tensor rank keeps whole: five products each cast a norm's output, which gave 5 of 6 bytes on H200 without
# the sequence split and 8 of 10 with it (Llama 3B over four ranks, torch 2.11, 2026-11-21).
REPEATED_CASTS = 5.0
# Widened and normalised queries and keys that a norm over heads keeps beside its output: 6.0 bytes in all with it
# (Qwen 3 against Llama, docs/models.md, torch 2.11, transformers 5.23, 2026-11-22).
HEAD_NORM_BYTES = 4.0

# Sequence at which flash attention is half as fast as at a very long one: causal blocks on the diagonal are computed in
# full.
CAUSAL_HALF_LENGTH, HALF_LENGTH = 430.0, 160.0

# Reads and writes of convolution outputs by kernels other than convolutions, counted by a profile of ResNet-50.
CNN_PASSES = 12.7
# Multiprocessor cycles beyond those bytes, in any precision, from profiles of two networks (256 images on H200,
# h200_kernels_202611.csv): of an output by batch norm's four channels-last kernels (24.1 ms of ResNet-50, 6.2 of
# ResNet-18: 1.2 and 1.6 cycles), and of an image by a ResNet's first convolution, of three channels, and its max
# pooling (5.4 ms of both, 0.65 of them counted).
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
# FSDP's extra host time, layers: a step of Llama 410M takes 102 ms on two H200, 40 with DDP (512 tokens,
# measured_runs.csv).
FSDP_HOST = 2.3
# DTensor dispatches every operation in Python: 178 ms for the 16 layers of Llama 1B on two H200 (measured_runs.csv),
# 184 ms of computation on one. The reference trainer's tensor ranks dispatch none, and are counted alike: the host
# takes 0.28 to 0.31 s for the 28 layers of Llama 3B, 0.24 estimated (trainer_host_2xh100_202611.txt).
DTENSOR_HOST = 6.0
# Host time of one tensor-parallel collective: 60 to 109 us on a host that took 1.9 ms for a layer of GPT-2
# (h200_hosts_202611.md).
HOST_S_PER_COLLECTIVE = 82e-6
# Layers whose host time equals that of embedding, head and loss; not measured alone (vTrain's rows,
# tests/benchmarks/results/chosen_constants_202611.md).
END_LAYERS = 2.0

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
