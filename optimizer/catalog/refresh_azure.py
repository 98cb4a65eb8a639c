"""Bring Azure's prices up to date from its public price API, type by type, losing nothing that was good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from optimizer.catalog import clouds, invariants
from optimizer.catalog.clouds import PriceRow
from optimizer.catalog.refresh import Failure
from optimizer.catalog.sources import Skipped, azure_retail
from optimizer.catalog.sources.azure_retail import PricesUnreadableError, RegionPrice
from optimizer.errors import GpufleetError


@dataclass(frozen=True, kw_only=True)
class AzureRefresh:
    """What a refresh did: the file written, regions priced by type, and what failed or was not usable."""

    path: Path
    regions: dict[str, int]
    failures: tuple[Failure, ...]
    skipped: tuple[Skipped, ...]


def refresh_azure(
    endpoint: str = azure_retail.ENDPOINT, *, progress: Callable[[str], None] = lambda _: None
) -> AzureRefresh:
    """Read the prices of every Azure type gpufleet knows, and keep them for the commands that follow.

    A type the API has no usable price of keeps its last good ones. When the API stops answering, the types not yet
    read keep theirs.

    Args:
        endpoint: the API's address.
        progress: called with a line when a type is done.

    Raises:
        GpufleetError: no type could be read, or the result would break an invariant; nothing is written then.
        DataMissingError: the prices to start from cannot be read.
    """
    now = datetime.now(UTC)
    rows, _ = clouds.newest_prices()
    kept = [row for row in rows if row.cloud == "azure"]
    regions: dict[str, int] = {}
    failures: list[Failure] = []
    skipped: list[Skipped] = []
    down = ""
    for name in clouds.types_of("azure"):
        found: dict[str, RegionPrice] = {}
        reason = down
        if not down:  # a next type would wait out all its retries again
            try:
                found, unusable = azure_retail.parse(azure_retail.fetch(name, endpoint), name, now)
                skipped += unusable
                reason = "the API answered with no usable price"
            except PricesUnreadableError as error:
                reason = down = str(error)
            progress(f"{name}: {'failed' if down else f'{len(found)} regions'}")
        if not found:
            failures.append(Failure(source=f"{azure_retail.NAME} of {name}", region="all regions", reason=reason))
        else:
            regions[name] = len(found)
            kept = [row for row in kept if row.instance_type != name]
            kept += [_row(name, region, price, now) for region, price in found.items()]
    if not regions:
        raise GpufleetError(
            "nothing could be read from Azure: " + failures[0].reason,
            limit="at least one type has a price",
            why="prices are replaced by better ones only",
            next_step="the last good prices stay in use; try again with a network that reaches the API",
        )
    path = clouds.cache() / "azure.csv"
    violations = invariants.check_clouds(clouds.offers_of(kept), today=now.date())
    if violations:
        raise GpufleetError(
            f"the refreshed prices break {len(violations)} rules, and are not kept:\n  "
            + "\n  ".join(str(violation) for violation in violations[:20]),
            why="fleets are compared by them",
            next_step="the last good prices stay in use; report the lines above",
        )
    clouds.write_prices(path, kept)
    return AzureRefresh(path=path, regions=regions, failures=tuple(failures), skipped=tuple(skipped))


def _row(name: str, region: str, price: RegionPrice, now: datetime) -> PriceRow:
    return PriceRow(
        cloud="azure",
        instance_type=name,
        regions=region,
        on_demand_per_hour=price.on_demand,
        spot_per_hour=price.spot,
        currency="USD",
        source=azure_retail.ORIGIN,
        as_of=now.date(),
        unpriced_because="",
    )
