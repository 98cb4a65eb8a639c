"""ModelSpec: the architecture of a model, as far as memory, floating-point operations and traffic depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from bootstrap.contract.trainer import CNNS, TORCHVISION
from optimizer.contract.errors import InvalidInputError

if TYPE_CHECKING:
    from optimizer.workload.profile.records import ModuleProfile

ModelArchitecture = Literal["decoder", "encoder", "cnn", "module", "seq2seq", "image", "speech"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2412.19437, 2.1.1): queries, keys and values are made of narrow latents.

    Attributes:
        query_rank, kv_rank: width of the latents of queries, 0 where these are made of the residual (Moonlight), and of
            keys and values.
        rope_dim, nope_dim: head dimensions with and without rotary positions; keys share the former among heads.
        value_dim: head dimension of the values.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def latent_width(self) -> int:
        """Elements of a token's latents, the shared rotary key included."""
        return self.query_rank + self.kv_rank + self.rope_dim

    @property
    def mean_head_dim(self) -> int:
        """Mean of a query's and a value's width: attention's products and saved tensors follow from the sum."""
        return (self.rope_dim + self.nope_dim + self.value_dim) // 2

    def matrix_parameters(self, hidden_size: int, heads: int) -> int:
        """Weights of one layer's projections."""
        queries = (self.query_rank or hidden_size) * (self.nope_dim + self.rope_dim)
        expanded = queries + self.kv_rank * (self.nope_dim + self.value_dim)
        return hidden_size * self.latent_width + heads * (expanded + self.value_dim * hidden_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model; a field without a meaning for the architecture is 0.

    Attributes:
        architecture: "decoder" (causal), "encoder" (bidirectional, masked-language-model head), "seq2seq" (encoder and
            decoder of tokens), "image" (encoder of patches, classifier), "speech" (encoder of audio frames, decoder of
            tokens), "cnn", or "module": the user's own, described by ``profile`` only.
        active_parameters: parameters one token passes through; fewer in a mixture of experts.
        ffn_size: inner width of the feed-forward block (of one expert).
        shared_ffn_size: inner width of the experts of a mixture that every token passes through.
        dense_layers, dense_ffn_size: layers of a mixture without experts, and their feed-forward width.
        head_dim: of latent attention, LatentAttention.mean_head_dim.
        window, windowed_layers: tokens that sliding-window attention sees, and the layers that have it.
        soft_cap: attention scores pass through tanh (arXiv:2408.00118, 2).
        sinks: a learned logit a head joins each softmax (arXiv:2508.10925, 2).
        mlp_bias: products of the feed-forward block, of experts and of their router have biases.
        logits_soft_cap: the output logits pass through tanh.
        dropout: layers drop, by the config; None where there is none.
        norms_per_layer, head_norms: norms of the residual's width, and norms of queries and keys.
        gated_mlp: the feed-forward block has a third matrix (SwiGLU, GeGLU).
        tied_embeddings: the output projection is the embedding.
        max_seq_len: longest sequence the model was built for, tokens; 0 where unknown.
        learned_positions: rows of a learned position embedding.
        embedding_width: width of the embedding and the output projection where two matrices beside them make it the
            residual's (OPT-350m); times and activations are those of the residual's width.
        encoder_layers: of ``layers``, those of the encoder; each of the others is a decoder's, with cross-attention.
        encoder_tokens, decoder_tokens: tokens of a sample in either where the model fixes them: patches of an image
            with the class token, frames of a clip and its longest transcript.
        flops_per_sample, activations_per_sample: published forward FLOPs (a multiply-add counts as two), and elements
            of all convolution outputs, of one sample: of a CNN, or of the convolutions in front of an encoder.
        revision: repository and commit of the Hugging Face Hub that the config is of (org/name@commit), if any.
        quantised: method that the checkpoint's weights are quantised by; empty for none.
        head_note: says that the configuration is of another head than the one planned; empty where it is not.
        tower_parameters: of ``parameters``, those of an encoder of images beside the layers.
        attention_bias: "none", "qkv" (Qwen 2) or "all" (GPT-2). This and the rest make the parameter count exact.
        norm_weight, norm_bias: vectors of a norm: both of LayerNorm, the weight of RMSNorm and bias-free LayerNorm.
        token_types, embedding_norm: rows of a token-type embedding, and a norm after the embeddings (BERT).
        mlm_head: a dense layer with norm before the output projection, and a vocabulary bias, two where the projection
            is not the embedding (BERT).
        wide_head_norms: norms of queries and keys are as wide as all heads together (OLMo 2).
        beside: parameters that fit no other field.
        config: fields of the Hugging Face config that build the model, with model_type.
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
    shared_ffn_size: int = 0
    dense_layers: int = 0
    dense_ffn_size: int = 0
    latent_attention: LatentAttention | None = None
    window: int = 0
    windowed_layers: int = 0
    soft_cap: bool = False
    sinks: bool = False
    mlp_bias: bool = False
    logits_soft_cap: bool = False
    dropout: bool | None = None
    norms_per_layer: int = 2
    head_norms: bool = False
    max_seq_len: int = 0
    learned_positions: int = 0
    embedding_width: int = 0
    encoder_layers: int = 0
    encoder_tokens: int = 0
    decoder_tokens: int = 0
    flops_per_sample: float = 0.0
    activations_per_sample: float = 0.0
    convolutions: int = 0
    tower_parameters: int = 0
    attention_bias: Literal["none", "qkv", "all"] = "none"
    norm_weight: bool = True
    norm_bias: bool = False
    final_norm: bool = True
    token_types: int = 0
    embedding_norm: bool = False
    mlm_head: bool = False
    wide_head_norms: bool = False
    beside: int = 0
    profile: ModuleProfile | None = None
    config: Mapping[str, Any] | None = field(default=None, compare=False)
    source: str
    revision: str = ""
    quantised: str = ""
    head_note: str = ""

    @property
    def build_config(self) -> dict[str, Any] | None:
        """Hugging Face config or {"torchvision": NAME} to build the model from; None where only its size is known."""
        if self.architecture == "cnn":
            return {TORCHVISION: self.name} if self.name in CNNS else None
        return None if self.config is None else dict(self.config)

    @property
    def counts_samples(self) -> bool:
        """True where work is counted in samples and not in tokens."""
        return self.architecture in ("cnn", "module", "image", "speech")

    @property
    def takes_images(self) -> bool:
        """True where samples are images, which a host decodes."""
        return self.convolutional or self.architecture == "image"

    @property
    def has_like_layers(self) -> bool:
        """True for a stack of like layers over the same tokens, which splits other than data are estimated for."""
        return self.architecture in ("decoder", "encoder")

    @property
    def has_dropout(self) -> bool:
        """True where the config has dropout; without a config, where the published recipe has it (GPT-2, BERT)."""
        if self.dropout is not None:
            return self.dropout
        return self.architecture == "seq2seq" or (self.has_like_layers and not self.gated_mlp)

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

    def unmeasured_parts(self, seq_len: int) -> tuple[str, ...]:
        """Parts whose costs are counted, and which no measured run has."""
        parts = {
            "latent attention": self.latent_attention is not None,
            "sliding-window attention": bool(self.windowed_layers and self.window < seq_len),
            "soft capping": self.soft_cap,
            "attention sinks": self.sinks,
            "an encoder and a decoder": 0 < self.encoder_layers < self.layers,
            "an encoder of images": self.architecture == "image",
            "an encoder of images, held and without work,": self.tower_parameters > 0,
        }
        return tuple(name for name, has in parts.items() if has)

    @property
    def attention_matrix_parameters(self) -> int:
        """Weights of one layer's attention projections, without biases."""
        if self.latent_attention is not None:
            return self.latent_attention.matrix_parameters(self.hidden_size, self.attention_heads)
        return self.hidden_size * self.head_dim * (2 * self.attention_heads + 2 * self.kv_heads)

    @property
    def matrices_per_ffn(self) -> int:
        """Matrices of a feed-forward block."""
        return 3 if self.gated_mlp else 2

    @property
    def expert_matrix_parameters(self) -> int:
        """Weights of one feed-forward block (one routed expert), without biases."""
        return self.hidden_size * self.ffn_size * self.matrices_per_ffn

    @property
    def mixture_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def active_layer_matrix_parameters(self) -> float:
        """Weights that one token is multiplied with in one layer, router included; mean of the layers."""
        width = self.hidden_size * self.matrices_per_ffn
        used = max(1, self.experts_per_token) * self.expert_matrix_parameters
        mixture = used + self.shared_ffn_size * width + self.experts * self.hidden_size
        dense = self.dense_layers * (mixture - self.dense_ffn_size * width) / max(1, self.layers)
        return self.attention_matrix_parameters + mixture - dense

    @property
    def layer_parameters(self) -> float:
        """Parameters of one layer; of a mixture, of one with experts."""
        if not self.layers:
            return 0.0
        return (self.parameters - self.embedding_parameters + self.dense_layers * self._beside_dense) / self.layers

    @property
    def dense_layer_parameters(self) -> float:
        """Parameters of a layer without experts."""
        return self.layer_parameters - self._beside_dense

    @property
    def _beside_dense(self) -> int:
        """Weights of a mixture's layer beyond those of its dense layers."""
        inside = self.experts * self.expert_matrix_parameters + self.experts * self.hidden_size
        width = self.shared_ffn_size - self.dense_ffn_size
        return (inside + width * self.hidden_size * self.matrices_per_ffn) if self.dense_layers else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside the layers: embeddings, output projection; all of a CNN."""
        if not self.layers:
            return self.parameters
        return min(self.parameters, self.table_parameters)

    @property
    def table_parameters(self) -> int:
        """Parameters of embeddings, positions and output projection, as the fields say."""
        width = self.embedding_width or self.hidden_size
        words = self.vocab_size * width * (1 if self.tied_embeddings else 2)
        projections = 2 * width * self.hidden_size if self.embedding_width else 0
        return words + projections + self.learned_positions * self.hidden_size


def check_shape(model: ModelSpec) -> ModelSpec:
    """Return ``model`` if its heads and experts go together; InvalidInputError otherwise."""
    if model.attention_heads and (not model.kv_heads or model.attention_heads % model.kv_heads):
        raise InvalidInputError(
            f"kv_heads is {model.kv_heads}",
            limit=f"a divisor of attention_heads, {model.attention_heads}",
            why="every key-value head serves the same number of query heads",
            next_step="correct the number of heads in the model's fields or config.json",
        )
    if model.experts_per_token > model.experts or (model.experts and not model.experts_per_token):
        raise InvalidInputError(
            f"experts_per_token is {model.experts_per_token}",
            limit=f"from 1 to experts, {model.experts}" if model.experts else "0 without experts",
            why="a token passes through that many experts",
            next_step="correct the number of experts in the model's fields or config.json",
        )
    return model


def build_model(
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
    latent: LatentAttention | None = fields.get("latent_attention")
    if latent is not None:
        head_dim = latent.mean_head_dim
    model = ModelSpec(
        parameters=0,
        active_parameters=0,
        attention_heads=attention_heads,
        kv_heads=kv_heads or attention_heads,
        head_dim=head_dim or (hidden_size // attention_heads if attention_heads else 0),
        hidden_size=hidden_size,
        **fields,
    )
    total, active = count_parameters(model)
    total = parameters or total
    return replace(model, parameters=total, active_parameters=active if model.experts else total)


def count_parameters(model: ModelSpec) -> tuple[int, int]:
    """Count a transformer's parameters: all, and those one token passes through."""
    h, query, kv = model.hidden_size, model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
    norm = h * (int(model.norm_weight) + int(model.norm_bias))
    attention = model.attention_matrix_parameters
    if model.attention_bias != "none":  # of latent attention, those of the narrow projections
        attention += model.latent_attention.latent_width if model.latent_attention else query + 2 * kv
    if model.attention_bias == "all":
        attention += h
    if model.head_norms:
        attention += query + kv if model.wide_head_norms else 2 * model.head_dim
    if model.latent_attention is not None:
        attention += model.latent_attention.query_rank + model.latent_attention.kv_rank  # norms of the latents
    if model.sinks:
        attention += model.attention_heads
    attention += model.norms_per_layer * norm

    def block(width: int) -> int:
        matrices = h * width * model.matrices_per_ffn
        return matrices + (width * (model.matrices_per_ffn - 1) + h if model.mlp_bias else 0)

    # The router is one row an expert.
    router = model.experts * (h + int(model.mlp_bias))
    shared = block(model.shared_ffn_size) if model.shared_ffn_size else 0
    dense = model.dense_layers * block(model.dense_ffn_size)
    outside = model.table_parameters + h * model.token_types + model.beside
    outside += norm * (int(model.final_norm) + int(model.embedding_norm))
    if model.mlm_head:
        outside += h * h + h + norm + model.vocab_size * (1 if model.tied_embeddings else 2)
    total, active = (
        outside
        + model.layers * attention
        + dense
        + (model.layers - model.dense_layers) * (router + shared + max(1, experts) * block(model.ffn_size))
        for experts in (model.experts, model.experts_per_token)
    )
    return total, active
