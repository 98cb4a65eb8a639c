"""Offers of other clouds: built from the tables, checked, summed up, and joined with AWS's catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from bootstrap.contract.words import counted
from optimizer.catalog import ttl
from optimizer.catalog.gpus import gpu_table
from optimizer.catalog.invariants import HAS_NETWORK, InvariantViolation, price_problems, type_problems
from optimizer.catalog.model import Catalog
from optimizer.clouds import tables
from optimizer.clouds.providers import CLOUDS
from optimizer.clouds.tables import PriceRow, RateRow, TypeRow
from optimizer.contract.errors import DataMissingError
from optimizer.contract.hardware import HourlyPrice, InstanceType, Offer

# A type whose page gives no bandwidth is listed, and not compared.
UNKNOWN_GBIT_PER_S = 0.0

NOT_PROVISIONED = "gpufleet provisions on AWS only: other clouds' rows are for comparing prices"


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudOffer:
    """One type of another cloud in one region, of the family ``series`` ("ND H100 v5").

    ``fabric`` between nodes is "infiniband" (RDMA, kernel bypass) or "ethernet"; the offer's network is
    UNKNOWN_GBIT_PER_S where no page states it. ``retired`` is the day the cloud stopped selling the type, ``origin``
    the price's source without the conversion to USD; ``note`` says why there is no price, or warns.
    """

    cloud: str
    series: str
    fabric: str
    offer: Offer
    retired: date | None
    origin: str
    note: str

    @property
    def rdma(self) -> bool:
        """True where nodes bypass the kernel, as with EFA."""
        return self.fabric == "infiniband"


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudOffers:
    """Offers of other clouds, sorted; ``notes`` say which prices were passed over."""

    offers: tuple[CloudOffer, ...]
    notes: tuple[str, ...] = ()


def load_offers(clouds: Collection[str] = tuple(CLOUDS)) -> CloudOffers:
    """Offers of ``clouds``, with refreshed prices where the user has them."""
    prices, notes = tables.read_newest_prices()
    return build_offers([row for row in prices if row.cloud in clouds], notes)


def build_offers(prices: Iterable[PriceRow], notes: Sequence[str] = ()) -> CloudOffers:
    """Join price rows with the facts of their types and the exchange rates.

    Raises:
        DataMissingError: a shipped table is missing or broken.
    """
    types = {row.instance_type: row for row in tables.read_types()}
    rates = {row.currency: row for row in tables.read_table(tables.SHIPPED / tables.RATES, RateRow)}
    offers = [offer for row in prices for offer in _build_row(types[row.instance_type], row, rates)]
    places = list(CLOUDS)
    offers.sort(key=lambda other: (places.index(other.cloud), other.offer.instance.name, other.offer.region))
    return CloudOffers(offers=tuple(offers), notes=tuple(notes))


def _build_row(facts: TypeRow, row: PriceRow, rates: dict[str, RateRow]) -> list[CloudOffer]:
    instance = _instance_type(facts)
    on_demand, spot = (_price(value, row, rates) for value in (row.on_demand_per_hour, row.spot_per_hour))
    retired = facts.retired and f"retired on {facts.retired.isoformat()}: the price list still names it, it is not sold"
    return [
        CloudOffer(
            cloud=facts.cloud,
            series=facts.series,
            fabric=facts.fabric,
            offer=Offer(
                instance=instance,
                region=region,
                zone_ids=(),
                on_demand=on_demand,
                spot=spot,
                interruption_band=None,
            ),
            retired=facts.retired,
            origin=row.source,
            note="; ".join(note for note in (retired, row.unpriced_because, facts.note) if note),
        )
        for region in row.regions.split()
    ]


def _instance_type(facts: TypeRow) -> InstanceType:
    gpu = gpu_table().get(facts.gpu)
    if gpu is None:
        raise DataMissingError(
            f"{facts.instance_type} has GPU {facts.gpu!r}, which catalog/data/gpus.csv does not have",
            limit=f"one of {', '.join(gpu_table())}",
            next_step="add the GPU's row, or mend clouds/data/types.csv",
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
        card_interfaces=(1,),
        efa_cards=0,
        gpudirect=False,
        interconnect=facts.interconnect,
        cpu_architecture="x86_64",
        source=facts.source,
        as_of=facts.as_of,
    )


def _price(value: float | None, row: PriceRow, rates: dict[str, RateRow]) -> HourlyPrice | None:
    if value is None:
        return None
    assert row.as_of is not None  # checked by PriceRow
    if row.currency == "USD":
        return HourlyPrice(usd_per_hour=value, source=row.source, as_of=row.as_of)
    rate = rates.get(row.currency)
    if rate is None:
        raise DataMissingError(
            f"{row.instance_type} is priced in {row.currency}, and clouds/data/exchange_rates.csv has no rate",
            why="a price in another currency cannot be compared",
            next_step="add the currency's rate, with its source and date",
        )
    return HourlyPrice(
        usd_per_hour=round(value / rate.per_usd, 4),
        source=f"{row.source}: {value:g} {row.currency} at {rate.per_usd:g} {row.currency}/USD ({rate.source})",
        as_of=row.as_of,
    )


def join_catalog(catalog: Catalog, clouds: CloudOffers, *, aws: bool) -> Catalog:
    """A catalog of other clouds' offers, after AWS's own where ``aws``."""
    others = [other.offer for other in clouds.offers]
    types = {offer.instance.name: offer.instance for offer in others}
    return replace(
        catalog,
        offers=(*(catalog.offers if aws else ()), *others),
        instance_types=(*(catalog.instance_types if aws else ()), *types.values()),
    )


def price_notes(clouds: CloudOffers, today: date | None = None) -> list[str]:
    """Sources of prices with their ages, and numbers of unpriced rows."""
    lines = list(clouds.notes)
    for cloud in CLOUDS.values():
        own = [other for other in clouds.offers if other.cloud == cloud.name]
        oldest: dict[str, date] = {}
        for other in own:
            if other.offer.on_demand is not None:
                origin, as_of = other.origin.split("; upper end of ")[0], other.offer.on_demand.as_of
                oldest[origin] = min(as_of, oldest.get(origin, as_of))
        lines += [
            f"{cloud.title} prices: {origin}, {as_of.isoformat()}, {counted(ttl.age_days(as_of, today), 'day')} old"
            for origin, as_of in oldest.items()
        ]
        unpriced = sum(other.offer.on_demand is None for other in own)
        if unpriced:
            lines.append(f"{unpriced} of {len(own)} {cloud.title} rows are unpriced; their note says why")
    return [*lines, NOT_PROVISIONED] if clouds.offers else lines


def summarize(clouds: CloudOffers) -> list[dict[str, Any]]:
    """Counts by cloud: types, priced and unpriced rows, dates of the oldest and newest price."""
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


def check(clouds: CloudOffers, *, today: date) -> list[InvariantViolation]:
    """Broken rules of other clouds' types and prices: AWS's rules, and that a type without a price says why."""
    places = [f"{other.cloud} {other.offer.instance.name} in {other.offer.region}" for other in clouds.offers]
    violations = [
        InvariantViolation("a type has one offer in a region", place, f"{count} offers")
        for place, count in Counter(places).items()
        if count > 1
    ]
    for place, other in zip(places, clouds.offers, strict=True):
        instance = other.offer.instance
        problems = [*type_problems(instance, today), *price_problems(other.offer, today)]
        if instance.network_gbit_per_s == UNKNOWN_GBIT_PER_S:
            problems = [problem for problem in problems if problem[0] != HAS_NETWORK]
        if other.offer.on_demand is None and not other.note:
            problems.append(("a type without a price says why", "no note"))
        violations += [InvariantViolation(rule, place, value) for rule, value in problems]
    return violations
