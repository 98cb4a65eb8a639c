"""Refresh a cloud's prices from its public price API, type by type; a type that fails keeps its last good prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bootstrap.contract.words import counted
from optimizer.catalog.invariants import require_sound
from optimizer.catalog.refresh import Failure
from optimizer.catalog.sources import Skipped
from optimizer.clouds import offers, tables
from optimizer.clouds.cloud import Cloud, PricesUnreadableError, RegionPrice
from optimizer.clouds.tables import PriceRow
from optimizer.contract.errors import GpufleetError


@dataclass(frozen=True, kw_only=True)
class CloudRefresh:
    """The file written, regions priced by type, failures and unusable answers."""

    path: Path
    regions: dict[str, int]
    failures: tuple[Failure, ...]
    skipped: tuple[Skipped, ...]


def refresh_cloud(
    cloud: Cloud, endpoint: str | None = None, *, progress: Callable[[str], None] = lambda _: None
) -> CloudRefresh:
    """Read the prices of every known type of ``cloud`` and write them to the user's cache.

    A type without a usable price keeps its last good ones; so do the types not yet read when the API stops answering.
    GpufleetError, with nothing written, where no type could be read or the result would break an invariant.
    """
    api = cloud.price_api
    assert api is not None
    today = datetime.now(UTC).date()
    kept = [row for row in tables.read_newest_prices()[0] if row.cloud == cloud.name]
    regions: dict[str, int] = {}
    failures: list[Failure] = []
    skipped: list[Skipped] = []
    down = ""  # why the API is not asked again: each call would wait out all its retries
    for name in tables.type_names(cloud.name):
        prices: dict[str, RegionPrice] = {}
        reason = down or "the API answered with no usable price"
        if not down:
            try:
                prices, unusable = api.read(name, endpoint or api.endpoint)
                skipped += unusable
            except PricesUnreadableError as error:
                reason = down = str(error)
            progress(f"{name}: {'failed' if down else counted(len(prices), 'region')}")
        if not prices:
            failures.append(Failure(source=f"{cloud.title} prices of {name}", region="all regions", reason=reason))
            continue
        regions[name] = len(prices)
        kept = [row for row in kept if row.instance_type != name]
        kept += [
            PriceRow(
                cloud=cloud.name,
                instance_type=name,
                regions=region,
                on_demand_per_hour=price.on_demand,
                spot_per_hour=price.spot,
                currency="USD",
                source=api.name,
                as_of=today,
                unpriced_because="",
            )
            for region, price in prices.items()
        ]
    if not regions:
        raise GpufleetError(
            f"nothing could be read from {cloud.title}: {failures[0].reason}",
            limit="at least one type has a price",
            why="prices are replaced by better ones only",
            next_step="the last good prices stay in use; try again with a network that reaches the API",
        )
    violations = offers.check(offers.build_offers(kept), today=today)
    require_sound(violations, f"{cloud.title} price list", why="fleets are compared by it")
    path = tables.refreshed_file(cloud.name)
    tables.write_prices(path, kept)
    return CloudRefresh(path=path, regions=regions, failures=tuple(failures), skipped=tuple(skipped))
