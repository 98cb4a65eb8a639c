"""Writes docs/request.md from the request's models; ``--check`` fails where the file has drifted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from optimizer.contract.request import SECTIONS, FleetRequest
from optimizer.workload.fields import ArchitectureFields
from tools.generated import write_or_check

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "request.md"
HEADER = """# Request reference

Generated from the request's models by `make docs`; do not edit. A request is YAML for `gpufleet recommend
REQUEST.yaml`; flags override it. Numbers take suffixes (2B, 500M, 5k), hours also 48h, 3d or 90min; commas separate
thousands. Budget and deadline bind the 95th percentile. A key that is not below is refused.

```yaml
{example}```
"""
# Headings by key of SECTIONS, with the place in the file.
HEADINGS = {
    "": "The request",
    "workload": "`workload`",
    "constraints": "`constraints`",
    "existing_reservations": "An entry of `constraints.existing_reservations`",
    "capacity_block": "`capacity_block` of a reservation",
    "quotes": "An entry of `constraints.quotes`",
}


def reference() -> str:
    """The whole reference as Markdown."""
    example = (ROOT / "examples" / "request.yaml").read_text(encoding="utf-8")
    parts = [HEADER.format(example=example)]
    for key, model in SECTIONS.items():
        parts += [f"## {HEADINGS[key]}\n", f"{_first_line(model)}\n", *_table(model)]
    parts += [
        "## `model` as architecture fields\n",
        f"{_first_line(ArchitectureFields)}\n",
        *_table(ArchitectureFields),
    ]
    return "\n".join(parts)


def _first_line(model: type[BaseModel]) -> str:
    return str(model.__doc__).strip().splitlines()[0]


def _table(model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        entry = schema["properties"][name]
        if field.is_required():
            default = "needed"
        elif isinstance(field.default, BaseModel) or field.default in (None, (), PydanticUndefined):
            default = ""
        else:
            default = _plain(field.default)
        lines.append(f"| `{name}` | {_values(entry, schema)} | {default} | {entry.get('description', '')} |")
    return [*lines, ""]


def _values(entry: dict[str, Any], schema: dict[str, Any]) -> str:
    """Values that a key takes, in words."""
    if "anyOf" in entry:
        return ", or ".join(_values(one, schema) for one in entry["anyOf"] if one.get("type") != "null")
    if "$ref" in entry:
        return "mapping, below"
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if entry.get("type") == "array":
        return f"list of {_values(entry['items'], schema)}"
    kinds = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    words = kinds.get(entry.get("type", ""), "mapping")
    if "pattern" in entry:
        words += " like `" + entry["pattern"].strip("^$").replace("|", "\\|") + "`"
    if "format" in entry:
        words = entry["format"].replace("date-time", "time in ISO 8601")
    bounds = [
        f"{word} {entry[key]:,}"
        for key, word in (("exclusiveMinimum", "above"), ("minimum", "from"), ("maximum", "to"))
        if key in entry
    ]
    return " ".join([words, *bounds])


def _plain(value: Any) -> str:
    return ", ".join(map(_plain, value)) if isinstance(value, tuple) else f"`{str(value).lower()}`"


def main() -> None:
    """Write the reference, or with --check compare it."""
    assert SECTIONS[""] is FleetRequest and SECTIONS.keys() == HEADINGS.keys()
    write_or_check(REFERENCE, reference(), source="the request's models")


if __name__ == "__main__":
    main()
