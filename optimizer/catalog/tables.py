"""The catalog's three tables: their rows, and their JSON, with one row a line.

Rows are named tuples: a dataclass takes ten times as long to define, and every command reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import date
from typing import Any, NamedTuple

from optimizer.catalog.gpus import gpu_table
from optimizer.catalog.model import UNIT_ITEMS, UnitPrice
from optimizer.contract.hardware import Gpu, HourlyPrice, InstanceType

OFFER_PRICES = ("on_demand", "reserved_1yr", "capacity_block", "spot")


class Zones(NamedTuple):
    """Ids of the zones that offer a type ("use1-az6"), sorted."""

    ids: tuple[str, ...]
    source: str
    as_of: date


class InterruptionBand(NamedTuple):
    """Share of instances interrupted in a month, between ``low`` and ``high``; None for the open band ">20%"."""

    low: float
    high: float | None
    source: str
    as_of: date


class OfferRow(NamedTuple):
    """An offer with the source and date of each fact; a fact nobody published is None."""

    instance_type: str
    region: str
    zones: Zones | None = None
    on_demand: HourlyPrice | None = None
    reserved_1yr: HourlyPrice | None = None
    capacity_block: HourlyPrice | None = None
    spot: HourlyPrice | None = None
    dearer_spot: tuple[HourlyPrice, ...] = ()
    interruptions: InterruptionBand | None = None

    def with_spot(self, prices: Iterable[HourlyPrice]) -> OfferRow:
        """Return the row with these spot prices, at most one a zone, all of one source and day."""
        first, *others = sorted(prices, key=lambda price: (price.usd_per_hour, price.zone_id)) or (None,)
        return self._replace(spot=first, dearer_spot=tuple(others))


class Tables(NamedTuple):
    """The facts of one catalog."""

    instance_types: list[InstanceType]
    offers: list[OfferRow]
    unit_prices: list[UnitPrice]


def _parse_type(row: dict[str, Any]) -> InstanceType:
    gpu = gpu_table().get(row["gpu"])
    if gpu is None:
        raise ValueError(f"type {row['name']} has GPU {row['gpu']!r}, which is not in the GPU table")
    return InstanceType(**(_dated(row) | {"gpu": gpu, "card_interfaces": tuple(row["card_interfaces"])}))


def _parse_offer(row: dict[str, Any]) -> OfferRow:
    facts = dict(row)
    for kind in OFFER_PRICES:
        if kind in row:
            facts[kind] = HourlyPrice(**_dated(row[kind]))
    if "zones" in row:
        facts["zones"] = Zones(**(_dated(row["zones"]) | {"ids": tuple(row["zones"]["ids"])}))
    if "interruptions" in row:
        facts["interruptions"] = InterruptionBand(**_dated(row["interruptions"]))
    if "dearer_spot" in row:
        facts["dearer_spot"] = tuple(HourlyPrice(**_dated(price)) for price in row["dearer_spot"])
    return OfferRow(**facts)


def _parse_unit_price(row: dict[str, Any]) -> UnitPrice:
    if row["item"] not in UNIT_ITEMS:
        raise ValueError(f"unit price of unknown item {row['item']!r}")
    return UnitPrice(**_dated(row))


def _dated(fact: dict[str, Any]) -> dict[str, Any]:
    return fact | {"as_of": date.fromisoformat(fact["as_of"])}


# Parsers of rows by the name of Tables' field. After a change of rows, raise snapshot.FORMAT_VERSION and rebuild it.
TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "instance_types": _parse_type,
    "offers": _parse_offer,
    "unit_prices": _parse_unit_price,
}


def parse_tables(document: dict[str, Any]) -> Tables:
    """Return the tables of a file; KeyError, TypeError or ValueError: other fields, an unknown GPU or unit price."""
    return Tables(**{name: list(map(parse, document[name])) for name, parse in TABLES.items()})


def encode_tables(tables: Tables) -> str:
    """Return the tables as members of a JSON object, sorted by type and region, or by item and region."""
    members = []
    for name in TABLES:
        rows = sorted(
            map(_plain, getattr(tables, name)), key=lambda row: [str(value) for value in list(row.values())[:2]]
        )
        lines = ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
        members.append(f'"{name}": [\n{lines}\n]')
    return ",\n".join(members)


def _plain(fact: Any) -> Any:
    """Return a fact as JSON has it; fields that have their default are left out."""
    if isinstance(fact, Gpu):
        return fact.key
    if isinstance(fact, date):
        return fact.isoformat()
    if isinstance(fact, OfferRow | Zones | InterruptionBand):
        values = ((name, value, fact._field_defaults.get(name, ...)) for name, value in fact._asdict().items())
        return {name: _plain(value) for name, value, default in values if value != default}
    if isinstance(fact, InstanceType | UnitPrice | HourlyPrice):
        return {
            field.name: float(value) if field.type == "float" else _plain(value)
            for field in fields(fact)
            if (value := getattr(fact, field.name)) != field.default
        }
    return [_plain(item) for item in fact] if isinstance(fact, tuple) else fact
