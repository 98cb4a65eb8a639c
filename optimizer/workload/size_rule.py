"""A model from nothing but its parameter count ("7B"): a rule for depth and width, fitted to published decoders.

Depth grows as a power of the parameter count, fitted by least squares of logarithms to RULE_MODELS; width then follows
from the count. The rest is Llama 3's: SwiGLU with ffn/hidden 3.5, 8 key-value heads of 128, 128,256 tokens, embeddings
tied below 4B as in Llama 3.2. A large vocabulary errs on the side of more memory.
"""

from __future__ import annotations

import math
from typing import Any

from optimizer.errors import InvalidInputError
from optimizer.workload.model import Architecture, ModelSpec, count_parameters

# (parameters, layers) of published dense decoders: GPT-3 family (arXiv:2005.14165, table 2.1), Llama (arXiv:2302.13971,
# table 2), Llama 3 (arXiv:2407.21783, table 3) and Llama 3.2 (its config.json files).
RULE_MODELS: tuple[tuple[float, int], ...] = (
    (125e6, 12), (350e6, 24), (760e6, 24), (1.3e9, 24), (2.7e9, 32), (6.7e9, 32), (13.0e9, 40), (175e9, 96),
    (6.7e9, 32), (13.0e9, 40), (32.5e9, 60), (65.2e9, 80),
    (1.24e9, 16), (3.21e9, 28), (8.03e9, 32), (70.6e9, 80), (405e9, 126),
)  # fmt: skip

VOCAB_SIZE = 128256
FFN_RATIO = 3.5
HEAD_DIM = 128
KV_HEADS = 8
TIED_BELOW = 4e9
SMALLEST, LARGEST = 50_000_000, 2_000_000_000_000
MAX_SEQ_LEN = 131072


def depth(parameters: float) -> int:
    """Layers of a model of ``parameters``: the power law fitted to RULE_MODELS."""
    x = [math.log(count) for count, _ in RULE_MODELS]
    y = [math.log(layers) for _, layers in RULE_MODELS]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return max(1, round(math.exp(mean_y + slope * (math.log(parameters) - mean_x))))


def model_of_size(parameters: int, name: str) -> ModelSpec:
    """A decoder of exactly ``parameters``, with the rule's depth and the width that comes nearest.

    Raises:
        InvalidInputError: outside the sizes the rule was fitted to, with some margin.
    """
    if not SMALLEST <= parameters <= LARGEST:
        raise InvalidInputError(
            f"model is {name}, {parameters:,} parameters",
            limit=f"{SMALLEST:,} to {LARGEST:,} parameters",
            why="the depth and width rule is fitted to published models of 125M to 405B",
            next_step="give a preset, a config.json or architecture fields",
        )
    tied = parameters < TIED_BELOW

    def shape(layers: int, heads: int) -> dict[str, Any]:
        hidden = heads * HEAD_DIM
        return {
            "layers": layers,
            "hidden_size": hidden,
            "ffn_size": round(FFN_RATIO * hidden),
            "gated_mlp": True,
            "attention_heads": heads,
            "kv_heads": math.gcd(heads, KV_HEADS),
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB_SIZE,
            "tied_embeddings": tied,
        }

    def layers_of(heads: int) -> int:
        one, two = (count_parameters(**shape(layers, heads), details=Architecture())[0] for layers in (1, 2))
        return max(1, round(1 + (parameters - one) / (two - one)))

    # Heads in eights above 16, as published models have them, so that the eight tensor ranks of a node divide them: the
    # width whose depth, made up to the count, comes nearest to the rule's.
    rule = depth(parameters)
    heads = min(
        [*range(1, 16), *range(16, 40, 4), *range(40, 520, 8)],
        key=lambda candidate: abs(math.log(layers_of(candidate) / rule)),
    )
    layers = layers_of(heads)
    return ModelSpec(
        name=name,
        architecture="decoder",
        parameters=parameters,
        active_parameters=parameters,
        **shape(layers, heads),
        max_seq_len=MAX_SEQ_LEN,
        source=(
            f"derived from the parameter count alone: {layers} layers of {heads * HEAD_DIM}, by the rule of "
            "optimizer/workload/size_rule.py; a preset or config.json is more exact"
        ),
    )
