"""Models by name: reads ``data/presets.toml``, whose every entry carries its source."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from optimizer.named_entries import read_entries
from optimizer.workload.model import Architecture, ModelArchitecture, ModelSpec, count_parameters

PRESETS = Path(__file__).parent / "data" / "presets.toml"


class Preset(BaseModel):
    """One entry of presets.toml; a field left out has ModelSpec's default, kv_heads and head_dim the usual ones."""

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
    max_seq_len: int = 0
    learned_positions: int = 0
    flops_per_sample: float = 0.0
    activations_per_sample: float = 0.0
    convolutions: int = 0
    details: Architecture = Architecture()
    source: str

    def shape(self) -> dict[str, Any]:
        """Arguments of ``count_parameters`` (but the details), with kv_heads and head_dim filled in."""
        heads = self.attention_heads
        return {
            "layers": self.layers,
            "hidden_size": self.hidden_size,
            "ffn_size": self.ffn_size,
            "gated_mlp": self.gated_mlp,
            "attention_heads": heads,
            "kv_heads": self.kv_heads or heads,
            "head_dim": self.head_dim or (self.hidden_size // heads if heads else 0),
            "vocab_size": self.vocab_size,
            "tied_embeddings": self.tied_embeddings,
            "experts": self.experts,
            "experts_per_token": self.experts_per_token,
            "learned_positions": self.learned_positions,
        }

    def model(self, name: str) -> ModelSpec:
        """The preset as a ModelSpec; ``parameters`` is the published count."""
        active = self.parameters
        if self.experts:
            active = count_parameters(**self.shape(), details=self.details)[1]
        return ModelSpec(
            name=name,
            architecture=self.architecture,
            parameters=self.parameters,
            active_parameters=active,
            **self.shape(),
            max_seq_len=self.max_seq_len,
            flops_per_sample=self.flops_per_sample,
            activations_per_sample=self.activations_per_sample,
            convolutions=self.convolutions,
            source=self.source,
        )


@functools.cache
def presets() -> dict[str, Preset]:
    """All presets by name, in the file's order."""
    return {name: Preset.model_validate(entry) for name, entry in read_entries(PRESETS).items()}
