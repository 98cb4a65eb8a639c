"""Costs of DDP's communication hooks that compress gradients: bytes sent, memory, and time beside the all-reduce.

Counted from torch/distributed/algorithms/ddp_comm_hooks (default_hooks.py, powerSGD_hook.py; torch 2.11) and the
PowerSGD paper (arXiv:1905.13727). Gradients and buckets are fp32; tensor, pipeline and expert parallelism are 1.
"""

from __future__ import annotations

import numpy as np

from optimizer.performance import kernels
from optimizer.performance.inputs import Inputs
from optimizer.performance.types import Number

# Bytes moved a parameter. 16 bits: cast (read 4, write 2), division (2 + 2), cast back (2 + 4).
HALF_TRAFFIC_BYTES = 16.0
# PowerSGD: add the error (12), copy (8), keep the new error (12), and read or write the gradient in three products.
POWERSGD_TRAFFIC_BYTES = 32.0 + 3 * 4.0
# Bytes held a parameter: the 16-bit buckets, until their all-reduces end; PowerSGD's errors, for the whole run.
HALF_BYTES = 2.0
POWERSGD_BYTES = 4.0
# Multiplications and additions a parameter and rank: P = M Q, Q = M' P and M = P Q'.
POWERSGD_FLOPS = 6.0


def compresses(x: Inputs) -> bool:
    """True where any configuration compresses its gradients."""
    return bool(np.any(x.half_gradients > 0) or np.any(x.powersgd_rank > 0))


def sent_bytes(x: Inputs, reduced: Number) -> Number:
    """Bytes that ranks reduce instead of ``reduced``: half of them, or PowerSGD's P and Q."""
    halved = np.where(x.half_gradients > 0, reduced / 2.0, reduced)
    if not np.any(x.powersgd_rank > 0):
        return halved
    _, sides, elements = _matrices(x)
    vectors = np.maximum(reduced - 4.0 * elements, 0.0)
    return np.where(x.powersgd_rank > 0, np.minimum(4.0 * x.powersgd_rank * sides + vectors, reduced), halved)


def all_reduces(x: Inputs, buckets: Number) -> Number:
    """Collectives of so many buckets; PowerSGD reduces P, Q, and vectors apart."""
    return np.where(x.powersgd_rank > 0, 3.0, 1.0) * buckets


def held_bytes(x: Inputs, parameters: Number) -> Number:
    """Bytes of memory that the hook holds."""
    halves = np.where(x.half_gradients > 0, HALF_BYTES, 0.0)
    return parameters * np.where(x.powersgd_rank > 0, POWERSGD_BYTES, halves)


def hook_seconds(x: Inputs, parameters: Number, buckets: Number) -> Number:
    """Seconds of one step that the hook adds to the computation."""
    byte_per_s = x.memory_byte_per_s * kernels.MEMORY_EFFICIENCY
    half_s = parameters * HALF_TRAFFIC_BYTES / byte_per_s + buckets * kernels.HALF_HOOK_S
    total = np.where(x.half_gradients > 0, half_s, 0.0)
    if not np.any(x.powersgd_rank > 0):
        return total
    rank = x.powersgd_rank
    count, _, _ = _matrices(x)
    # Gram-Schmidt up to rank 2, else QR; of P and of Q.
    orthogonal_s = np.where(rank > 2, kernels.QR_S, kernels.GRAM_SCHMIDT_S * rank)
    matrices_s = count * (2.0 * orthogonal_s + kernels.POWERSGD_MATRIX_S)
    products_s = parameters * (POWERSGD_TRAFFIC_BYTES / byte_per_s + POWERSGD_FLOPS * rank / x.fp32_flop_per_s)
    return np.where(rank > 0, products_s + matrices_s + buckets * kernels.POWERSGD_BUCKET_S, total)


def _matrices(x: Inputs) -> tuple[Number, Number, Number]:
    """Count the matrices among the parameters, the sum of their heights and widths, and their elements."""
    up_and_down = x.mlp_matrices * np.maximum(x.experts, 1.0)
    heads = x.query + x.kv
    tables = np.where(x.vocab > 0, np.round(x.embedding_parameters / np.maximum(x.vocab * x.hidden, 1.0)), 0.0)
    count = x.layers * (4.0 + up_and_down) + tables
    sides = x.layers * (4.0 * x.hidden + 2.0 * heads + up_and_down * (x.hidden + x.ffn)) + tables * (x.vocab + x.hidden)
    elements = x.layers * x.hidden * (2.0 * heads + up_and_down * x.ffn) + tables * x.vocab * x.hidden
    # Convolutions count as squares of one size; their vectors are few.
    squares = np.where(x.convolutions > 0, x.parameters, 0.0)
    return count + x.convolutions, sides + 2.0 * np.sqrt(x.convolutions * squares), elements + squares
