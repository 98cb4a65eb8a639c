"""Time of one optimizer step: computation, communication that is not hidden, pipeline bubble, host and optimizer."""

from __future__ import annotations

import numpy as np

from optimizer.performance.communication import communication
from optimizer.performance.compute import compute, optimizer_time
from optimizer.performance.inputs import Inputs, Number
from optimizer.performance.types import ZERO3

PARTS = (
    "matmul",
    "attention",
    "elementwise",
    "head",
    "host",
    "tensor_communication",
    "data_communication",
    "bubble",
    "optimizer",
)


def step_seconds(x: Inputs) -> dict[str, Number]:
    """Seconds of each of PARTS in one optimizer step; they add up to the step."""
    c = x.coefficients
    work, sent = compute(x), communication(x)
    micro_batches = x.grad_accum

    in_layers = work.layer_matmul + work.layer_attention + work.layer_elementwise
    # Tensor and context collectives wait for, and are waited for by, the layers: none of it is hidden.
    exchanged = sent.tensor + sent.context
    waiting = np.maximum(0.0, work.host - in_layers - exchanged)

    # Pipeline 1F1B: the slowest stage for all micro-batches but one, all stages for that one (arXiv:2104.04473, 2.2).
    # The slowest stage is the last, with its share of the layers and the head.
    stages = x.pipeline
    busy = micro_batches / stages
    whole_layers = in_layers + exchanged + waiting
    bubble = (stages - 1.0) / stages * whole_layers / x.virtual_stages + stages * sent.pipeline
    bubble = np.where(stages > 1, bubble + (micro_batches - 1.0) * sent.pipeline, 0.0)

    # Communication of data ranks hides behind computation, but slows it: a fitted share of it always shows, and all of
    # it that takes longer than what it hides behind.
    micro_batch_s = whole_layers / stages + work.head
    always = c.exposed_communication
    hidden_room = np.where(x.sharding >= ZERO3, micro_batch_s, micro_batch_s * 2.0 / 3.0)
    per_micro_batch = _exposed(sent.data_per_micro_batch, always, hidden_room)
    per_step = _exposed(sent.data_per_step, always, micro_batch_s * 2.0 / 3.0)

    return {
        "matmul": work.layer_matmul * busy,
        "attention": work.layer_attention * busy,
        "elementwise": work.layer_elementwise * busy + work.cast * micro_batches,
        "head": work.head * micro_batches,
        "host": waiting * busy + c.host_s_per_step + 0.0 * busy,
        "tensor_communication": exchanged * busy,
        "data_communication": per_micro_batch * micro_batches + per_step,
        "bubble": bubble,
        "optimizer": optimizer_time(x),
    }


def _exposed(seconds: Number, always: Number, room: Number) -> Number:
    """What shows of communication that takes ``seconds`` behind computation that takes ``room``."""
    return always * seconds + np.maximum(0.0, (1.0 - always) * seconds - room)
