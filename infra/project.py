"""Pulumi.yaml, the project file, with the configuration keys of the settings."""

from __future__ import annotations

from io import StringIO

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from infra.settings import keys

FILE = "Pulumi.yaml"
_NAME_AND_DESCRIPTION = """\
name: gpufleet
description: The AWS fleet that carries out one FleetPlan (gpufleet stack set writes it into the stack's configuration).
"""
_ABOUT_KEYS = "# A key with a default is optional. gpufleet:plan and aws:region are written by `gpufleet stack set`.\n"


def project_file(*, program: str = "", virtualenv: str = "") -> str:
    """Text of Pulumi.yaml.

    Args:
        program: folder of the program's ``__main__.py``; by default Pulumi.yaml's own.
        virtualenv: environment to run it in, absolute or from Pulumi.yaml's folder; by default ``python3`` of PATH.
    """
    # https://www.pulumi.com/docs/iac/concepts/projects/project-file/#attributes
    lines = [f"main: {program}"] if program else []
    lines += ["runtime:", "  name: python"]
    if virtualenv:
        lines += ["  options:", f"    virtualenv: {virtualenv}"]
    return f"{_NAME_AND_DESCRIPTION}{chr(10).join(lines)}\n{_ABOUT_KEYS}{_configuration()}"


def _configuration() -> str:
    order = ("type", "items", "default", "description")
    configuration = {}
    for key, entry in keys().items():
        if entry.get("default") == "":
            entry = {**entry, "default": DoubleQuotedScalarString("")}
        configuration[f"gpufleet:{key}"] = {part: entry[part] for part in order if part in entry}
    yaml = YAML()
    # A description stays on one line.
    yaml.width = 1_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = StringIO()
    yaml.dump({"config": configuration}, out)
    return out.getvalue()
