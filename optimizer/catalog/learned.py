"""Capacity events that stacks saw themselves, laid over the catalog; `gpufleet catalog learn` writes their file."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from bootstrap.contract.capacity import PoolEvents, PoolName
from bootstrap.contract.codec import FormatError, from_json, parse_json
from optimizer.catalog.model import Catalog, Source
from optimizer.contract.errors import DataMissingError
from optimizer.contract.hardware import LearnedPool

# Beside the folder of the refreshed catalog.
FILE = "learned.json"
SOURCE = "capacity events"


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedStack:
    """Events of one stack's pools, by PoolName, as they stood at ``learned_at``."""

    stack: str  # empty: EC2 Capacity Manager
    learned_at: datetime
    pools: dict[str, PoolEvents]


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """The file: stacks by the place that their events were read from."""

    schema_version: Literal[1] = 1
    stacks: dict[str, LearnedStack] = field(default_factory=dict)

    def pools(self) -> list[LearnedPool]:
        """Pools of all stacks; ValueError for a key that names none."""
        return [
            LearnedPool(name=PoolName.parse(key), stack=learned.stack, learned_at=learned.learned_at, events=events)
            for learned in self.stacks.values()
            for key, events in learned.pools.items()
        ]


def read_learned(path: Path) -> Learned:
    """Read the file, empty where it is missing; DataMissingError where it cannot be used."""
    try:
        learned = from_json(Learned, parse_json(path.read_text(encoding="utf-8"), str(path)), str(path))
        learned.pools()
    except FileNotFoundError:
        return Learned()
    except (OSError, ValueError) as error:
        reason = str(error) if isinstance(error, FormatError) else f"{path}: {error}"
        raise DataMissingError(
            f"the learned capacity events cannot be used: {reason}",
            limit="the file that gpufleet catalog learn writes",
            next_step="delete the file; gpufleet catalog learn reads the events again",
        ) from error
    return learned


def lay_over(catalog: Catalog, path: Path) -> Catalog:
    """Give the catalog's offers the events of ``path``; a note where they cannot be used."""
    try:
        pools = read_learned(path).pools()
    except DataMissingError as error:
        return replace(catalog, notes=(*catalog.notes, f"{error.got}; {error.next_step}"))
    if not pools:
        return catalog
    # Capacity Manager counts again what stacks saw before it was read, and knows no waits.
    counted = {pool.name: pool.learned_at for pool in pools if not pool.stack}
    pools = [
        replace(pool, events=replace(pool.events, reclaims=0, hours=0.0))
        if pool.stack and pool.name in counted and pool.learned_at <= counted[pool.name]
        else pool
        for pool in pools
    ]
    spot: defaultdict[tuple[str, str], list[LearnedPool]] = defaultdict(list)
    for pool in pools:
        if pool.name.purchase == "spot":
            spot[pool.name.instance_type, pool.name.region].append(pool)
    offers = tuple(
        replace(offer, learned_spot=tuple(spot[place]))
        if (place := (offer.instance.name, offer.region)) in spot
        else offer
        for offer in catalog.offers
    )
    return replace(catalog, offers=offers, sources=(*catalog.sources, *_sources(pools)), learned=tuple(pools))


def _sources(pools: list[LearnedPool]) -> list[Source]:
    days: defaultdict[str, list[datetime]] = defaultdict(list)
    for pool in pools:
        days[pool.origin].append(pool.events.last_at)
    return [
        Source(name=SOURCE, origin=origin, as_of=min(seen).date(), newest=max(seen).date(), rows=len(seen))
        for origin, seen in days.items()
    ]
