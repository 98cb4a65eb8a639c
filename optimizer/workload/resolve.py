"""From what the user wrote for a model to a ModelSpec."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimizer.errors import InvalidInputError
from optimizer.units import parse_count
from optimizer.workload.huggingface import model_from_config, read_json
from optimizer.workload.model import Architecture, ModelArchitecture, ModelSpec, check_shape, count_parameters
from optimizer.workload.presets import presets
from optimizer.workload.profile import is_function, profile_from_dict, profile_function
from optimizer.workload.size_rule import model_of_size

Size = Annotated[int, Field(ge=1)]


class _Fields(BaseModel):
    """Architecture fields of a request (``model: {layers: 32, …}``); what they mean is ModelSpec's."""

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


def resolve_model(spec: str | int | Mapping[str, Any]) -> ModelSpec:
    """Find the model a user means.

    Args:
        spec: a preset's name ("llama-3.1-8b"), the path of a Hugging Face config.json (or its folder) or of a profile
            that ``gpufleet profile`` wrote, a function that builds a torch module ("package.module:function"), a
            parameter count ("7B"), a mapping of architecture fields, or what such a JSON file holds.

    Raises:
        InvalidInputError: none of these; the message lists near names, or what is missing.
        DataMissingError: a function, and torch is not installed.
    """
    if isinstance(spec, Mapping):
        if "kind" in spec:
            return profile_from_dict(spec, origin="the request's model").model()
        if "model_type" in spec:
            return model_from_config(dict(spec), name=str(spec["model_type"]), origin="the model's configuration")
        return _from_fields(spec)
    text = str(spec).strip()
    known = presets()
    if text.lower() in known:
        return known[text.lower()].model(text.lower())
    path = Path(text).expanduser()
    if "/" in text and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_file(path)
    if re.fullmatch(r"[0-9][0-9_,.]*(e[0-9]+)?\s*[kmbgt]?", text.lower()):
        try:
            return model_of_size(parse_count(text), text)
        except ValueError as error:
            raise InvalidInputError(f"model is {text!r}: {error}", next_step=_NEXT) from error
    if is_function(text):
        return profile_function(text).model()
    near = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.5)
    raise InvalidInputError(
        f"model {text!r} is unknown",
        limit=_LIMIT,
        next_step=f"did you mean {', '.join(near)}?" if near else f"presets: {', '.join(known)}",
    )


_LIMIT = (
    "a preset, a Hugging Face config.json, a profile, a function module:function that builds a torch module, "
    "a parameter count such as 7B, or architecture fields"
)
_NEXT = "presets are listed in the documentation of gpufleet estimate"


def _from_file(path: Path) -> ModelSpec:
    """The model of a JSON file: a profile, or a Hugging Face configuration."""
    data = read_json(path)
    if isinstance(data, dict) and "kind" in data and "model_type" not in data:
        return profile_from_dict(data, origin=str(path)).model()
    return model_from_config(data, name=path.parent.name if path.name == "config.json" else path.stem, origin=str(path))


def _from_fields(fields: Mapping[str, Any]) -> ModelSpec:
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
