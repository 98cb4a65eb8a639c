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

from dataclasses import dataclass

import numpy as np

from optimizer.performance.inputs import Inputs
from optimizer.performance.stage import layer_parameters, layers_of_stage, stage_parameters
from optimizer.performance.types import ZERO2, ZERO3, Flag, Number


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes of gradients with their reduction, of activations, and of gathered parameters."""

    gradients: Number
    activations: Number
    parameters: Number


@dataclass(frozen=True, slots=True)
class _Units:
    """Parameters of one tensor rank's units; ``table`` is the embedding or the output projection."""

    layer: Number
    table: Number
    root: Number  # embedding and output projection in the root
    head: Number  # output projection in a unit of its own
    tied: Flag  # or a stage with one table

    @property
    def ends(self) -> Number:
        """Parameters of the unit that is reduced last."""
        return np.where(self.root > 0, self.root, self.table)


def in_fsdp2(x: Inputs) -> Flag:
    """Flag dense models that FSDP2 shards; spread experts are no part of its units."""
    return (x.fsdp2 > 0) & (x.experts <= 0) & (x.sharding >= x.fsdp2) & (x.data * x.context > 1) & (x.layers > 0)


def loss_parameters_bytes(x: Inputs) -> Number:
    """Gathered parameters at the loss: the ends, and the last layer, whose all-gather the backward pass begins."""
    units = _units(x)
    gathered = units.root + units.head + units.layer
    return np.where(x.sharding >= ZERO3, gathered, stage_parameters(x)) * (x.element_bytes + x.cached_bytes)


def kept_reduction_bytes(x: Inputs) -> Number:
    """Input of the last reduction of the micro-batch before, at the loss."""
    return (
        np.where((x.marks_last > 0) & (x.grad_accum > 1) & (x.sharding >= ZERO2), _units(x).ends, 0.0)
        * x.gradient_bytes
    )


def backward_bytes(x: Inputs, *, early: Number, saved: Number, working: Number) -> Moment:
    """Largest moment of the backward pass after the loss.

    Args:
        x: inputs.
        early: gradients of earlier micro-batches, bytes.
        saved: activations at the loss, bytes.
        working: gradients of one layer's activations, bytes.
    """
    units, layers = _units(x), np.maximum(layers_of_stage(x), 1.0)
    narrow, wide = x.element_bytes, x.gradient_bytes
    narrow_gradient = narrow * x.trained
    ranks = x.data * x.context
    accumulates = early > 0
    gathers_again = x.sharding >= ZERO3
    held = stage_parameters(x)
    # ZeRO-2 that gathers once a step frees parameters in the last micro-batch; the same moments came before with all.
    keeps = (x.sharding == ZERO2) & (x.marks_last > 0) & (x.grad_accum > 1)
    # The output projection's gradient waits in the root for the embedding's.
    head_gradient = narrow_gradient * np.where(units.root > 0, units.table, 0.0)
    head_input, layer_input = wide * units.head, wide * units.layer

    def sharded(parameters: Number, newest: Number) -> Number:
        """Reduced gradients: with accumulation all of them, and the newest before they are added."""
        return np.where(accumulates, early + wide * newest / ranks, wide * parameters / ranks)

    def gathered(parameters: Number) -> Number:
        return narrow * np.where(keeps, held, parameters)

    def largest(*moments: Moment) -> Moment:
        best = moments[0]
        for moment in moments[1:]:
            more = _total(moment) > _total(best)
            best = Moment(*(np.where(more, getattr(moment, name), getattr(best, name)) for name in Moment.__slots__))
        return best

    of_layers = layers * units.layer + units.head
    first = Moment(  # the last layer: its gradients beside its parameters and the next gathered ones
        gradients=head_gradient + narrow_gradient * units.layer + head_input + sharded(units.head, units.head),
        activations=saved + working,
        parameters=gathered(np.where(gathers_again, units.root + 2.0 * units.layer, held)),
    )
    second = Moment(
        gradients=head_gradient
        + narrow_gradient * units.layer
        + layer_input
        + sharded(units.head + units.layer, units.layer),
        activations=saved * (1.0 - 1.0 / layers) + working,
        parameters=gathered(np.where(gathers_again, units.root + 2.0 * units.layer, held - units.layer)),
    )
    last_layer = Moment(
        gradients=head_gradient
        + narrow_gradient * units.layer
        + layer_input
        + sharded(of_layers - units.layer, units.layer),
        activations=saved / layers + working,
        parameters=gathered(units.layer + units.ends),
    )
    embedding = Moment(
        gradients=head_gradient + narrow_gradient * units.table + layer_input + sharded(of_layers, units.layer),
        activations=np.zeros(()),
        parameters=gathered(units.ends),
    )
    kept = np.where(units.tied, 0.0, narrow_gradient * units.table)
    reduction = Moment(
        gradients=wide * units.ends
        + np.maximum(
            narrow_gradient * units.ends + sharded(of_layers, np.zeros(())),
            sharded(of_layers + units.ends, units.ends) + kept,
        ),
        activations=np.zeros(()),
        parameters=gathered(np.zeros(())),
    )
    return largest(first, second, last_layer, embedding, reduction)


def _total(moment: Moment) -> Number:
    return moment.gradients + moment.activations + moment.parameters


def _units(x: Inputs) -> _Units:
    ends = stage_parameters(x) - layers_of_stage(x) * layer_parameters(x, x.expert) / x.tensor
    table = np.minimum(x.vocab * x.hidden / x.tensor, ends)
    tied = (x.embedding_parameters < 2.0 * x.vocab * x.hidden) | (x.pipeline > 1)
    apart = (x.own_ends > 0) & np.logical_not(tied)
    return _Units(
        layer=layer_parameters(x, x.expert) / x.tensor,
        table=table,
        root=np.where(apart, 0.0, ends),
        head=np.where(apart, table, 0.0),
        tied=tied,
    )
