"""Bytes that FSDP2 holds beyond the sharded states, at the loss and through the backward pass.

Read in torch 2.11, torch/distributed/fsdp/_fully_shard. A unit is what one ``fully_shard`` call wraps: a layer, and
either the root with embedding and output projection, or each of the two by itself.
- Before a unit's backward pass, the all-gather of the unit before it begins (_fsdp_param_group.py, _backward_prefetch).
- After it, the unit's parameters are freed, and its gradients are copied to a reduce-scatter input in the reduction's
  precision, which stays until the next unit's is made (post_backward, comm_ctx.reduce_scatter_state).
- The copied gradients are freed but for the last one, which a loop variable of foreach_reduce (_fsdp_collectives.py)
  holds until the reduce-scatter's output is there.
- The root's parameters stay gathered through the backward pass, and its gradients are reduced last.
"""

from __future__ import annotations

import numpy as np

from optimizer.performance.case import Case
from optimizer.performance.types import ZERO2, ZERO3, Number

# Bytes of gradients with their reduction, of activations, and of gathered parameters.
Moment = tuple[Number, ...]


class _Units:
    """Parameters of one tensor rank's units; ``table`` is the embedding or the output projection.

    Attributes:
        root: embedding and output projection in the root.
        head: output projection in a unit of its own.
        ends: the unit that is reduced last.
        is_tied: one table, or a stage with one.
    """

    def __init__(self, x: Case) -> None:
        self.layer = x.rank_layer_parameters
        ends = x.stage_parameters - x.stage_layers * self.layer
        self.table = np.minimum(x.table_parameters / x.tensor, ends)
        self.is_tied = (x.model.embedding_parameters < 2.0 * x.table_parameters) | (x.pipeline > 1)
        apart = x.code.own_ends & np.logical_not(self.is_tied)
        self.root = np.where(apart, 0.0, ends)
        self.head = np.where(apart, self.table, 0.0)
        self.ends = np.where(self.root > 0, self.root, self.table)


def loss_bytes(x: Case) -> Number:
    """Gathered parameters at the loss: the ends, and the last layer, whose all-gather the backward pass begins.

    With them the input of the last reduction of the micro-batch before.
    """
    units = _Units(x)
    gathered = np.where(x.sharding >= ZERO3, units.root + units.head + units.layer, x.stage_parameters)
    kept = np.where((x.grad_accum > 1) & (x.sharding >= ZERO2), units.ends, 0.0) if x.code.marks_last else 0.0
    return gathered * (x.element + x.state.cached) + kept * x.state.gradient


def backward_bytes(x: Case, *, early: Number, saved: Number, working: Number) -> Moment:
    """Largest moment of the backward pass after the loss.

    Args:
        x: case.
        early: gradients of earlier micro-batches, bytes.
        saved: activations at the loss, bytes.
        working: gradients of one layer's activations, bytes.
    """
    units, layers = _Units(x), np.maximum(x.stage_layers, 1.0)
    narrow, wide = x.element, x.state.gradient
    narrow_gradient = narrow * x.state.trained
    gathers_again = x.sharding >= ZERO3
    held = x.stage_parameters
    # ZeRO-2 that gathers once a step frees parameters in the last micro-batch; the same moments came before with all.
    keeps = (x.sharding == ZERO2) & (x.grad_accum > 1) & x.code.marks_last
    # The output projection's gradient waits in the root for the embedding's.
    head_gradient = narrow_gradient * np.where(units.root > 0, units.table, 0.0)
    head_input, layer_input = wide * units.head, wide * units.layer

    def sharded(parameters: Number, newest: Number) -> Number:
        """Reduced gradients: with accumulation all of them, and the newest before they are added."""
        return np.where(early > 0, early + wide * newest / x.ranks, wide * parameters / x.ranks)

    def gathered(parameters: Number) -> Number:
        return narrow * np.where(keeps, held, parameters)

    of_layers = layers * units.layer + units.head
    layer_gradient = head_gradient + narrow_gradient * units.layer
    two_layers = units.root + 2.0 * units.layer
    kept = np.where(units.is_tied, 0.0, narrow_gradient * units.table)
    moments: tuple[Moment, ...] = (
        (  # the last layer: its gradients beside its parameters and the next gathered ones
            layer_gradient + head_input + sharded(units.head, units.head),
            saved + working,
            gathered(np.where(gathers_again, two_layers, held)),
        ),
        (  # the layer before it
            layer_gradient + layer_input + sharded(units.head + units.layer, units.layer),
            saved * (1.0 - 1.0 / layers) + working,
            gathered(np.where(gathers_again, two_layers, held - units.layer)),
        ),
        (  # the first layer
            layer_gradient + layer_input + sharded(of_layers - units.layer, units.layer),
            saved / layers + working,
            gathered(units.layer + units.ends),
        ),
        (  # the embedding
            head_gradient + narrow_gradient * units.table + layer_input + sharded(of_layers, units.layer),
            0.0,
            gathered(units.ends),
        ),
        (  # the reduction of the ends
            wide * units.ends
            + np.maximum(
                narrow_gradient * units.ends + sharded(of_layers, 0.0),
                sharded(of_layers + units.ends, units.ends) + kept,
            ),
            0.0,
            gathered(0.0),
        ),
    )
    best = moments[0]
    for moment in moments[1:]:
        more = sum(moment) > sum(best)
        best = tuple(np.where(more, a, b) for a, b in zip(moment, best, strict=True))
    return best
