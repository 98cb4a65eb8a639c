"""What nodes can be had: rented or owned, in which zones, and which of them can train together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from optimizer.catalog import Catalog
from optimizer.hardware import InstanceType
from optimizer.request import Constraints
from optimizer.search.purchases import Purchase, purchases


def ways_to_have(
    types: Sequence[InstanceType], regions: Sequence[str], limits: Constraints, catalog: Catalog
) -> Iterator[Purchase]:
    """Every way to have nodes of one type: rented on demand or on the spot market, or owned.

    A new one-year commitment is left out, as it costs its whole year whatever joins it; so is an on-demand base under
    spot nodes, which is a mix already, and a Capacity Block, which ends when it ends. A type without known zones is
    left out too: nobody knows what it can be near to.
    """
    names, places = {instance.name for instance in types}, set(regions)
    for offer in catalog.offers:
        if offer.instance.name in names and offer.region in places and offer.zone_ids:
            yield from (
                way
                for way in purchases(offer, limits)
                if not way.committed and not way.base and way.option != "capacity-block"
            )


def zones(way: Purchase) -> tuple[str, ...]:
    """Zones where nodes can be had this way, at this price."""
    return (way.price.zone_id,) if way.price.zone_id else way.offer.zone_ids


def group_name(way: Purchase) -> tuple[str, bool]:
    """Type, and whether it is owned: what tells one group of a mix from the other."""
    return way.offer.instance.name, way.reservation is not None


def pairs_of(ways: Sequence[Purchase], trains: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Pairs of ``ways`` (of those that can train at all) that make a mix, pair x 2.

    Both are in one zone: EFA does not leave it (https://docs.aws.amazon.com/parallelcluster/latest/ug/efa-v3.html), and
    gradients that do are billed by the GB (https://aws.amazon.com/ec2/pricing/on-demand/). Both have one processor
    architecture, as all nodes run one image. One type twice is not here: its GPUs are alike (``topup.py``).
    """
    regions = sorted({way.offer.region for way in ways})
    region = _numbered([way.offer.region for way in ways], regions)
    architecture = _numbered([way.offer.instance.cpu_architecture for way in ways])
    name = _numbered([way.offer.instance.name for way in ways])
    found = [np.empty((0, 2), dtype=np.intp)]
    for place in range(len(regions)):
        at = np.flatnonzero((region == place) & trains)
        # Zones as bits of a number: few of them are in one region.
        zone_ids = [zones(ways[i]) for i in at.tolist()]
        bit = {zone: 1 << n for n, zone in enumerate({zone for some in zone_ids for zone in some})}
        offered = np.array([sum(bit[zone] for zone in some) for some in zone_ids], dtype=np.int64)
        a, b = np.triu_indices(at.size, 1)
        shared = offered[a] & offered[b] != 0
        a, b = at[a[shared]], at[b[shared]]
        keep = (architecture[a] == architecture[b]) & (name[a] != name[b])
        found.append(np.stack([a[keep], b[keep]], axis=1))
    return np.concatenate(found)


def _numbered(names: Sequence[str], order: Sequence[str] = ()) -> NDArray[np.intp]:
    """Names as numbers, those of ``order`` first: numpy compares those sooner than text."""
    numbers = {name: at for at, name in enumerate(dict.fromkeys((*order, *names)))}
    return np.array([numbers[name] for name in names], dtype=np.intp)
