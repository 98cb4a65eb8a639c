"""Models by name: reads ``data/presets.toml``, whose every entry carries its source."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from optimizer.workload.huggingface import model_from_config
from optimizer.workload.model import ModelSpec
from optimizer.workload.named_entries import read_entries

PRESETS = Path(__file__).parent / "data" / "presets.toml"


@functools.cache
def presets() -> dict[str, ModelSpec]:
    """All presets by name, in the file's order: Hugging Face configs, and CNNs as ModelSpec's own fields."""
    found = {}
    for name, entry in read_entries(PRESETS).items():
        parameters, source = entry.pop("parameters"), entry.pop("source")
        if "model_type" in entry:
            found[name] = replace(model_from_config(entry, name=name, origin=name), source=source)
        else:
            found[name] = ModelSpec(
                name=name, parameters=parameters, active_parameters=parameters, source=source, **entry
            )
    return found
