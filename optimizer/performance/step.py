"""Time of one optimizer step: computation, exposed communication, pipeline bubble, host, optimizer, input."""

from __future__ import annotations

import numpy as np

from optimizer.performance import gradient_compression, kernels
from optimizer.performance.communication import buckets, communication
from optimizer.performance.compute import compute, optimizer_time
from optimizer.performance.inputs import Inputs
from optimizer.performance.stage import layers_of_last_stage, layers_of_stage, stage_parameters
from optimizer.performance.types import ZERO1, ZERO3, Number


def step_seconds(x: Inputs) -> dict[str, Number]:
    """Seconds by part of one optimizer step; the parts add up to the step."""
    c = x.coefficients
    work, sent = compute(x), communication(x)
    micro_batches = x.grad_accum

    # A context rank's sends hide behind attention to the previous rank's keys.
    context = np.maximum(0.0, sent.context - (1.0 - 1.0 / x.context) * work.layer_attention)
    tensor = sent.tensor * np.where(x.overlaps_tensor > 0, c.exposed_communication, 1.0)
    exchanged = tensor + context + sent.expert
    stages = x.pipeline
    layers = np.maximum(x.layers, 1.0)
    share = np.where(x.layers > 0, layers_of_stage(x) / layers, 1.0)  # of the fullest stage
    last_share = np.where(x.layers > 0, layers_of_last_stage(x) / layers, 1.0)
    each = work.layer_matmul + work.layer_attention + work.layer_elementwise + exchanged
    stage, with_head = (
        np.maximum(_longer(each * part + head, work.host * part), (work.host + work.late) * part) + work.waits * part
        for part, head in ((share, 0.0), (last_share, work.head))
    )

    arithmetic = work.layer_matmul + work.layer_attention
    dense = (arithmetic * last_share + work.head) / np.maximum(with_head, _NO_TIME_S)
    slower = _throttling(x, dense)
    stage, with_head = stage + slower * arithmetic * share, with_head + slower * (arithmetic * last_share + work.head)
    # The slowest stage sets the pace: the last, unless layers are spread with the head's weight.
    paced_by_last = with_head >= stage
    last = np.where(paced_by_last, with_head, stage)
    share = np.where(paced_by_last, last_share, share)
    head = np.where(paced_by_last, work.head, 0.0)
    throttling = slower * (arithmetic * share + head)

    # 1F1B (arXiv:2104.04473, 2.2); interleaving divides the bubble. Sends hide unless slower than a stage.
    sends = sent.pipeline * np.where(stages > 2.0, 1.0, 0.5)
    held_up = (micro_batches - 1.0) * np.maximum(0.0, sends - last)
    bubble = (stages - 1.0) * (stage / x.virtual_stages + sent.pipeline) + held_up

    # A fitted share of data ranks' communication always shows, and all that outlasts the computation.
    always = always_shown(x)
    room = np.where(x.sharding >= ZERO3, last, last * 2.0 / 3.0)
    per_micro_batch = _exposed(sent.data_per_micro_batch, always, room)
    left = np.maximum(0.0, np.minimum(room, last * 2.0 / 3.0) - (1.0 - always) * sent.data_per_micro_batch)
    per_step = _exposed(sent.data_per_step, always, left)
    if gradient_compression.compresses(x):
        per_step = per_step + _hook_seconds(x)
    busy = micro_batches * share

    parts = {
        "matmul": work.layer_matmul * busy,
        "attention": work.layer_attention * busy,
        "elementwise": work.layer_elementwise * busy + work.weights * micro_batches,
        "head": head * micro_batches,
        "throttling": throttling * micro_batches,
        "host": (last - throttling - each * share - head) * micro_batches + c.host_s_per_step,
        "tensor_communication": tensor * busy,
        "context_communication": context * busy,
        "expert_communication": sent.expert * busy,
        "data_communication": per_micro_batch * micro_batches + per_step,
        "bubble": bubble,
        "optimizer": optimizer_time(x),
    }
    # Loader processes work while the GPU does; a step lasts at least as long as its samples take to prepare.
    load = x.load_s_per_sample * x.micro_batch * micro_batches
    return parts | {"input": np.maximum(0.0, load - sum(parts.values()))}


def always_shown(x: Inputs) -> Number:
    """Share of data ranks' communication that always shows."""
    # PowerSGD's hook synchronizes the device in every bucket.
    overlaps = x.overlaps_data * np.where(x.sharding == ZERO1, 1.0 - x.hook_shards, 1.0) * (x.powersgd_rank == 0)
    return np.where(overlaps > 0, x.coefficients.exposed_communication, 1.0)


def _hook_seconds(x: Inputs) -> Number:
    parameters = stage_parameters(x)
    seconds = gradient_compression.hook_seconds(x, parameters, buckets(parameters * x.reduce_bytes))
    return np.where(x.data * x.context > 1, seconds, 0.0)


def _throttling(x: Inputs, density: Number) -> Number:
    """Extra share of time at the power limit where arithmetic is ``density`` of a stage's time."""
    over = np.maximum(0.0, density - kernels.THROTTLED_FROM) / (1.0 - kernels.THROTTLED_FROM)
    return x.throttling * over**kernels.THROTTLING_POWER


def _exposed(seconds: Number, always: Number, room: Number) -> Number:
    return always * seconds + np.maximum(0.0, (1.0 - always) * seconds - room)


_NO_TIME_S = 1e-12  # of a stage without work

# Between the longer of GPU and host time (power infinity) and their sum (power 1).
_OVERLAP_POWER = 2.5


def _longer(gpu: Number, host: Number) -> Number:
    """Smooth maximum of a stage's GPU and host seconds."""
    return (gpu**_OVERLAP_POWER + host**_OVERLAP_POWER) ** (1.0 / _OVERLAP_POWER)
