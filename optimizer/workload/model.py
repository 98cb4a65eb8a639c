"""ModelSpec: the architecture of a model, as far as memory, floating-point operations and traffic depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optimizer.errors import InvalidInputError

if TYPE_CHECKING:
    from optimizer.workload.profile import ModuleProfile

ModelArchitecture = Literal["decoder", "encoder", "cnn", "module"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model.

    A field that has no meaning for the architecture is 0 (a CNN has no heads, a dense model no experts).

    Attributes:
        name: what the user called it.
        architecture: "decoder" (causal), "encoder" (bidirectional, masked-language-model head), "cnn", or "module": the
            user's own, of which only ``profile`` is known.
        parameters: all parameters; all of them are trained, but for a module's (its profile says which).
        active_parameters: parameters one token passes through; below ``parameters`` for a mixture of experts.
        layers: transformer blocks.
        hidden_size: width of the residual stream.
        ffn_size: inner width of the feed-forward block (of one expert).
        gated_mlp: the feed-forward block has a third matrix (SwiGLU, GeGLU).
        attention_heads, kv_heads, head_dim: query heads, key-value heads, width of one head.
        vocab_size: rows of the embedding.
        tied_embeddings: the output projection is the embedding.
        experts, experts_per_token: of a mixture of experts.
        max_seq_len: longest sequence the model was built for, tokens; 0 where the source does not say.
        learned_positions: rows of a learned position embedding.
        flops_per_sample: of a CNN: published forward FLOPs of one image (a multiply-add counts as two).
        activations_per_sample: of a CNN: published elements of all convolution outputs of one image.
        convolutions: of a CNN.
        profile: of a module: what ``gpufleet profile`` counted.
        source: where the numbers come from.
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
    source: str

    @property
    def counts_samples(self) -> bool:
        """Whether its work is counted in samples (images) and not in tokens: a CNN, and a module."""
        return self.architecture in ("cnn", "module")

    @property
    def convolutional(self) -> bool:
        """Whether convolutions are most of its arithmetic."""
        if self.profile is not None:
            return 2 * self.profile.forward_flops.convolution > self.profile.forward_flops.total
        return self.architecture == "cnn"

    @property
    def checkpointings(self) -> tuple[str, ...]:
        """Kinds of activation checkpointing there is an estimate for: a module's where it has blocks, none of a CNN."""
        if self.profile is not None:
            return tuple(dict.fromkeys(one.checkpointing for one in self.profile.passes))
        return ("none",) if self.architecture == "cnn" else ("none", "selective", "full")

    @property
    def attention_matrix_parameters(self) -> int:
        """Weights of one layer's query, key, value and output projections, without biases."""
        return self.hidden_size * self.head_dim * (2 * self.attention_heads + 2 * self.kv_heads)

    @property
    def expert_matrix_parameters(self) -> int:
        """Weights of one feed-forward block (one expert), without biases."""
        return self.hidden_size * self.ffn_size * (3 if self.gated_mlp else 2)

    @property
    def active_layer_matrix_parameters(self) -> int:
        """Weights one token is multiplied with in one layer, router included."""
        used = max(1, self.experts_per_token)
        return self.attention_matrix_parameters + used * self.expert_matrix_parameters + self.experts * self.hidden_size

    @property
    def layer_parameters(self) -> float:
        """Parameters of one layer: all of the model that is not embedding or output projection, spread evenly."""
        return (self.parameters - self.embedding_parameters) / self.layers if self.layers else 0.0

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside the layers: embeddings and an output projection of its own; all of a CNN."""
        if not self.layers:
            return self.parameters
        tables = self.vocab_size * (1 if self.tied_embeddings else 2) + self.learned_positions
        return min(self.parameters, tables * self.hidden_size)


def check_shape(model: ModelSpec) -> ModelSpec:
    """``model``, if its heads and experts go together.

    Raises:
        InvalidInputError: the field, its value, its limit and why.
    """
    if model.attention_heads and (not model.kv_heads or model.attention_heads % model.kv_heads):
        raise InvalidInputError(
            f"kv_heads is {model.kv_heads}",
            limit=f"a divisor of attention_heads, {model.attention_heads}",
            why="each key-value head serves as many query heads",
        )
    if model.experts_per_token > model.experts or (model.experts and not model.experts_per_token):
        raise InvalidInputError(
            f"experts_per_token is {model.experts_per_token}",
            limit=f"from 1 to experts, {model.experts}" if model.experts else "0 without experts",
            why="a token goes to that many of the experts",
        )
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What ``count_parameters`` needs beyond ModelSpec to be exact: where the model has biases and norms.

    Attributes:
        attention_bias: "none", "qkv" (Qwen 2) or "all" (GPT-2).
        mlp_bias: the feed-forward matrices have biases.
        norm_bias: LayerNorm with bias (2 vectors); otherwise RMSNorm or bias-free LayerNorm (1 vector).
        final_norm: a norm after the last layer.
        norms_per_layer: norms of one layer.
        head_norms: a norm over the head dimension of queries and of keys (Qwen 3).
        token_types: rows of a token-type embedding (BERT).
        embedding_norm: a norm after the embeddings (BERT).
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


def count_parameters(
    *,
    layers: int,
    hidden_size: int,
    ffn_size: int,
    gated_mlp: bool,
    attention_heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    tied_embeddings: bool,
    experts: int = 0,
    experts_per_token: int = 0,
    learned_positions: int = 0,
    details: Architecture,
) -> tuple[int, int]:
    """Count a transformer's parameters from its architecture.

    Returns:
        All parameters, and those one token passes through (equal without experts).
    """
    h, query, kv = hidden_size, attention_heads * head_dim, kv_heads * head_dim
    norm = h * (2 if details.norm_bias else 1)
    attention = h * (2 * query + 2 * kv)
    if details.attention_bias != "none":
        attention += query + 2 * kv
    if details.attention_bias == "all":
        attention += h
    if details.head_norms:
        attention += 2 * head_dim
    expert = h * ffn_size * (3 if gated_mlp else 2)
    if details.mlp_bias:
        expert += ffn_size * (2 if gated_mlp else 1) + h
    shared = attention + details.norms_per_layer * norm + experts * h  # the router is one row an expert
    outside = h * (vocab_size * (1 if tied_embeddings else 2) + learned_positions + details.token_types)
    outside += norm * (int(details.final_norm) + int(details.embedding_norm))
    if details.mlm_head:
        outside += h * h + h + norm + vocab_size
    total = outside + layers * (shared + max(1, experts) * expert)
    active = outside + layers * (shared + max(1, experts_per_token) * expert)
    return total, active
