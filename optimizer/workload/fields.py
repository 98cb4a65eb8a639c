"""Build a ModelSpec from the architecture fields of a request (``model: {layers: 32, …}``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from optimizer.contract.errors import InvalidInputError, describe_invalid
from optimizer.contract.request import Number
from optimizer.contract.units import parse_count
from optimizer.workload.families import USUAL, explicit_sizes
from optimizer.workload.model import ModelSpec, build_model, check_shape

Size = Annotated[int, Field(ge=1), BeforeValidator(parse_count), Number]
MaybeSize = Annotated[int, Field(ge=0), Number]
# Share by which a given count may differ from the fields' own.
MOST_OFF = 0.1


class ArchitectureFields(BaseModel):
    """A transformer's architecture; fields are ModelSpec's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="custom", description="Name in the answer.")
    architecture: Literal["decoder", "encoder"] = Field(
        default="decoder", description="decoder or encoder; other kinds of models have a preset or a config.json."
    )
    parameters: Size | None = Field(default=None, description="Count, where it is known; null counts the fields.")
    layers: Size = Field(description="Transformer layers.")
    hidden_size: Size = Field(description="Width of the residual stream.")
    ffn_size: Size = Field(description="Width of the MLP; of one expert in a mixture.")
    gated_mlp: bool = Field(default=True, description="The MLP has three matrices (SwiGLU) instead of two.")
    attention_heads: Size = Field(description="Query heads of attention.")
    kv_heads: Size | None = Field(default=None, description="Key and value heads; null for attention_heads.")
    head_dim: Size | None = Field(default=None, description="Null for hidden_size / attention_heads.")
    vocab_size: Size = Field(description="Entries of the vocabulary.")
    tied_embeddings: bool = Field(default=False, description="The output layer shares the input embedding.")
    experts: MaybeSize = Field(default=0, description="Experts of a mixture; 0 for a dense model.")
    experts_per_token: MaybeSize = Field(default=0, description="Experts a token visits; 0 for two of a mixture.")
    max_seq_len: MaybeSize = Field(default=0, description="Positions that the model was made for; 0 for unknown.")
    learned_positions: MaybeSize = Field(default=0, description="Rows of a learned position embedding.")


def model_from_fields(fields: Mapping[str, Any]) -> ModelSpec:
    """Validate architecture fields and build their model; InvalidInputError with every wrong field at once."""
    try:
        given = ArchitectureFields.model_validate(dict(fields))
    except ValidationError as error:
        wrong = "\n    ".join(describe_invalid(error, within="model"))
        raise InvalidInputError(
            f"the model's fields are not an architecture:\n    {wrong}",
            limit=f"fields are {', '.join(ArchitectureFields.model_fields)}",
            next_step="give the missing fields, a preset or a config.json",
        ) from error
    if given.head_dim is None and given.hidden_size % given.attention_heads:
        raise InvalidInputError(
            f"model.hidden_size is {given.hidden_size} and model.attention_heads is {given.attention_heads}",
            limit="a whole number of hidden dimensions a head",
            next_step="give model.head_dim",
        )
    # RMSNorm, no biases and SwiGLU with rotary positions are Llama's, whatever the shape.
    is_like_llama = given.architecture == "decoder" and given.gated_mlp and not given.learned_positions
    kind = ("mixtral" if given.experts else "llama") if is_like_llama else ""
    known = given.model_dump(exclude={"experts_per_token", "parameters"})
    known["name"] += f" built as a {kind}" if kind else ""  # in every answer: another model's fields make no such model
    model = check_shape(
        build_model(
            **known,
            experts_per_token=given.experts_per_token or min(2, given.experts),
            source="architecture fields of the request",
        )
    )
    parameters = given.parameters or model.parameters
    if abs(parameters / model.parameters - 1) > MOST_OFF:
        raise InvalidInputError(
            f"model.parameters is {parameters:,}, and the fields make {model.parameters:,}",
            limit=f"within {MOST_OFF:.0%} of the fields' own count: biases, norms and positions",
            next_step="leave model.parameters out, or correct the field that is wrong",
        )
    active = model.active_parameters if model.experts else parameters
    config = {**explicit_sizes(USUAL, asdict(model)), "tie_word_embeddings": model.tied_embeddings, "model_type": kind}
    return replace(model, parameters=parameters, active_parameters=active, config=config if kind else None)
