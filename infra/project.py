"""Pulumi.yaml, the project file, with the configuration keys of the settings."""

from __future__ import annotations

import json

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
    about, lines = f"{_NAME_AND_DESCRIPTION}{chr(10).join(lines)}\n{_ABOUT_KEYS}", ["config:"]
    for key, entry in keys().items():
        lines.append(f"  gpufleet:{key}:")
        parts = (part for part in ("type", "items", "default", "description") if part in entry)
        # YAML reads JSON.
        lines += [f"    {part}: {json.dumps(entry[part], ensure_ascii=False)}" for part in parts]
    return about + "\n".join(lines) + "\n"
