"""Options that name hardware and its places, and their completion in a shell, which shows no error."""

from __future__ import annotations

import click

from optimizer.catalog import load
from optimizer.contract.errors import GpufleetError


def complete_instance_types(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the catalog's instance types that begin so."""
    try:
        return [instance.name for instance in load().instance_types if instance.name.startswith(incomplete)]
    except GpufleetError:
        return []


def complete_regions(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the catalog's regions that begin so."""
    try:
        return sorted({offer.region for offer in load().offers if offer.region.startswith(incomplete)})
    except GpufleetError:
        return []
