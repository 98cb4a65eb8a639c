"""Find the model that a user means: preset, config.json, Hub id, profile, function, size or architecture fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.spelling import near_names
from optimizer.contract.units import parse_count
from optimizer.workload.fields import model_from_fields
from optimizer.workload.hub import is_hub_id, read_hub_config
from optimizer.workload.huggingface import check_build, model_from_config, read_json
from optimizer.workload.model import ModelSpec
from optimizer.workload.presets import presets
from optimizer.workload.profile.profiler import is_function, parse_profile, profile_function
from optimizer.workload.size_rule import model_of_size

if TYPE_CHECKING:
    from optimizer.workload.profile.records import ModuleProfile


def resolve_model(spec: str | int | Mapping[str, Any]) -> ModelSpec:
    """Find the model a user means; InvalidInputError lists near names, or the missing fields.

    ``spec`` is a preset's name ("llama-3.1-8b"), the path of a Hugging Face config.json (or its folder) or of a
    profile, an id of the Hugging Face Hub ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B@REVISION"), a function that
    builds a torch module ("package.module:function"), a parameter count ("7B"), a mapping of architecture fields, or
    the content of such a JSON file.
    """
    if isinstance(spec, Mapping):
        if spec.keys() & {"kind", "model_type"}:
            return _from_data(dict(spec), str(spec.get("model_type")), "the model's configuration")
        return model_from_fields(spec)
    text = str(spec).strip()
    known = presets()
    if text.lower() in known:
        return known[text.lower()]
    path = Path(text).expanduser()
    if "/" in text and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_data(read_json(path), path.parent.name if path.name == "config.json" else path.stem, str(path))
    if re.fullmatch(r"[0-9][0-9_,.]*(e[0-9]+)?\s*[kmbgt]?", text.lower()):
        try:
            return model_of_size(parse_count(text), text)
        except ValueError as error:
            raise InvalidInputError(f"model is {text!r}: {error}", next_step="a count such as 500M or 7B") from error
    if is_hub_id(text) and not path.exists():
        repository, revision, data = read_hub_config(text)
        page = f"https://huggingface.co/{repository}/blob/{revision}/config.json"
        model = model_from_config(data, name=repository.split("/")[1], origin=page)
        return replace(check_build(model), revision=f"{repository}@{revision}")
    if is_function(text):
        return model_from_profile(profile_function(text))
    near = near_names(text, known, cutoff=0.5)
    raise InvalidInputError(
        f"model {text!r} is unknown",
        limit="a preset, a Hugging Face config.json or id (org/name), a profile, a function module:function that "
        "builds a torch module, a parameter count such as 7B, or architecture fields",
        next_step=f"did you mean {', '.join(near)}?" if near else f"presets: {', '.join(known)}",
    )


def _from_data(data: Any, name: str, origin: str) -> ModelSpec:
    """Model of a profile, or of a Hugging Face configuration."""
    if isinstance(data, dict) and "kind" in data and "model_type" not in data:
        return model_from_profile(parse_profile(data, origin=origin))
    return check_build(model_from_config(data, name=name, origin=origin))


def model_from_profile(profile: ModuleProfile) -> ModelSpec:
    """Build the ModelSpec of a profiled module."""
    return ModelSpec(
        name=profile.name,
        architecture="module",
        parameters=profile.total_parameters,
        active_parameters=profile.total_parameters - profile.idle_parameters,
        profile=profile,
        source=f"profile of {profile.module_class} by torch {profile.torch}, {profile.as_of.isoformat()}",
    )
