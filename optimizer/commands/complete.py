"""Values that a shell completes; an error completes nothing, as a shell shows none."""

from __future__ import annotations

from pathlib import Path

import click

from optimizer.commands.stack_paths import list_stacks
from optimizer.contract.errors import GpufleetError


def models(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the presets that begin so."""
    from optimizer.workload.presets import presets

    return [name for name in presets() if name.startswith(incomplete.lower())]


def instance_types(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the catalog's instance types that begin so."""
    from optimizer.catalog import load

    try:
        return [one.name for one in load().instance_types if one.name.startswith(incomplete)]
    except GpufleetError:
        return []


def regions(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the catalog's regions that begin so."""
    from optimizer.catalog import load

    try:
        return sorted({offer.region for offer in load().offers if offer.region.startswith(incomplete)})
    except GpufleetError:
        return []


def stacks(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the stacks of the current folder that begin so."""
    return [name for name in list_stacks(Path()) if name.startswith(incomplete)]
