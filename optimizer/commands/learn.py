"""``gpufleet catalog learn``: capacity events of the user's own stacks, for the next ``recommend``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from optimizer.catalog import Catalog, load
from optimizer.catalog.learned import read_learned
from optimizer.catalog.snapshot import DIRECTORY_VARIABLE, keep_events, learned_file
from optimizer.commands.options import directory_option
from optimizer.commands.output import format_option, say, write_notes, write_rows
from optimizer.commands.stack_file import read_stack, read_state, resolve_names
from optimizer.contract.errors import DataMissingError, GpufleetError
from optimizer.contract.hardware import LearnedPool
from optimizer.economics.interruption import event_weight
from optimizer.search.purchases import pool_hazard

COLUMNS = {
    "pool": "pool",
    "launched": "launched",
    "refused": "refused",
    "reclaimed": "taken back",
    "reclaims": "reclaims",
    "node_hours": "node hours",
    "empty_hours": "empty hours",
    "reclaims_per_node_hour": "reclaims/node h",
    "wait_hours": "wait, h",
    "weight": "weight",
    "first_at": "from",
    "last_at": "to",
    "stack": "stack",
    "learned_at": "learned",
}


@click.command()
@click.argument("stack", metavar="[STACK]", required=False)
@directory_option
@format_option
def learn(stack: str | None, directory: Path, output_format: str) -> None:
    """Learn how a stack's pools gave, refused and took back nodes, for the next recommend.

    A stack's controller counts the capacity events of every pool (one instance type in one zone) over all its runs.
    This command reads them from the stack's bucket (s3:GetObject on it, kms:Decrypt on its key) and keeps them beside
    the catalog. recommend then starts from the Spot Advisor's band, which weighs ten events, and counts the pool's own
    events on top: reclaims per node-hour, and the wait for capacity; after ten days an event weighs half. A plan's
    interruption.source names them with their dates. The stack's earlier events are replaced, other stacks' stay;
    whoever deletes the file drops them all.

    STACK is the only one of the folder by default.

    \b
    Example:
      gpufleet catalog learn dev
    """
    file = read_stack(stack, directory)
    names = resolve_names(file)
    place, state = f"s3://{names.bucket}/{names.control_prefix}/state.json", read_state(names)
    if state is None or not state.capacity:
        raise DataMissingError(
            f"{place} is missing" if state is None else f"{place} holds no capacity events",
            why="the controller writes them from its first launch or refusal on",
            next_step="learn once the stack has run; `pulumi up` brings an older stack's controller up to date",
        )
    path = learned_file()
    try:
        keep_events(place, file.stack, state.capacity, now=datetime.now(UTC))
    except ValueError as error:
        next_step = "use the version of gpufleet that the stack was deployed with"
        raise GpufleetError(f"{place}: {error}", next_step=next_step) from error
    except OSError as error:
        raise GpufleetError(f"{path} cannot be written: {error.strerror}", next_step="set XDG_CACHE_HOME") from error
    catalog = load()
    write_notes(catalog.notes)
    rows = pool_rows(catalog, [pool for pool in read_learned(path).pools() if pool.stack == file.stack])
    write_rows(rows, COLUMNS, output_format, spare=("learned_at", "stack", "first_at", "node_hours"))
    say(f"written to {path}; gpufleet recommend uses it until you delete it", err=True)
    if fixed := os.environ.get(DIRECTORY_VARIABLE):
        say(f"note: {DIRECTORY_VARIABLE} is set: commands read {fixed} without learned events", err=True)


def pool_rows(catalog: Catalog, pools: Sequence[LearnedPool]) -> list[dict[str, Any]]:
    """Rows of COLUMNS; the rates are what ``recommend`` takes for a spot pool."""
    now = datetime.now(UTC)
    offers = {(offer.instance.name, offer.region): offer for offer in catalog.offers}
    rows = []
    for pool in pools:
        events, offer = pool.events, offers.get((pool.name.instance_type, pool.name.region))
        hazard = pool_hazard(offer, pool.name.zone_id) if offer and pool.name.purchase == "spot" else None
        rows.append(
            {
                "pool": str(pool.name),
                **{name: getattr(events, name) for name in ("launched", "refused", "reclaimed", "reclaims")},
                "node_hours": round(events.node_hours, 2),
                "empty_hours": round(events.empty_hours, 2),
                "reclaims_per_node_hour": hazard and hazard.rate_per_node_hour,
                "wait_hours": hazard and hazard.wait_hours,
                "weight": round(event_weight(events, now), 3),
                "first_at": f"{events.first_at:%Y-%m-%d}",
                "last_at": f"{events.last_at:%Y-%m-%d}",
                "stack": pool.stack or pool.origin,
                "learned_at": f"{pool.learned_at:%Y-%m-%d}",
            }
        )
    return rows
