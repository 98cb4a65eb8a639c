"""Offers of other clouds: the tables in data/ joined to offers, summed up, and joined with AWS's catalog.

data/PROVENANCE.md tells where the rows come from; tests/data checks them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from bootstrap.contract.words import counted
from optimizer.catalog import ttl
from optimizer.catalog.gpus import gpu_table, read_table
from optimizer.catalog.model import Catalog
from optimizer.contract.hardware import HourlyPrice, InstanceType, Offer

DATA = Path(__file__).parent / "data"
# Titles of the clouds by name, in the order of lists.
CLOUDS = {"azure": "Azure", "tencent": "Tencent Cloud", "alibaba": "Alibaba Cloud"}

NOT_PROVISIONED = "gpufleet provisions on AWS only: other clouds' rows are for comparing prices"


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudOffer:
    """One type of another cloud in one region; the offer's network is 0 where no page states it.

    ``fabric`` between nodes is "infiniband" (RDMA, kernel bypass) or "ethernet"; ``note`` says why there is no
    price, or warns.
    """

    cloud: str
    fabric: str
    offer: Offer
    note: str


def load_offers(clouds: Collection[str] = tuple(CLOUDS)) -> tuple[CloudOffer, ...]:
    """Return the offers of ``clouds`` by cloud, type and region: a line of prices.csv is one in each of its regions."""
    types = {row["instance_type"]: row for row in read_table(DATA / "types.csv", dict)}
    rates = {row["currency"]: row for row in read_table(DATA / "exchange_rates.csv", dict)}
    offers = []
    for row in read_table(DATA / "prices.csv", dict):
        if row["cloud"] not in clouds:
            continue
        facts = types[row["instance_type"]]
        instance, price = _instance_type(facts), _price(row, rates)
        is_retired = f"retired on {facts['retired']}: the price list still names it, it is not sold"
        notes = (facts["retired"] and is_retired, row["unpriced_because"], facts["note"])
        for region in row["regions"].split():
            offers.append(
                CloudOffer(
                    cloud=row["cloud"],
                    fabric=facts["fabric"],
                    offer=Offer(instance=instance, region=region, on_demand=price),
                    note="; ".join(note for note in notes if note),
                )
            )
    places = list(CLOUDS)
    offers.sort(key=lambda other: (places.index(other.cloud), other.offer.instance.name, other.offer.region))
    return tuple(offers)


def _instance_type(facts: dict[str, str]) -> InstanceType:
    gpu = gpu_table()[facts["gpu"]]
    return InstanceType(
        name=facts["instance_type"],
        gpu=gpu,
        gpu_count=int(facts["gpu_count"]),
        gpu_memory_gib=gpu.memory_gib,
        vcpus=int(facts["vcpus"]),
        memory_gib=float(facts["memory_gib"]),
        nvme_gb=0,
        network_gbit_per_s=float(facts["network_gbit_per_s"] or 0),
        card_interfaces=(1,),
        efa_cards=0,
        gpudirect=False,
        interconnect=facts["interconnect"],  # type: ignore[arg-type]
        cpu_architecture="x86_64",
        source=facts["source"],
        as_of=date.fromisoformat(facts["as_of"]),
    )


def _price(row: dict[str, str], rates: dict[str, dict[str, str]]) -> HourlyPrice | None:
    if not row["on_demand_per_hour"]:
        return None
    value, currency, source = float(row["on_demand_per_hour"]), row["currency"], row["source"]
    if currency != "USD":
        per_usd = float(rates[currency]["per_usd"])
        source += f": {value:g} {currency} at {per_usd:g} {currency}/USD ({rates[currency]['source']})"
        value = round(value / per_usd, 4)
    return HourlyPrice(usd_per_hour=value, source=source, as_of=date.fromisoformat(row["as_of"]))


def join_catalog(catalog: Catalog, offers: Sequence[CloudOffer], *, aws: bool) -> Catalog:
    """Return a catalog of other clouds' offers, after AWS's own where ``aws``."""
    others = [other.offer for other in offers]
    types = {offer.instance.name: offer.instance for offer in others}
    return replace(
        catalog,
        offers=(*(catalog.offers if aws else ()), *others),
        instance_types=(*(catalog.instance_types if aws else ()), *types.values()),
    )


def price_notes(offers: Sequence[CloudOffer], today: date | None = None) -> list[str]:
    """Return the ages of prices, and the numbers of unpriced rows."""
    lines = []
    for cloud, title in CLOUDS.items():
        own = [other.offer.on_demand for other in offers if other.cloud == cloud]
        if dates := [price.as_of for price in own if price]:
            lines.append(f"{title} prices are up to {counted(ttl.age_days(min(dates), today), 'day')} old")
        if unpriced := own.count(None):
            lines.append(f"{unpriced} of {len(own)} {title} rows are unpriced; their note says why")
    return [*lines, NOT_PROVISIONED] if offers else lines
