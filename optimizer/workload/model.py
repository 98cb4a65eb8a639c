"""ModelSpec: the architecture of a model, as far as memory, floating-point operations and traffic depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from optimizer.errors import InvalidInputError

if TYPE_CHECKING:
    from optimizer.workload.profile.records import ModuleProfile

ModelArchitecture = Literal["decoder", "encoder", "cnn", "module"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model; a field without a meaning for the architecture is 0.

    Attributes:
        architecture: "decoder" (causal), "encoder" (bidirectional, masked-language-model head), "cnn", or "module": the
            user's own, described by ``profile`` only.
        active_parameters: parameters one token passes through; fewer in a mixture of experts.
        ffn_size: inner width of the feed-forward block (of one expert).
        gated_mlp: the feed-forward block has a third matrix (SwiGLU, GeGLU).
        tied_embeddings: the output projection is the embedding.
        max_seq_len: longest sequence the model was built for, tokens; 0 where unknown.
        learned_positions: rows of a learned position embedding.
        flops_per_sample, activations_per_sample: published forward FLOPs (a multiply-add counts as two), and elements
            of all convolution outputs, of one image; CNN only.
        config: fields of the Hugging Face config that the others do not say, with model_type (workload.architecture).
    """

    name: str
    architecture: ModelArchitecture
    parameters: int
    active_parameters: int
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
    profile: ModuleProfile | None = None
    config: Mapping[str, Any] | None = field(default=None, compare=False)
    source: str

    @property
    def counts_samples(self) -> bool:
        """True where work is counted in samples and not in tokens."""
        return self.architecture in ("cnn", "module")

    @property
    def convolutional(self) -> bool:
        """True where convolutions are most of the arithmetic."""
        if self.profile is not None:
            return 2 * self.profile.forward_flops.convolution > self.profile.forward_flops.total
        return self.architecture == "cnn"

    @property
    def checkpointings(self) -> tuple[str, ...]:
        """Kinds of activation checkpointing with an estimate."""
        if self.profile is not None:
            return tuple(dict.fromkeys(traced.checkpointing for traced in self.profile.passes))
        return ("none",) if self.architecture == "cnn" else ("none", "selective", "full")

    @property
    def attention_matrix_parameters(self) -> int:
        """Weights of one layer's attention projections, without biases."""
        return self.hidden_size * self.head_dim * (2 * self.attention_heads + 2 * self.kv_heads)

    @property
    def expert_matrix_parameters(self) -> int:
        """Weights of one feed-forward block (one expert), without biases."""
        return self.hidden_size * self.ffn_size * (3 if self.gated_mlp else 2)

    @property
    def active_layer_matrix_parameters(self) -> int:
        """Weights that one token is multiplied with in one layer, router included."""
        used = max(1, self.experts_per_token)
        return self.attention_matrix_parameters + used * self.expert_matrix_parameters + self.experts * self.hidden_size

    @property
    def layer_parameters(self) -> float:
        """Parameters of one layer, on average."""
        return (self.parameters - self.embedding_parameters) / self.layers if self.layers else 0.0

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside the layers: embeddings, output projection; all of a CNN."""
        if not self.layers:
            return self.parameters
        tables = self.vocab_size * (1 if self.tied_embeddings else 2) + self.learned_positions
        return min(self.parameters, tables * self.hidden_size)


def check_shape(model: ModelSpec) -> ModelSpec:
    """Return ``model`` if its heads and experts go together; InvalidInputError otherwise."""
    if model.attention_heads and (not model.kv_heads or model.attention_heads % model.kv_heads):
        raise InvalidInputError(
            f"kv_heads is {model.kv_heads}",
            limit=f"a divisor of attention_heads, {model.attention_heads}",
            why="every key-value head serves the same number of query heads",
        )
    if model.experts_per_token > model.experts or (model.experts and not model.experts_per_token):
        raise InvalidInputError(
            f"experts_per_token is {model.experts_per_token}",
            limit=f"from 1 to experts, {model.experts}" if model.experts else "0 without experts",
            why="a token passes through that many experts",
        )
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasesAndNorms:
    """Biases and norms of a transformer, for an exact parameter count.

    Attributes:
        attention_bias: "none", "qkv" (Qwen 2) or "all" (GPT-2).
        norm_bias: LayerNorm with bias (2 vectors); else RMSNorm or bias-free LayerNorm (1 vector).
        head_norms: a norm over the head dimension of queries and of keys (Qwen 3).
        token_types, embedding_norm: rows of a token-type embedding, and a norm after the embeddings (BERT).
        mlm_head: a dense layer with norm and a vocabulary bias before the tied output projection (BERT).
    """

    attention_bias: Literal["none", "qkv", "all"] = "none"
    mlp_bias: bool = False
    norm_bias: bool = False
    final_norm: bool = True
    norms_per_layer: int = 2
    head_norms: bool = False
    token_types: int = 0
    embedding_norm: bool = False
    mlm_head: bool = False


PLAIN = BiasesAndNorms()  # RMSNorm, no biases: Llama


def build_model(
    details: BiasesAndNorms = PLAIN,
    *,
    parameters: int | None = None,
    attention_heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    hidden_size: int,
    **fields: Any,
) -> ModelSpec:
    """Build a ModelSpec: heads filled in, parameters counted unless published.

    ``kv_heads`` is ``attention_heads`` by default, ``head_dim`` ``hidden_size / attention_heads``.
    """
    model = ModelSpec(
        parameters=0,
        active_parameters=0,
        attention_heads=attention_heads,
        kv_heads=kv_heads or attention_heads,
        head_dim=head_dim or (hidden_size // attention_heads if attention_heads else 0),
        hidden_size=hidden_size,
        **fields,
    )
    total, active = count_parameters(model, details)
    total = parameters or total
    return replace(model, parameters=total, active_parameters=active if model.experts else total)


def count_parameters(model: ModelSpec, details: BiasesAndNorms) -> tuple[int, int]:
    """Count a transformer's parameters: all, and those one token passes through."""
    h, query, kv = model.hidden_size, model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
    norm = h * (2 if details.norm_bias else 1)
    attention = model.attention_matrix_parameters
    if details.attention_bias != "none":
        attention += query + 2 * kv
    if details.attention_bias == "all":
        attention += h
    if details.head_norms:
        attention += 2 * model.head_dim
    expert = model.expert_matrix_parameters
    if details.mlp_bias:
        expert += model.ffn_size * (2 if model.gated_mlp else 1) + h
    shared = attention + details.norms_per_layer * norm + model.experts * h  # the router is one row an expert
    tables = model.vocab_size * (1 if model.tied_embeddings else 2) + model.learned_positions + details.token_types
    outside = h * tables
    outside += norm * (int(details.final_norm) + int(details.embedding_norm))
    if details.mlm_head:
        outside += h * h + h + norm + model.vocab_size
    total, active = (
        outside + model.layers * (shared + max(1, experts) * expert)
        for experts in (model.experts, model.experts_per_token)
    )
    return total, active
