"""Columns of models whose layers differ in tokens: an encoder with its own length, and decoder layers that read it.

The equations have one kind of layer. Costs that are linear in tokens and widths are exact with means over the layers,
weighted by tokens; attention's are with the mean number of keys.
"""

from __future__ import annotations

from dataclasses import replace

from bootstrap.contract.trainer import span_lengths
from optimizer.contract.errors import InvalidInputError
from optimizer.performance.inputs import Inputs
from optimizer.performance.types import Recipe
from optimizer.workload.model import ModelSpec

# Attention and feed-forward block of a plain layer; a decoder's with cross-attention has one more.
USUAL_SUBLAYERS = 2.0


def lengths(model: ModelSpec, recipe: Recipe) -> tuple[int, int]:
    """Tokens of a sample in the encoder and in the decoder."""
    if model.architecture == "seq2seq":
        return recipe.seq_len, recipe.target_len or span_lengths(recipe.seq_len)[1]
    return model.encoder_tokens, recipe.target_len or model.decoder_tokens


def check_target_len(model: ModelSpec, target_len: int) -> None:
    """Refuse a length of targets that the model does not have."""
    if not 0 < model.encoder_layers < model.layers:
        raise InvalidInputError(
            f"target_len is {target_len}",
            limit=f"none: {model.name} has no decoder beside an encoder",
            next_step="leave out --target-len",
        )
    if 0 < model.decoder_tokens < target_len:
        raise InvalidInputError(
            f"target_len is {target_len}",
            limit=f"at most {model.decoder_tokens} for {model.name}",
            why="its position embedding has no more rows",
            next_step=f"--target-len {model.decoder_tokens}",
        )


def with_stacks(x: Inputs, model: ModelSpec, recipe: Recipe) -> Inputs:
    """Replace the columns of a model whose layers are not alike by their means over the layers."""
    inputs, targets = (float(length) for length in lengths(model, recipe))
    encoder, decoder = float(model.encoder_layers), float(model.layers - model.encoder_layers)
    width = float(model.attention_heads * model.head_dim)
    of_encoder, of_decoder = encoder * inputs, decoder * targets
    everywhere = of_encoder + of_decoder
    # Keys and values of cross-attention are made of the encoder's tokens, queries and outputs of the decoder's.
    queries = (everywhere + of_decoder) / everywhere
    keys = (everywhere + decoder * inputs) / everywhere
    scores = of_encoder * inputs + of_decoder * (0.5 * targets + inputs)
    matrices = model.hidden_size * width * 2.0 * (queries + keys) + model.expert_matrix_parameters
    return replace(
        x,
        tokens=everywhere / model.layers,
        keys=scores / (everywhere * queries),
        head_tokens=targets if decoder else 1.0,
        query=width * queries,
        heads=model.attention_heads * queries,
        kv=width * keys,
        layer_matrix=matrices,
        norms=(2.0 * of_encoder + 3.0 * of_decoder) / everywhere,
        # Queries, keys, values and both gated products each cast their input (torch 2.11, ATen/autocast_mode.cpp: only
        # casts of parameters are cached); cross-attention's keys and values cast the encoder's.
        input_casts=2.0 * keys + float(model.gated_mlp),
        sublayers=USUAL_SUBLAYERS + decoder / model.layers,
        # A decoder's own scores, which a mask halves, are counted in the keys.
        causal=0.0,
        copies_heads=float(model.architecture == "speech"),
        t5_like=float(model.architecture == "seq2seq"),
    )
