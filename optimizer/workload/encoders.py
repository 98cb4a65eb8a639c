"""Read ``config.json`` of T5, ViT and Whisper: encoders whose samples, or whose decoder, have lengths of their own.

Names and defaults are those of transformers 5.23, src/transformers/models/<model_type>/configuration_<model_type>.py;
parameters are counted from modeling_<model_type>.py beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bootstrap.contract.trainer import DEFAULT_TARGET_POSITIONS, IMAGE_CHANNELS
from optimizer.contract.errors import InvalidInputError
from optimizer.workload.architecture import NEXT, prune_config, whole
from optimizer.workload.model import ModelSpec


def model_from_encoder_config(data: Mapping[str, Any], *, name: str, origin: str) -> ModelSpec:
    """Build the ModelSpec of a ``t5``, ``vit`` or ``whisper`` configuration; InvalidInputError if it lacks a field."""
    kind = str(data["model_type"])
    fields = _READERS[kind](data, origin)
    return ModelSpec(
        name=name,
        active_parameters=fields["parameters"],
        kv_heads=fields["attention_heads"],
        source=f"{origin} ({kind})",
        **({"tied_embeddings": True} | fields),
    )


def _t5(data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    size = _sizes(data, origin, "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size")
    hidden, ffn, encoder, heads = size["d_model"], size["d_ff"], size["num_layers"], size["num_heads"]
    decoder = whole(data, "num_decoder_layers", origin, least=1) or encoder
    buckets = whole(data, "relative_attention_num_buckets", origin, least=1) or 32
    gated = bool(data.get("is_gated_act", str(data.get("feed_forward_proj")).startswith("gated")))
    attention = 4 * hidden * heads * size["d_kv"]
    block = (3 if gated else 2) * hidden * ffn
    layers = encoder * (attention + block + 2 * hidden) + decoder * (2 * attention + block + 3 * hidden)
    # Since version 5 transformers ties the output projection of T5 1.1 too, whose weights have one of their own
    # (configuration_t5.py, __post_init__).
    outside = size["vocab_size"] * hidden + 2 * (buckets * heads + hidden)
    return {
        "architecture": "seq2seq",
        "parameters": layers + outside,
        "layers": encoder + decoder,
        "encoder_layers": encoder,
        "hidden_size": hidden,
        "ffn_size": ffn,
        "gated_mlp": gated,
        "attention_heads": heads,
        "head_dim": size["d_kv"],
        "vocab_size": size["vocab_size"],
        "config": prune_config(data),
    }


def _vit(data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    size = _sizes(
        data,
        origin,
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
    )
    hidden, ffn, layers = size["hidden_size"], size["intermediate_size"], size["num_hidden_layers"]
    _check_heads(hidden, size["num_attention_heads"], "num_attention_heads", origin)
    image, patch = size["image_size"], size["patch_size"]
    if image % patch:
        raise InvalidInputError(
            f"{origin}: image_size is {image} and patch_size {patch}",
            limit="a whole number of patches a side",
            why="ViT cuts an image into patches that do not overlap",
        )
    channels = whole(data, "num_channels", origin, least=1) or IMAGE_CHANNELS
    if channels != IMAGE_CHANNELS:
        raise InvalidInputError(
            f"{origin}: num_channels is {channels}", limit=f"{IMAGE_CHANNELS}", why="images are read as RGB"
        )
    labels = whole(data, "num_labels", origin, least=1) or len(data.get("id2label") or {}) or 2
    patches = (image // patch) ** 2
    biases = (3 * hidden if data.get("qkv_bias") in (None, True) else 0) + hidden
    layer = 4 * hidden**2 + biases + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    stem = channels * patch**2 * hidden
    outside = stem + hidden + (patches + 2) * hidden + 2 * hidden + hidden * labels + labels
    return {
        "architecture": "image",
        "parameters": layers * layer + outside,
        "layers": layers,
        "encoder_layers": layers,
        "encoder_tokens": patches + 1,
        "hidden_size": hidden,
        "ffn_size": ffn,
        "attention_heads": size["num_attention_heads"],
        "head_dim": hidden // size["num_attention_heads"],
        "vocab_size": labels,
        "learned_positions": patches + 1,
        "flops_per_sample": 2.0 * patches * stem,
        "activations_per_sample": float(patches * hidden),
        "convolutions": 1,
        "config": prune_config(data) | {"num_labels": labels},
    }


def _whisper(data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    size = _sizes(
        data,
        origin,
        "d_model",
        "encoder_layers",
        "encoder_attention_heads",
        "encoder_ffn_dim",
        "decoder_layers",
        "decoder_attention_heads",
        "decoder_ffn_dim",
        "vocab_size",
        "num_mel_bins",
    )
    for what in ("attention_heads", "ffn_dim"):
        ours, theirs = size[f"encoder_{what}"], size[f"decoder_{what}"]
        if ours != theirs:
            raise InvalidInputError(
                f"{origin}: encoder_{what} is {ours} and decoder_{what} {theirs}",
                limit="the same in both",
                why="costs are means of layers that differ in their lengths and in cross-attention alone",
            )
    hidden, ffn, heads = size["d_model"], size["encoder_ffn_dim"], size["encoder_attention_heads"]
    _check_heads(hidden, heads, "encoder_attention_heads", origin)
    frames = whole(data, "max_source_positions", origin, least=1) or 1500
    targets = whole(data, "max_target_positions", origin, least=1) or DEFAULT_TARGET_POSITIONS
    encoder, decoder, bins = size["encoder_layers"], size["decoder_layers"], size["num_mel_bins"]
    # Keys have no bias; norms have one.
    attention = 4 * hidden**2 + 3 * hidden
    block = 2 * hidden * ffn + ffn + hidden
    layers = encoder * (attention + block + 4 * hidden) + decoder * (2 * attention + block + 6 * hidden)
    stem = 3 * hidden * (bins + hidden)
    tied = bool(data.get("tie_word_embeddings", True))
    words = size["vocab_size"] * (1 if tied else 2)
    outside = stem + 2 * hidden + (frames + targets + words) * hidden + 4 * hidden
    return {
        "architecture": "speech",
        "parameters": layers + outside,
        "layers": encoder + decoder,
        "encoder_layers": encoder,
        "encoder_tokens": frames,
        "decoder_tokens": targets,
        "hidden_size": hidden,
        "ffn_size": ffn,
        "attention_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": size["vocab_size"],
        "tied_embeddings": tied,
        "learned_positions": frames + targets,
        # Two convolutions of three frames over the log-mel spectrogram, the second with stride 2.
        "flops_per_sample": 2.0 * frames * 3 * hidden * (2 * bins + hidden),
        "activations_per_sample": 3.0 * frames * hidden,
        "convolutions": 2,
        "config": prune_config(data),
    }


_READERS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {"t5": _t5, "vit": _vit, "whisper": _whisper}


def _sizes(data: Mapping[str, Any], origin: str, *names: str) -> dict[str, int]:
    sizes = {name: whole(data, name, origin) for name in names}
    missing = [name for name, value in sizes.items() if not value]
    if missing:
        raise InvalidInputError(
            f"{origin} lacks {', '.join(missing)}",
            limit=f"a {data['model_type']} configuration gives each as a whole number above 0",
            next_step=NEXT,
        )
    return sizes


def _check_heads(hidden: int, heads: int, name: str, origin: str) -> None:
    if hidden % heads:
        raise InvalidInputError(f"{origin}: {name} is {heads}", limit=f"a divisor of the width, {hidden}")
