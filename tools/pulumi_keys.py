"""Writes Pulumi.yaml, whose configuration keys are of infra/settings.py; ``--check`` fails where it has drifted."""

from __future__ import annotations

from pathlib import Path

from infra.project import FILE, project_file
from tools.generated import write_or_check

PROJECT = Path(__file__).parent.parent / FILE


def main() -> None:
    """Write the file, or with --check compare it."""
    write_or_check(PROJECT, project_file(program="infra/", virtualenv=".venv"), source="infra/settings.py")


if __name__ == "__main__":
    main()
