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
from optimizer.performance.types import ZERO2, ZERO3, Flag, Number

# Bytes of gradients with their reduction, of activations, and of gathered parameters.
Moment = tuple[Number, ...]


def _units(x: Case) -> tuple[Number, Number, Number, Number]:
    """Parameters of one tensor rank's units: a layer; the root; an output projection alone; a table."""
    layer = x.rank_layer_parameters
    ends = x.stage_parameters - x.stage_layers * layer
    table = np.minimum(x.table_parameters / x.tensor, ends)
    apart = x.code.own_ends & np.logical_not(_is_tied(x))
    return layer, np.where(apart, 0.0, ends), np.where(apart, table, 0.0), table


def _is_tied(x: Case) -> Flag:
    """Flag one table, or a stage with one."""
    return (x.model.embedding_parameters < 2.0 * x.table_parameters) | (x.pipeline > 1)


def loss_bytes(x: Case) -> Number:
    """Gathered parameters at the loss: the ends, and the last layer, whose all-gather the backward pass begins.

    With them the input of the last reduction of the micro-batch before.
    """
    layer, root, head, table = _units(x)
    gathered = np.where(x.sharding >= ZERO3, root + head + layer, x.stage_parameters)
    last = np.where(root > 0, root, table)
    kept = np.where((x.grad_accum > 1) & (x.sharding >= ZERO2), last, 0.0) if x.code.compiles_layers else 0.0
    return gathered * x.element + kept * x.gradient_bytes


def backward_bytes(x: Case, *, early: Number, saved: Number, working: Number) -> Moment:
    """Largest moment of the backward pass after the loss.

    Args:
        x: case.
        early: gradients of earlier micro-batches, bytes.
        saved: activations at the loss, bytes.
        working: gradients of one layer's activations, bytes.
    """
    (layer, root, head, table), layers = _units(x), x.stage_layers
    narrow, wide, held = x.element, x.gradient_bytes, x.stage_parameters
    grad = narrow * x.trained
    again = x.sharding >= ZERO3
    # ZeRO-2 that gathers once a step frees parameters in the last micro-batch; the same moments came before with all.
    keeps = (x.sharding == ZERO2) & (x.grad_accum > 1) & x.code.compiles_layers
    waiting = grad * np.where(root > 0, table, 0.0)  # output projection's, in the root for the embedding's
    last = np.where(root > 0, root, table)  # unit that is reduced last
    kept = np.where(_is_tied(x), 0.0, grad * table)

    def sharded(parameters: Number, newest: Number) -> Number:
        """Reduced gradients: with accumulation all of them, and the newest before they are added."""
        return np.where(early > 0, early + wide * newest / x.ranks, wide * parameters / x.ranks)

    all_layers = layers * layer + head
    two_layers = root + 2.0 * layer
    reduced = np.maximum(grad * last + sharded(all_layers, 0.0), sharded(all_layers + last, last) + kept)
    of_layer = waiting + (grad + wide) * layer
    moments: tuple[Moment, ...] = (
        # The last layer: its gradients beside its parameters and the next gathered ones. The layer before it.
        (
            waiting + grad * layer + wide * head + sharded(head, head),
            saved + working,
            np.where(again, two_layers, held),
        ),
        (
            of_layer + sharded(head + layer, layer),
            saved * (1.0 - 1.0 / layers) + working,
            np.where(again, two_layers, held - layer),
        ),
        # The first layer, the embedding, and the reduction of the ends.
        (of_layer + sharded(all_layers - layer, layer), saved / layers + working, layer + last),
        (waiting + grad * table + wide * layer + sharded(all_layers, layer), 0.0, last),
        (wide * last + reduced, 0.0, 0.0),
    )
    best: Moment = (-1.0, 0.0, 0.0)
    for gradients, activations, parameters in moments:
        moment = gradients, activations, narrow * np.where(keeps, held, parameters)
        more = sum(moment) > sum(best)
        best = tuple(np.where(more, a, b) for a, b in zip(moment, best, strict=True))
    return best
