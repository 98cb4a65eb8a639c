"""Catalog: the facts and prices that gpufleet plans with, and the look-ups in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from functools import cached_property
from typing import Any, Literal

from optimizer.catalog.gpus import why_left_out
from optimizer.contract.errors import DataMissingError, InvalidInputError
from optimizer.contract.hardware import Gpu, InstanceType, LearnedPool, Offer, is_named
from optimizer.contract.spelling import near_names

# One unit of each item. EBS, S3 and FSx bill 2^30 bytes as one "GB" (https://aws.amazon.com/ebs/pricing/).
UNIT_PER = {
    "gp3-storage": "GiB-month",
    "gp3-iops": "IOPS-month above 3000",
    "gp3-throughput": "MiB/s-month above 125",
    "s3-standard-storage": "GiB-month",
    # FSx for Lustre on SSDs, PERSISTENT_2, with 125 MB/s of throughput a TiB.
    "lustre-storage": "GiB-month",
    "vpc-endpoint": "endpoint-zone-hour",
    "vpc-endpoint-data": "GB",
    "kms-key": "key-month",
    "kms-request": "request",
    "s3-write-request": "request",
    "s3-read-request": "request",
    "nat-gateway": "gateway-hour",
    "nat-gateway-data": "GB",
    "public-ipv4": "address-hour",
    "log-ingestion": "GB",
    "custom-metric": "metric-month",
    "metric-request": "request",
    "alarm": "alarm-month",
    "lambda-request": "request",
    "lambda-compute": "GiB-second on arm64",
    "sqs-request": "request",
}
UNIT_ITEMS = tuple(UNIT_PER)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPrice:
    """USD for one unit of ``item``; region "*" is a price that AWS publishes as the same everywhere."""

    item: str
    region: str
    usd: float
    source: str
    as_of: date

    @property
    def per(self) -> str:
        """The unit."""
        return UNIT_PER[self.item]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Origin of a kind of facts, with the number of facts (``rows``) and the oldest and newest date."""

    name: str
    origin: str
    as_of: date
    newest: date
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """The source as in JSON answers."""
        return asdict(self) | {"as_of": self.as_of.isoformat(), "newest": self.newest.isoformat()}


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All offers with the facts behind them, sorted.

    ``as_of`` is the date of the oldest on-demand price, ``origin`` the snapshot's directory or "shipped"; ``notes`` say
    why another snapshot was passed over. ``learned`` are the pools whose events the user's stacks saw.
    """

    offers: tuple[Offer, ...]
    instance_types: tuple[InstanceType, ...]
    gpus: tuple[Gpu, ...]
    unit_prices: tuple[UnitPrice, ...]
    sources: tuple[Source, ...]
    made_at: datetime
    as_of: date
    origin: str = "shipped"
    notes: tuple[str, ...] = ()
    learned: tuple[LearnedPool, ...] = ()

    @cached_property
    def _types(self) -> dict[str, InstanceType]:
        return {instance.name: instance for instance in self.instance_types}

    @cached_property
    def _offers(self) -> dict[tuple[str, str], Offer]:
        return {(offer.instance.name, offer.region): offer for offer in self.offers}

    @cached_property
    def _unit_prices(self) -> dict[tuple[str, str], UnitPrice]:
        return {(price.item, price.region): price for price in self.unit_prices}

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Regions with an offer, sorted."""
        return tuple(sorted({offer.region for offer in self.offers}))

    def instance_type(self, name: str) -> InstanceType:
        """Facts of one type; InvalidInputError where it is unknown."""
        if name not in self._types:
            raise unknown("instance type", name, self._types)
        return self._types[name]

    def gpu_keys(self, names: Sequence[str]) -> set[str] | None:
        """Keys of the GPUs of these models or keys, None without names; InvalidInputError for an unknown one."""

        def plain(name: str) -> str:
            # "RTX PRO 6000", "rtx-pro-6000" and "RTXPRO6000" are the same GPU.
            return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))

        used = {instance.gpu.key: instance.gpu for instance in self.instance_types}
        chosen: set[str] = set()
        for name in names:
            keys = {key for key, gpu in used.items() if plain(name) in (plain(gpu.name), plain(key))}
            if not keys:
                raise unknown("GPU", name, sorted({gpu.name for gpu in used.values()}))
            chosen |= keys
        return chosen if names else None

    def match(self, kind: Literal["instance type", "region"], patterns: Sequence[str]) -> list[str]:
        """Names that match a pattern, all without patterns; InvalidInputError for a pattern that matches none."""
        names = self.regions if kind == "region" else tuple(self._types)
        for pattern in patterns:
            if not any(is_named(name, pattern) for name in names):
                raise unknown(kind, pattern, names)
        return [name for name in names if not patterns or any(is_named(name, pattern) for pattern in patterns)]

    def check_region(self, region: str) -> str:
        """Return ``region`` if it has an offer; InvalidInputError otherwise."""
        if region not in self.regions:
            raise unknown("region", region, self.regions)
        return region

    def offer(self, instance_type: str, region: str) -> Offer | None:
        """Offer of a type in a region, None where not offered; InvalidInputError for an unknown type or region."""
        self.instance_type(instance_type)
        self.check_region(region)
        return self._offers.get((instance_type, region))

    def unit_price(self, item: str, region: str) -> UnitPrice:
        """Price of one unit of ``item`` in ``region``; DataMissingError where no region has a figure.

        Without a figure for the region, the highest of any region, with a source that says so: a cost may be
        over-stated, never silently under-stated.
        """
        prices = self._unit_prices
        if (item, region) not in prices:
            prices[item, region] = self._price_elsewhere(item, region)  # kept: every plan of a region asks for it
        return prices[item, region]

    def _price_elsewhere(self, item: str, region: str) -> UnitPrice:
        if everywhere := self._unit_prices.get((item, "*")):
            return replace(everywhere, region=region)
        known = [price for price in self.unit_prices if price.item == item]
        if not known:
            raise DataMissingError(
                f"the catalog ({self.origin}) has no price of {item}",
                limit="one figure for at least one region",
                why="a cost without it would be a guess",
                next_step=f"gpufleet catalog refresh --region {region}",
            )
        highest = max(known, key=lambda price: price.usd)
        bound = f"upper bound: highest of {len(known)} known regions ({highest.region}), no figure for {region}"
        return replace(highest, region=region, source=f"{bound}; {highest.source}")

    def describe(self) -> dict[str, Any]:
        """The ``catalog`` field of JSON answers."""
        return {
            "as_of": self.as_of.isoformat(),
            "made_at": self.made_at.isoformat(),
            "sources": [source.to_dict() for source in self.sources],
        }


def families(types: Collection[str]) -> str:
    """List the families of instance types."""
    return ", ".join(sorted({name.partition(".")[0] for name in types}))


def unknown(kind: str, value: str, known: Collection[str]) -> InvalidInputError:
    """Error for an unknown name, with the nearest known ones, or why the catalog leaves it out."""
    if kind == "instance type" and (why := why_left_out(value)):
        return InvalidInputError(
            f"{kind} {value!r} is not in the catalog",
            limit=f"a family of {families(known)}",
            why=why,
            next_step="choose another type: docs/instance-types.md has what works on which",
        )
    near = [name for name in sorted(known) if name.startswith(f"{value}.")][:3] or near_names(value, known)
    hint = f"did you mean {', '.join(near)}?" if near else f"gpufleet offers lists every {kind}"
    limit = f"one of {', '.join(sorted(known))}"
    if kind == "instance type":
        limit = f"a type of one of the families {families(known)}"
        hint += "" if near else ", with --gpu H100 those of a GPU model"
    return InvalidInputError(f"{kind} {value!r} is not in the catalog", limit=limit, next_step=hint)
