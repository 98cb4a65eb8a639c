"""Costs of a sample: of a CNN, a profiled module, or the convolutions in front of an encoder; one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optimizer.performance import kernels
from optimizer.performance.inputs import Inputs
from optimizer.performance.types import FULL, ZERO2, Number

if TYPE_CHECKING:
    from optimizer.workload.profile.records import ArithmeticWidth, ModuleProfile, Pass

# Input and output of each convolution, in elements a published activation.
SAVED_PER_ACTIVATION = 2.0
# A ResNet's max pooling of one image: 64 channels of 56 x 56, 8 bytes each.
POOLING_INDICES_BYTES = 64.0 * 56 * 56 * 8
# Convolution workspace in 32 bits, elements a published activation: 5.5 GiB on ResNet-50 (batch 256, fp32 and tf32,
# H200, torch 2.11, 2026-11-21); none in bf16, nor with channels last.
CNN_WORKING_32_BIT = 0.5
# cuDNN's 32-bit workspace beyond a profile, bytes an element of convolution output: 6.3 GiB on ResNet-50 (batch 256,
# H200, torch 2.11, fp32 and tf32, 2026-11-21); 0.1 GiB, in bf16, is left out.
WORKSPACE_BYTES_32_BIT = 2.4
# A profile counts 1,872 kernels on BERT-large (26 layers with its ends), 3,570 on a Llama of 24 layers (36 such) (rows
# h200-steps-* of measured_runs.csv).
KERNELS_PER_LAYER = 85.0
# Host time of a convolution with norm and activation: ResNet-152 of two images takes 29.7 ms longer than ResNet-18,
# 0.22 ms a convolution; a layer of GPT-2 1.42 (H200, torch 2.11, h200_hosts_202611.md).
LAYERS_PER_CONVOLUTION = 0.155
# Each of a convolution's products reads or writes its input and its output.
PASSES_PER_PRODUCT = 2.0
# Time of a transformer's other kernels over that of their counted bytes: least error over suite h200
# (measured_runs.csv).
ELEMENTWISE_PASSES = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCosts:
    """One micro-batch, forward, backward and recomputation.

    ``traffic_bytes`` and multiprocessor ``cycles`` are of kernels other than products and attention, ``layers`` host
    time in transformer layers.
    """

    product_flops: Number = 0.0
    convolution_flops: Number = 0.0
    product_bytes: Number = 0.0
    attention_flops: Number = 0.0
    traffic_bytes: Number = 0.0
    cycles: Number = 0.0
    kernels: Number = 0.0
    layers: Number = 0.0


def sample_costs(x: Inputs) -> SampleCosts:
    """Compute the costs of one micro-batch of samples; 0 without convolutions and profile."""
    left = np.where(x.compiled > 0, kernels.COMPILED_CNN, 1.0)
    if x.module is None:
        outputs = x.micro_batch * x.cnn_activations
        return SampleCosts(
            convolution_flops=3.0 * x.micro_batch * x.cnn_flops,
            product_bytes=3.0 * PASSES_PER_PRODUCT * outputs * x.element_bytes,
            traffic_bytes=outputs * x.element_bytes * kernels.CNN_PASSES * left,
            cycles=(outputs * kernels.CNN_CYCLES + x.micro_batch * kernels.STEM_CYCLES) * left * (x.layers == 0),
            layers=x.convolutions * LAYERS_PER_CONVOLUTION * np.where(x.compiled > 0, kernels.COMPILED_HOST, 1.0),
        )
    profile = x.module
    forward = profile.forward_flops
    convolves = 2.0 * forward.convolution > forward.total
    traffic = left if convolves else ELEMENTWISE_PASSES

    def costs(one: Pass) -> dict[str, Number]:
        products = one.flops.convolution / max(forward.convolution, 1.0)
        outputs = profile.convolution_outputs * x.micro_batch
        elements = one.product_elements.fixed_bytes + one.product_elements.bytes_per_sample * x.micro_batch
        elements = elements + PASSES_PER_PRODUCT * products * outputs
        return {
            "product_flops": x.micro_batch * one.flops.matmul,
            "convolution_flops": x.micro_batch * one.flops.convolution,
            "product_bytes": elements * x.element_bytes,
            "attention_flops": x.micro_batch
            * (one.flops.attention + 0.5 * forward.attention * (one.flops.attention > 0)),
            "traffic_bytes": (one.traffic.fixed_bytes + one.traffic.bytes_per_sample * x.micro_batch) * traffic,
            "cycles": outputs * products / 3.0 * kernels.CNN_CYCLES * left if convolves else 0.0,
            "kernels": one.kernels,
        }

    none, full = _passes(x, profile)
    repeats = x.checkpointing == FULL
    units = profile.blocks.count if profile.blocks else 1
    once, again = costs(none), costs(full)
    return SampleCosts(
        **{name: np.where(repeats, again[name], once[name]) for name in once},
        # Recomputation takes the host as long again.
        layers=none.kernels / KERNELS_PER_LAYER * np.where(repeats, 2.0, 1.0)
        + np.where((x.sharding >= ZERO2) & (x.data > 1), kernels.FSDP_HOST * units, 0.0),
    )


def sample_flops(x: Inputs) -> Number:
    """Useful FLOPs of one sample, forward and backward."""
    if x.module is None:
        return 3.0 * x.cnn_flops
    return x.module.forward_flops.total + x.module.backward_flops.total


def sample_bytes(x: Inputs) -> tuple[Number, Number]:
    """Bytes that one micro-batch of samples saves, and bytes of the backward pass on top of them."""
    if x.module is None:
        images = x.micro_batch * x.cnn_activations * x.element_bytes
        working = np.where(x.element_bytes > 2.0, CNN_WORKING_32_BIT, 0.0)
        indices = np.where((x.cnn_activations > 0) & (x.layers == 0), POOLING_INDICES_BYTES * x.micro_batch, 0.0)
        return SAVED_PER_ACTIVATION * images + indices, working * images
    gathers = (x.sharding >= ZERO2) & (x.data > 1)
    copies = np.where(gathers, x.parameters * np.where(x.low_precision > 0, x.element_bytes, 0.0), 0.0)

    def peak(one: Pass) -> Number:
        largest: Number = 0.0
        for line in one.peak:
            fixed = np.maximum(line.fixed_bytes - copies, 0.0)
            largest = np.maximum(largest, fixed + line.bytes_per_sample * x.micro_batch)
        return largest

    none, full = _passes(x, x.module)
    workspace = np.where(x.low_precision > 0, 0.0, WORKSPACE_BYTES_32_BIT * x.module.convolution_outputs)
    return np.where(x.checkpointing == FULL, peak(full), peak(none)), x.micro_batch * workspace


def _passes(x: Inputs, profile: ModuleProfile) -> tuple[Pass, Pass]:
    """Passes without and with activation checkpointing."""
    width: ArithmeticWidth = "16-bit" if np.all(x.low_precision > 0) else "32-bit"
    none = profile.passed(width, "none")
    assert none is not None  # checked by build_inputs
    return none, profile.passed(width, "full") or none
