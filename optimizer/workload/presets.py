"""Models by name: reads ``data/presets.toml``, whose every entry carries its source."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bootstrap.contract.trainer import WITH_LENGTHS
from optimizer.workload.encoders import model_from_encoder_config
from optimizer.workload.model import PLAIN, BiasesAndNorms, LatentAttention, ModelArchitecture, ModelSpec, build_model
from optimizer.workload.named_entries import read_entries

PRESETS = Path(__file__).parent / "data" / "presets.toml"


class Preset(BaseModel):
    """One entry of presets.toml, with ModelSpec's fields and defaults; ``parameters`` is the published count.

    T5, ViT and Whisper are given by their whole ``config``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: ModelArchitecture
    parameters: int = Field(ge=1)
    layers: int = 0
    hidden_size: int = 0
    ffn_size: int = 0
    gated_mlp: bool = False
    attention_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    tied_embeddings: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn_size: int = 0
    dense_layers: int = 0
    dense_ffn_size: int = 0
    latent_attention: LatentAttention | None = None
    window: int = 0
    windowed_layers: int = 0
    soft_cap: bool = False
    sinks: bool = False
    logits_soft_cap: bool = False
    norms_per_layer: int = 2
    head_norms: bool = False
    max_seq_len: int = 0
    learned_positions: int = 0
    flops_per_sample: float = 0.0
    activations_per_sample: float = 0.0
    convolutions: int = 0
    details: BiasesAndNorms = PLAIN
    config: dict[str, Any] | None = None
    source: str

    def model(self, name: str) -> ModelSpec:
        """The preset as a ModelSpec."""
        if self.config and self.config["model_type"] in WITH_LENGTHS:
            return replace(model_from_encoder_config(self.config, name=name, origin=name), source=self.source)
        fields = {field: getattr(self, field) for field in Preset.model_fields if field != "details"}
        return build_model(self.details, name=name, **fields)


@functools.cache
def presets() -> dict[str, Preset]:
    """All presets by name, in the file's order."""
    return {name: Preset.model_validate(entry) for name, entry in read_entries(PRESETS).items()}
