"""The catalog's three tables, and their JSON, with one row a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import date
from typing import Any, NamedTuple, Self

from optimizer.catalog.gpus import gpu_table
from optimizer.catalog.model import UNIT_ITEMS, Catalog, UnitPrice
from optimizer.contract.hardware import Gpu, HourlyPrice, InstanceType, InterruptionBand, Offer, Zones

OFFER_PRICES = ("on_demand", "reserved_1yr", "capacity_block", "spot")


class Tables(NamedTuple):
    """The facts of one catalog."""

    instance_types: list[InstanceType]
    offers: list[Offer]
    unit_prices: list[UnitPrice]

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        """Tables of a catalog, to change and write."""
        return cls(list(catalog.instance_types), list(catalog.offers), list(catalog.unit_prices))


def _parse_type(row: dict[str, Any]) -> InstanceType:
    gpu = gpu_table().get(row["gpu"])
    if gpu is None:
        raise ValueError(f"type {row['name']} has GPU {row['gpu']!r}, which is not in the GPU table")
    return InstanceType(**(_dated(row) | {"gpu": gpu, "card_interfaces": tuple(row["card_interfaces"])}))


def _parse_offer(row: dict[str, Any], types: Mapping[str, InstanceType]) -> Offer:
    facts = {name: fact for name, fact in row.items() if name != "instance_type"}
    for kind in OFFER_PRICES:
        if kind in row:
            facts[kind] = HourlyPrice(**_dated(row[kind]))
    if "zones" in row:
        facts["zones"] = Zones(**(_dated(row["zones"]) | {"ids": tuple(row["zones"]["ids"])}))
    if "interruptions" in row:
        facts["interruptions"] = InterruptionBand(**_dated(row["interruptions"]))
    if "dearer_spot" in row:
        facts["dearer_spot"] = tuple(HourlyPrice(**_dated(price)) for price in row["dearer_spot"])
    return Offer(instance=types[row["instance_type"]], **facts)


def _parse_unit_price(row: dict[str, Any]) -> UnitPrice:
    if row["item"] not in UNIT_ITEMS:
        raise ValueError(f"unit price of unknown item {row['item']!r}")
    return UnitPrice(**_dated(row))


def _dated(fact: dict[str, Any]) -> dict[str, Any]:
    return fact | {"as_of": date.fromisoformat(fact["as_of"])}


def parse_tables(document: dict[str, Any]) -> Tables:
    """Return the tables of a file; KeyError, TypeError or ValueError: other fields, an unknown GPU, type or unit price.

    After a change of rows, raise snapshot.FORMAT_VERSION and rebuild it.
    """
    instance_types = list(map(_parse_type, document["instance_types"]))
    types = {instance.name: instance for instance in instance_types}
    return Tables(
        instance_types=instance_types,
        offers=[_parse_offer(row, types) for row in document["offers"]],
        unit_prices=list(map(_parse_unit_price, document["unit_prices"])),
    )


def encode_tables(tables: Tables) -> str:
    """Return the tables as members of a JSON object, sorted by type and region, or by item and region."""
    members = []
    for name in Tables._fields:
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
    if isinstance(fact, Zones | InterruptionBand):
        return {name: _plain(value) for name, value in fact._asdict().items()}
    if isinstance(fact, Offer | InstanceType | UnitPrice | HourlyPrice):
        facts = {
            field.name: float(value) if field.type == "float" else _plain(value)
            for field in fields(fact)
            if field.name != "instance" and (value := getattr(fact, field.name)) != field.default
        }
        return {"instance_type": fact.instance.name, **facts} if isinstance(fact, Offer) else facts
    return [_plain(item) for item in fact] if isinstance(fact, tuple) else fact
