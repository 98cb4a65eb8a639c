"""The model of a row: its shape columns, else its preset, its size or its parameter count."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from optimizer.contract.errors import InvalidInputError
from optimizer.performance.cells import Row
from optimizer.workload.model import BiasesAndNorms, ModelSpec, build_model, check_shape
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model
from optimizer.workload.size_rule import model_of_size

# Llama rounds 8/3 of the hidden size up to a multiple (https://github.com/meta-llama/llama, llama/model.py).
GATED_FFN_MULTIPLE = 256
SIZE = re.compile(r"[0-9][0-9_,.]*(e[0-9]+)?\s*[kmbgt]", re.IGNORECASE)

ARCHITECTURES = {
    "decoder": "decoder",
    "llama": "decoder",
    "gpt": "decoder",
    "encoder": "encoder",
    "cnn": "cnn",
    "seq2seq": "seq2seq",
    "image": "image",
    "speech": "speech",
}
# Architectures that the columns of a shape do not describe.
_BY_NAME = ("seq2seq", "image", "speech")


def read_model(row: Row) -> ModelSpec:
    """Read the model of a row."""
    architecture = row.word("architecture", ARCHITECTURES, default="")
    name = row.text("model")
    preset = presets().get(name.lower())
    if architecture == "cnn" or (not architecture and preset is not None and preset.architecture == "cnn"):
        if preset is None or preset.architecture != "cnn":
            raise InvalidInputError(
                f"model is {name.lower()!r} and architecture is cnn",
                limit=f"one of {', '.join(key for key, value in presets().items() if value.architecture == 'cnn')}",
                why="a CNN's FLOPs are published per model, not derived from columns",
            )
        return preset
    if architecture in _BY_NAME:
        return _read_by_name(row, architecture, name.lower())
    if row.given("layers") or row.given("hidden_size"):
        return _read_transformer(row, architecture or "decoder", name or "unnamed")
    if preset is not None and preset.architecture != "cnn":
        return preset
    if architecture != "encoder" and SIZE.fullmatch(name):
        return resolve_model(name)
    if architecture != "encoder" and row.given("parameters"):
        return model_of_size(row.count("parameters"), name or "unnamed")
    raise InvalidInputError(
        f"model is {name!r}, without layers and hidden_size",
        limit="a preset, a size such as 7B, or a shape",
        why="memory and time follow from the shape",
        next_step="gpufleet estimate --help lists the presets",
    )


def _read_by_name(row: Row, architecture: str, name: str) -> ModelSpec:
    """Preset of a row's name, or of its model_type and parameters, as the reference trainer writes them."""
    known = {key: value for key, value in presets().items() if value.architecture == architecture}
    if name in known:
        return known[name]
    parameters = row.number("parameters", default=0.0)
    for preset in known.values():
        if (preset.config or {}).get("model_type") == name and preset.parameters == parameters:
            return preset
    raise InvalidInputError(
        f"model is {row.text('model')!r} and architecture is {architecture}",
        limit=f"one of {', '.join(known)}, or their model_type with their parameters",
        why="the columns of a shape describe one stack of like layers",
        next_step="give the name of a preset",
    )


def _read_transformer(row: Row, architecture: str, name: str) -> ModelSpec:
    hidden = row.count("hidden_size")
    layers = row.count("layers")
    # One head is 128 wide in most published models (64 below 1024).
    heads = row.count("attention_heads", default=max(1, hidden // (128 if hidden >= 1024 else 64)))
    kv_heads = row.count("kv_heads", default=heads)
    head_dim = row.count("head_dim", default=max(1, hidden // heads))
    gated = row.flag("gated_mlp", default=row.text("architecture").lower() == "llama")
    gated_ffn = GATED_FFN_MULTIPLE * math.ceil(hidden * 8 / 3 / GATED_FFN_MULTIPLE)
    ffn = row.count("ffn_size", default=gated_ffn if gated else 4 * hidden)
    # GPT-2's 50257, padded as training code does.
    vocab = row.count("vocab_size", default=32000 if gated else 50304)
    experts = row.count("experts", default=0, least=0)
    used = row.count("experts_per_token", default=min(2, experts), least=0)
    parameters = row.number("parameters", default=0.0)

    def build(tied: bool) -> ModelSpec:
        return build_model(
            BiasesAndNorms(norm_bias=not gated), name=name,
            architecture="encoder" if architecture == "encoder" else "decoder", layers=layers, hidden_size=hidden,
            ffn_size=ffn, gated_mlp=gated, attention_heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            vocab_size=vocab, tied_embeddings=tied, experts=experts, experts_per_token=used,
            source="columns of the row",
        )  # fmt: skip

    # GPT-2, MPT and BERT tie output projection and embedding, Llama of 4B and more does not.
    if not parameters:
        return check_shape(build(tied=not gated))
    # A given count stands: it includes biases, norms and positions.
    nearest = min((build(True), build(False)), key=lambda model: abs(model.parameters - parameters))
    active = nearest.active_parameters if experts else round(parameters)
    return check_shape(replace(nearest, parameters=round(parameters), active_parameters=active))
