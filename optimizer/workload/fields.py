"""Architecture fields of a request (``model: {layers: 32, …}``) as a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimizer.errors import InvalidInputError
from optimizer.workload.model import Architecture, ModelArchitecture, ModelSpec, check_shape, count_parameters

Size = Annotated[int, Field(ge=1)]


class _Fields(BaseModel):
    """What each means is ModelSpec's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "custom"
    architecture: ModelArchitecture = "decoder"
    parameters: Size | None = None
    layers: Size
    hidden_size: Size
    ffn_size: Size
    gated_mlp: bool = True
    attention_heads: Size
    kv_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    tied_embeddings: bool = False
    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    max_seq_len: int = Field(default=0, ge=0)
    learned_positions: int = Field(default=0, ge=0)


def model_from_fields(fields: Mapping[str, Any]) -> ModelSpec:
    """The model that a mapping of architecture fields describes.

    Raises:
        InvalidInputError: every wrong field at once, or fields that no model can have.
    """
    try:
        given = _Fields.model_validate(dict(fields))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            place = ".".join(str(part) for part in problem["loc"])
            shown = "" if problem["type"] in ("missing", "extra_forbidden") else f" (got {problem.get('input')!r})"
            lines.append(f"model.{place}: {problem['msg']}{shown}")
        raise InvalidInputError(
            "the model's fields are not an architecture:\n    " + "\n    ".join(lines),
            limit=f"fields are {', '.join(_Fields.model_fields)}",
            next_step="give the missing fields, a preset or a config.json",
        ) from error
    if given.architecture in ("cnn", "module"):
        raise InvalidInputError(
            f"model.architecture is {given.architecture} with architecture fields",
            limit="a CNN is given by its preset's name, a module by its function or its profile",
            why="their FLOPs and activations are counted, not derived from fields",
        )
    heads = given.attention_heads
    if given.head_dim is None and given.hidden_size % heads:
        raise InvalidInputError(
            f"model.hidden_size is {given.hidden_size} and model.attention_heads is {heads}",
            limit="a whole number of hidden dimensions a head",
            next_step="give model.head_dim",
        )
    shape: dict[str, Any] = {
        "layers": given.layers,
        "hidden_size": given.hidden_size,
        "ffn_size": given.ffn_size,
        "gated_mlp": given.gated_mlp,
        "attention_heads": heads,
        "kv_heads": given.kv_heads or heads,
        "head_dim": given.head_dim or given.hidden_size // heads,
        "vocab_size": given.vocab_size,
        "tied_embeddings": given.tied_embeddings,
        "experts": given.experts,
        "experts_per_token": given.experts_per_token or min(2, given.experts),
        "learned_positions": given.learned_positions,
    }
    total, active = count_parameters(**shape, details=Architecture())
    # A given count knows of biases and norms that the fields do not name.
    dense = not given.experts
    model = ModelSpec(
        name=given.name,
        architecture=given.architecture,
        parameters=given.parameters or total,
        active_parameters=(given.parameters or total) if dense else active,
        **shape,
        max_seq_len=given.max_seq_len,
        source="architecture fields of the request",
    )
    return check_shape(model)
