"""Writes Pulumi.yaml's configuration keys from infra/settings.py; ``--check`` fails where the file has drifted."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from infra.settings import keys
from tools.generated import write_or_check

PROJECT = Path(__file__).parent.parent / "Pulumi.yaml"


def project(text: str) -> str:
    """Text of Pulumi.yaml with the keys of the settings; the rest stays."""
    yaml = YAML()
    # A description is one line, as it was written.
    yaml.width = 1_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    data = yaml.load(text)
    data["config"].clear()
    order = ("type", "items", "default", "description")
    for key, entry in keys().items():
        if entry.get("default") == "":
            entry = {**entry, "default": DoubleQuotedScalarString("")}
        data["config"][f"gpufleet:{key}"] = {part: entry[part] for part in order if part in entry}
    out = StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def main() -> None:
    """Write the keys, or with --check compare them."""
    write_or_check(PROJECT, project(PROJECT.read_text(encoding="utf-8")), source="infra/settings.py")


if __name__ == "__main__":
    main()
