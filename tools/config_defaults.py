"""Write optimizer/workload/data/config_defaults.json: the fields of transformers' configuration classes, with defaults.

Run it with the transformers release that the families are read after, and commit the result: `python -m
tools.config_defaults` (with --check: compare).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from optimizer.workload.families import FAMILIES
from optimizer.workload.huggingface import CONFIG_DEFAULTS
from tools.generated import write_or_check

KV_HEADS = "num_key_value_heads"
# Fields that say nothing of the model: outputs, labels, generation.
_LEFT_OUT = {"use_cache", "tokenizer_class", "prefix", "finetuning_task", "default_theta", "time_step_limit"}


def class_defaults(kind: str) -> dict[str, Any]:
    """Fields of a ``model_type`` by name, those of them that take a null in place of a default, and other names."""
    cls: Any = CONFIG_MAPPING[kind]
    types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    fields = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(cls)
        if field.name not in common | _LEFT_OUT and (field.name == "pad_token_id" or "token_id" not in field.name)
    }
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    # A class may define the field under the name that it also maps (Qwen 3's num_experts).
    aliases = {old: new if new in plain else old for old, new in cls.attribute_map.items()}
    aliases |= {new: old for old, new in cls.attribute_map.items() if new not in plain}
    nullable = [name for name, value in plain.items() if value is not None and "None" in types[name]]
    # A null of these is one a query head, where the class says so; in others no layer can be built.
    if KV_HEADS in nullable and getattr(cls(**{KV_HEADS: None}), KV_HEADS) is None:
        nullable.remove(KV_HEADS)
    if "rope_parameters" in plain:
        plain["default_theta"] = cls.default_theta  # of rotary positions, no field of its own
    return {
        "fields": plain,
        "nullable": nullable,
        "aliases": {old: new for old, new in aliases.items() if old != new and new in plain},
    }


def main() -> None:
    """Write the file, one model_type a line."""
    kinds = sorted({kind for name, family in FAMILIES.items() for kind in (name, family.text, family.vision) if kind})
    lines = [f"{json.dumps(kind)}: {json.dumps(class_defaults(kind), default=str)}" for kind in kinds]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_or_check(CONFIG_DEFAULTS, text, source=f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
