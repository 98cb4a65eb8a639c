"""Configuration files of a folder's stacks; for completion too, which imports no more than it needs."""

from __future__ import annotations

from pathlib import Path


def stack_path(directory: Path, stack: str) -> Path:
    """Return the path of a stack's configuration, whether it exists or not."""
    return directory / f"Pulumi.{stack}.yaml"


def list_stacks(directory: Path) -> list[str]:
    """Return the names of the stacks that have a configuration in a folder."""
    paths = directory.glob("Pulumi.?*.yaml")
    return sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in paths)
