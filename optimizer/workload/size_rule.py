"""Build a model from its parameter count alone ("7B"), by a rule for depth and width fitted to published decoders.

Depth grows as a power of the parameter count, fitted by least squares of logarithms to RULE_MODELS; width then follows
from the count. The rest is Llama 3's: SwiGLU with ffn/hidden 3.5, 8 key-value heads of 128, 128,256 tokens, embeddings
tied below 4B as in Llama 3.2. A large vocabulary errs on the side of more memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from optimizer.contract.errors import InvalidInputError
from optimizer.workload.model import ModelSpec, build_model

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
    counts, layers = np.log(np.array(RULE_MODELS)).T
    slope, intercept = np.polyfit(counts, layers, 1)
    return max(1, round(math.exp(intercept + slope * math.log(parameters))))


def model_of_size(parameters: int, name: str) -> ModelSpec:
    """Build a decoder of exactly ``parameters``, with the rule's depth and the nearest width."""
    if not SMALLEST <= parameters <= LARGEST:
        raise InvalidInputError(
            f"model is {name}, {parameters:,} parameters",
            limit=f"{SMALLEST:,} to {LARGEST:,} parameters",
            why="the depth and width rule is fitted to published models of 125M to 405B",
            next_step="give a preset, a config.json or architecture fields",
        )

    def candidate(layers: int, heads: int) -> ModelSpec:
        return build_model(
            name=name,
            architecture="decoder",
            layers=layers,
            hidden_size=heads * HEAD_DIM,
            ffn_size=round(FFN_RATIO * heads * HEAD_DIM),
            gated_mlp=True,
            attention_heads=heads,
            kv_heads=math.gcd(heads, KV_HEADS),
            vocab_size=VOCAB_SIZE,
            tied_embeddings=parameters < TIED_BELOW,
            max_seq_len=MAX_SEQ_LEN,
            source="",
        )

    def layers_for(heads: int) -> int:
        one, two = (candidate(layers, heads).parameters for layers in (1, 2))
        return max(1, round(1 + (parameters - one) / (two - one)))

    # Above 40 heads in steps of eight, as in published models, so that eight tensor ranks divide them. The best width
    # needs the number of layers nearest to the rule's depth.
    rule = depth(parameters)
    widths = [*range(1, 16), *range(16, 40, 4), *range(40, 520, 8)]
    heads = min(widths, key=lambda heads: abs(math.log(layers_for(heads) / rule)))
    layers = layers_for(heads)
    source = (
        f"derived from the parameter count alone: {layers} layers of {heads * HEAD_DIM}, by the rule of "
        "optimizer/workload/size_rule.py; a preset or config.json is more exact"
    )
    return replace(candidate(layers, heads), parameters=parameters, active_parameters=parameters, source=source)
