"""Costs of T5, ViT and Whisper: FLOPs that torch counts, bytes that a trace counts, lengths of encoder and decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from bootstrap.contract.trainer import AUTO
from optimizer.contract.errors import InvalidInputError
from optimizer.performance.case import lengths
from optimizer.performance.memory import activation_bytes, logits_bytes
from optimizer.performance.operations import model_flops_per_sample
from optimizer.performance.setups import build_recipe
from optimizer.performance.types import Recipe
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import case_of

T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 2048, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 3,
    "num_decoder_layers": 2, "num_heads": 8, "decoder_start_token_id": 0,
}  # fmt: skip
T5_1_1 = T5 | {"d_ff": 1024, "feed_forward_proj": "gated-gelu"}
VIT: dict[str, Any] = {
    "model_type": "vit", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3,
    "num_attention_heads": 8, "image_size": 224, "patch_size": 16, "num_labels": 1000,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "vocab_size": 2048, "num_mel_bins": 80, "d_model": 512, "encoder_layers": 3,
    "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_layers": 2, "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048, "max_source_positions": 600, "max_target_positions": 200, "decoder_start_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
NAMES = ["t5", "t5 1.1", "vit", "whisper"]


@pytest.mark.parametrize(("config", "seq_len"), [(T5, 512), (T5_1_1, 512), (VIT, 1), (WHISPER, 1)], ids=NAMES)
def test_useful_flops_are_those_that_torch_counts(config: dict[str, Any], seq_len: int) -> None:
    spec = resolve_model(config)
    settings = transformers.AutoConfig.for_model(**config, use_cache=False, attn_implementation="eager")
    model = getattr(transformers, AUTO[spec.architecture]).from_config(settings)
    encoded, decoded = (torch.ones(1, n, dtype=torch.int64) for n in lengths(spec, Recipe(seq_len=seq_len)))
    batch = {
        "seq2seq": {"input_ids": encoded, "decoder_input_ids": decoded},
        "image": {"pixel_values": torch.ones(1, 3, 224, 224)},
        "speech": {"input_features": torch.ones(1, 80, 1200), "decoder_input_ids": decoded},
    }[spec.architecture]
    with FlopCounterMode(display=False) as counter:
        model(**batch).logits.sum().backward()
    useful = float(model_flops_per_sample(case_of(spec, Recipe(seq_len=seq_len))))
    # Torch counts a decoder's own scores whole, and no gradient of the samples, which a stem's third product would be.
    targets = lengths(spec, Recipe(seq_len=seq_len))[1]
    masked = (spec.layers - spec.encoder_layers) * 3 * 4 * targets**2 * 0.5 * spec.attention_heads * spec.head_dim
    first = spec.flops_per_sample
    if spec.architecture == "speech":  # the second convolution's input has a gradient
        first = 2.0 * 1200 * 3 * 80 * 512
    assert useful == pytest.approx(counter.get_total_flops() - masked + first, rel=0.001)


# MB of a sample at the loss, traced by gpufleet profile with transformers 5.23 (torch 2.11, 2026-11-23) in 16-bit
# autocast and in 32 bits.
@pytest.mark.parametrize(
    ("config", "seq_len", "narrow", "wide"),
    [(T5, 512, 59.53, 82.60), (T5_1_1, 512, 84.82, 102.47), (VIT, 1, 13.45, 20.81), (WHISPER, 1, 62.76, 91.86)],
    ids=NAMES,
)
def test_saved_bytes_are_those_that_a_trace_counts(
    config: dict[str, Any], seq_len: int, narrow: float, wide: float
) -> None:
    for precision, traced in (("bf16", narrow), ("fp32", wide)):
        recipe = Recipe(seq_len=seq_len, precision=precision)  # type: ignore[arg-type]
        x = case_of(resolve_model(config), recipe, data=1, micro_batch=8)
        # Masks of dropout at rate 0, which the trace keeps and CUDA does not make, are 3% of ViT and Whisper.
        assert float(activation_bytes(x).saved + logits_bytes(x)) / 8e6 == pytest.approx(traced, rel=0.08)


def test_the_decoder_of_t5_is_as_long_as_span_corruption_makes_it() -> None:
    # arXiv:1910.10683, section 3.1.4; transformers' run_t5_mlm_flax.py names 512 and 114.
    t5, whisper = resolve_model("t5-base"), resolve_model("whisper-tiny")
    assert lengths(t5, Recipe(seq_len=512)) == (512, 114)
    assert lengths(whisper, Recipe(seq_len=1)) == (1500, 448)
    assert lengths(resolve_model("vit-l-16"), Recipe(seq_len=1)) == (197, 0)
    assert lengths(t5, Recipe(seq_len=512, target_len=64)) == (512, 64)
    assert lengths(whisper, build_recipe(whisper, seq_len=None, framework="gpufleet", target_len=100)) == (1500, 100)


@pytest.mark.parametrize(
    ("name", "target_len", "says"),
    [("whisper-tiny", 449, "at most 448"), ("vit-l-16", 10, "no decoder"), ("bert-base", 10, "no decoder")],
)
def test_targets_that_a_model_does_not_have_are_refused(name: str, target_len: int, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        build_recipe(resolve_model(name), seq_len=None, framework="gpufleet", target_len=target_len)
