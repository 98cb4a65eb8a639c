"""Other clouds as priced alternatives: Azure, Tencent Cloud and Alibaba Cloud GPU types, read only when asked for.

gpufleet provisions on AWS; these rows are for comparing prices. They ship as small tables (data/other_clouds/), told of
in data/PROVENANCE.md; ``gpufleet catalog refresh --cloud azure`` puts Azure's current prices into the user's cache.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from optimizer.aws import ttl
from optimizer.catalog.gpus import DATA, gpu_table
from optimizer.catalog.model import CLOUD_TITLES, CLOUDS, Catalog, CloudName
from optimizer.catalog.snapshot import user_directory
from optimizer.errors import DataMissingError
from optimizer.hardware import InstanceType, Interconnect, Offer, Price

SHIPPED = DATA / "other_clouds"
PRICES = "prices.csv"

# Not one of InstanceType's figures: a page that gives no bandwidth is no reason to leave the type out of a price list.
UNKNOWN_GBIT_PER_S = 0.0

NOT_PROVISIONED = "gpufleet provisions on AWS only: other clouds' rows are for comparing prices"


def _empty_is_none(value: Any) -> Any:
    return None if value == "" else value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MaybePositive = Annotated[Positive | None, BeforeValidator(_empty_is_none)]
MaybeDate = Annotated[date | None, BeforeValidator(_empty_is_none)]
Text = Annotated[str, Field(min_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _TypeRow(_Row):
    cloud: CloudName
    instance_type: Text
    series: Text
    gpu: Text
    gpu_count: Annotated[int, Field(ge=1)]
    vcpus: Annotated[int, Field(ge=1)]
    memory_gib: Positive
    network_gbit_per_s: MaybePositive
    fabric: Literal["ethernet", "infiniband"]
    interconnect: Interconnect
    retired: MaybeDate
    source: Text
    as_of: date
    note: str


class PriceRow(_Row):
    """A line of prices.csv: one price in ``regions`` (names between blanks), or why there is none."""

    cloud: CloudName
    instance_type: Text
    regions: Text
    on_demand_per_hour: MaybePositive
    spot_per_hour: MaybePositive
    currency: str
    source: str
    as_of: MaybeDate
    unpriced_because: str

    @model_validator(mode="after")
    def _priced_or_not(self) -> PriceRow:
        priced = self.on_demand_per_hour is not None
        if priced and not (self.currency and self.source and self.as_of):
            raise ValueError("a price has a currency, a source and a date")
        if not priced and (self.spot_per_hour is not None or not self.unpriced_because):
            raise ValueError("a type without an on-demand price says why")
        return self


class _RateRow(_Row):
    currency: Text
    per_usd: Positive
    source: Text
    as_of: date


R = TypeVar("R", bound=_Row)


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudOffer:
    """One type of another cloud in one region.

    Attributes:
        cloud: whose it is.
        series: the cloud's name of the family ("ND H100 v5").
        fabric: how nodes are joined: "infiniband" (RDMA, kernel bypass) or "ethernet".
        offer: facts and prices; a network of UNKNOWN_GBIT_PER_S is one no page states.
        retired: the day the cloud stopped selling the type; None while it is sold.
        origin: where the price was read, without the conversion to USD; empty where there is none.
        note: why there is no price, or what to know of it; empty where there is nothing to say.
    """

    cloud: CloudName
    series: str
    fabric: str
    offer: Offer
    retired: date | None
    origin: str
    note: str

    @property
    def rdma(self) -> bool:
        """Whether nodes talk past the kernel, as with EFA."""
        return self.fabric == "infiniband"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clouds:
    """Offers of other clouds, by cloud, type and region; ``notes`` is what a user should know of their choice."""

    offers: tuple[CloudOffer, ...]
    notes: tuple[str, ...] = ()


def with_clouds(catalog: Catalog, clouds: Clouds, *, aws: bool) -> Catalog:
    """A catalog whose offers are other clouds', after AWS's own where ``aws``: one to choose and sort offers of."""
    others = [other.offer for other in clouds.offers]
    types = {offer.instance.name: offer.instance for offer in others}
    return replace(
        catalog,
        offers=(*(catalog.offers if aws else ()), *others),
        instance_types=(*(catalog.instance_types if aws else ()), *types.values()),
    )


def price_notes(clouds: Clouds, today: date | None = None) -> list[str]:
    """What a user should know of the prices: where each cloud's come from, how old they are, how many are missing."""
    lines = list(clouds.notes)
    for cloud in CLOUDS:
        own = [other for other in clouds.offers if other.cloud == cloud]
        dates: dict[str, date] = {}
        for other in own:
            if other.offer.on_demand is not None:
                origin, as_of = other.origin.split("; upper end of ")[0], other.offer.on_demand.as_of
                dates[origin] = min(as_of, dates.get(origin, as_of))
        missing = sum(other.offer.on_demand is None for other in own)
        lines += [
            f"{CLOUD_TITLES[cloud]} prices: {origin}, {as_of.isoformat()}, {ttl.age_days(as_of, today)} days old"
            for origin, as_of in dates.items()
        ]
        if missing:
            lines.append(f"{missing} of {len(own)} {CLOUD_TITLES[cloud]} rows are unpriced; their note says why")
    return [*lines, NOT_PROVISIONED] if clouds.offers else lines


def summary(clouds: Clouds) -> list[dict[str, Any]]:
    """Counts and dates by cloud: types, priced and unpriced rows, dates of the oldest and newest price."""
    lines = []
    for cloud in CLOUDS:
        own = [other.offer for other in clouds.offers if other.cloud == cloud]
        dates = [offer.on_demand.as_of for offer in own if offer.on_demand is not None]
        lines.append(
            {
                "cloud": cloud,
                "types": len({offer.instance.name for offer in own}),
                "priced": len(dates),
                "unpriced": len(own) - len(dates),
                "as_of": min(dates, default=None),
                "newest": max(dates, default=None),
            }
        )
    return lines


def cache() -> Path:
    """Where ``catalog refresh --cloud`` keeps prices: XDG_CACHE_HOME/gpufleet/other_clouds."""
    return user_directory().parent / "other_clouds"


def load_clouds(names: Sequence[CloudName] = CLOUDS) -> Clouds:
    """Types and prices of ``names``; refreshed prices where the user has them, else the shipped ones.

    Raises:
        DataMissingError: a shipped table is missing or broken.
    """
    prices, notes = newest_prices()
    return offers_of([row for row in prices if row.cloud in names], notes)


def offers_of(prices: Iterable[PriceRow], notes: Sequence[str] = ()) -> Clouds:
    """The offers that price rows make together with the shipped facts of their types.

    Raises:
        DataMissingError: a shipped table is missing or broken.
    """
    types = {row.instance_type: row for row in _read(SHIPPED / "types.csv", _TypeRow)}
    rates = {row.currency: row for row in _read(SHIPPED / "exchange_rates.csv", _RateRow)}
    offers = [offer for row in prices for offer in _offers(types[row.instance_type], row, rates)]
    offers.sort(key=lambda found: (CLOUDS.index(found.cloud), found.offer.instance.name, found.offer.region))
    return Clouds(offers=tuple(offers), notes=tuple(notes))


def newest_prices() -> tuple[list[PriceRow], list[str]]:
    """Price rows of all clouds: a cloud's refreshed file unless it is broken or older than the shipped rows; and notes.

    Raises:
        DataMissingError: the shipped table is missing or broken.
    """
    rows = list(_read(SHIPPED / PRICES, PriceRow))
    known = {row.instance_type for row in _read(SHIPPED / "types.csv", _TypeRow)}
    notes = []
    for cloud in CLOUDS:
        path = cache() / f"{cloud}.csv"
        if not path.exists():
            continue
        try:
            fresh = [row for row in _read(path, PriceRow) if row.cloud == cloud and row.instance_type in known]
        except DataMissingError as error:
            notes.append(f"{error.got}; the shipped {CLOUD_TITLES[cloud]} prices are used")
            continue
        if _newest(fresh) >= _newest([row for row in rows if row.cloud == cloud]):
            rows = [row for row in rows if row.cloud != cloud] + fresh
    return rows, notes


def _newest(rows: Iterable[PriceRow]) -> date:
    return max((row.as_of for row in rows if row.as_of is not None), default=date.min)


def write_prices(path: Path, rows: Iterable[PriceRow]) -> None:
    """Write price rows as CSV, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(PriceRow.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump(mode="json") for row in rows)
    partial.replace(path)


def types_of(cloud: CloudName) -> tuple[str, ...]:
    """Names of the types known of a cloud."""
    return tuple(row.instance_type for row in _read(SHIPPED / "types.csv", _TypeRow) if row.cloud == cloud)


def _offers(facts: _TypeRow, row: PriceRow, rates: dict[str, _RateRow]) -> list[CloudOffer]:
    instance = _instance(facts)
    on_demand, spot = (_price(value, row, rates) for value in (row.on_demand_per_hour, row.spot_per_hour))
    notes = [row.unpriced_because, facts.note]
    if facts.retired:
        notes.insert(0, f"retired on {facts.retired.isoformat()}: the price list still names it, it is not sold")
    base = CloudOffer(
        cloud=facts.cloud,
        series=facts.series,
        fabric=facts.fabric,
        offer=Offer(
            instance=instance,
            region="",
            zone_ids=(),
            on_demand=on_demand,
            reserved_1yr=None,
            spot=spot,
            interruption_band=None,
        ),
        retired=facts.retired,
        origin=row.source,
        note="; ".join(note for note in notes if note),
    )
    return [replace(base, offer=replace(base.offer, region=region)) for region in row.regions.split()]


def _instance(facts: _TypeRow) -> InstanceType:
    gpu = gpu_table().get(facts.gpu)
    if gpu is None:
        raise DataMissingError(
            f"{facts.instance_type} has GPU {facts.gpu!r}, which data/gpus.csv does not have",
            limit=f"one of {', '.join(gpu_table())}",
            next_step="add the GPU's row, or mend data/other_clouds/types.csv",
        )
    return InstanceType(
        name=facts.instance_type,
        gpu=gpu,
        gpu_count=facts.gpu_count,
        gpu_memory_gib=gpu.memory_gib,
        vcpus=facts.vcpus,
        memory_gib=facts.memory_gib,
        nvme_gb=0,
        network_gbit_per_s=facts.network_gbit_per_s or UNKNOWN_GBIT_PER_S,
        network_cards=1,
        efa_cards=0,
        interconnect=facts.interconnect,
        cpu_architecture="x86_64",
        source=facts.source,
        as_of=facts.as_of,
    )


def _price(value: float | None, row: PriceRow, rates: dict[str, _RateRow]) -> Price | None:
    if value is None:
        return None
    assert row.as_of is not None  # checked by PriceRow
    if row.currency == "USD":
        return Price(usd_per_hour=value, source=row.source, as_of=row.as_of)
    rate = rates.get(row.currency)
    if rate is None:
        raise DataMissingError(
            f"{row.instance_type} is priced in {row.currency}, and data/other_clouds/exchange_rates.csv has no rate",
            why="a price in another currency cannot be compared",
            next_step="add the currency's rate, with its source and date",
        )
    return Price(
        usd_per_hour=round(value / rate.per_usd, 4),
        source=f"{row.source}: {value:g} {row.currency} at {rate.per_usd:g} {row.currency}/USD ({rate.source})",
        as_of=row.as_of,
    )


def _read(path: Path, kind: type[R]) -> list[R]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            return [kind.model_validate(row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error, ValidationError) as error:
        raise DataMissingError(
            f"{path} cannot be used: {error}",
            limit="one line a type or price, every column of the header there",
            next_step=f"rm {path}" if path.parent == cache() else "pip install --force-reinstall gpufleet",
        ) from error
