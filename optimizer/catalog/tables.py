"""The catalog's three tables: their rows, parquet columns and the conversion between the two.

Rows are named tuples: a dataclass takes ten times as long to define, and every command reads them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from optimizer.catalog.gpus import gpu_table
from optimizer.catalog.model import UNIT_ITEMS, UnitPrice
from optimizer.contract.hardware import HourlyPrice, InstanceType

if TYPE_CHECKING:
    import pyarrow as pa

OFFER_PRICES = ("on_demand", "reserved_1yr", "reserved_3yr", "capacity_block", "spot")


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
    reserved_3yr: HourlyPrice | None = None
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


class _Table(NamedTuple):
    """One parquet table: types by column ("!" allows no null), and a row from and to a dict of the columns."""

    columns: dict[str, str]
    parse: Callable[[dict[str, Any]], Any]
    flatten: Callable[[Any], dict[str, Any]]


def _parse_type(row: dict[str, Any]) -> InstanceType:
    gpu = gpu_table().get(row["gpu"])
    if gpu is None:
        raise ValueError(f"type {row['name']} has GPU {row['gpu']!r}, which is not in the GPU table")
    return InstanceType(**(row | {"gpu": gpu, "card_interfaces": tuple(row["card_interfaces"])}))


def _flatten_type(instance: InstanceType) -> dict[str, Any]:
    return {name: getattr(instance, name) for name in _TYPE_COLUMNS} | {"gpu": instance.gpu.key}


def _parse_offer(row: dict[str, Any]) -> OfferRow:
    def price(kind: str, zone_id: str | None = None) -> HourlyPrice | None:
        usd = row[f"{kind}_usd_per_hour"]
        if usd is None:
            return None
        return HourlyPrice(
            usd_per_hour=usd, source=row[f"{kind}_source"], as_of=row[f"{kind}_as_of"], zone_id=zone_id or ""
        )

    zone_ids, low = row["zone_ids"], row["interruption_low"]
    spot = price("spot", row["spot_zone_id"])
    dearer = zip(row["dearer_spot_zone_ids"].split(), row["dearer_spot_usd_per_hour"], strict=True) if spot else ()
    return OfferRow(
        instance_type=row["instance_type"],
        region=row["region"],
        zones=Zones(ids=tuple(zone_ids.split()), source=row["zone_ids_source"], as_of=row["zone_ids_as_of"])
        if zone_ids
        else None,
        on_demand=price("on_demand"),
        reserved_1yr=price("reserved_1yr"),
        reserved_3yr=price("reserved_3yr"),
        capacity_block=price("capacity_block"),
        spot=spot,
        dearer_spot=tuple(
            HourlyPrice(usd_per_hour=usd, source=row["spot_source"], as_of=row["spot_as_of"], zone_id=zone_id)
            for zone_id, usd in dearer
        ),
        interruptions=None
        if low is None
        else InterruptionBand(
            low=low,
            high=row["interruption_high"],
            source=row["interruption_source"],
            as_of=row["interruption_as_of"],
        ),
    )


def _flatten_offer(offer: OfferRow) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_OFFER_COLUMNS)
    row |= {"instance_type": offer.instance_type, "region": offer.region}
    if zones := offer.zones:
        row |= {"zone_ids": " ".join(zones.ids), "zone_ids_source": zones.source, "zone_ids_as_of": zones.as_of}
    for kind in OFFER_PRICES:
        price: HourlyPrice | None = getattr(offer, kind)
        if price:
            row |= {f"{kind}_usd_per_hour": price.usd_per_hour}
            row |= {f"{kind}_source": price.source, f"{kind}_as_of": price.as_of}
    row["spot_zone_id"] = (offer.spot.zone_id or None) if offer.spot else None
    row["dearer_spot_zone_ids"] = " ".join(price.zone_id for price in offer.dearer_spot)
    row["dearer_spot_usd_per_hour"] = [price.usd_per_hour for price in offer.dearer_spot]
    if band := offer.interruptions:
        row |= {"interruption_low": band.low, "interruption_high": band.high}
        row |= {"interruption_source": band.source, "interruption_as_of": band.as_of}
    return row


def _parse_unit_price(row: dict[str, Any]) -> UnitPrice:
    if row["item"] not in UNIT_ITEMS:
        raise ValueError(f"unit price of unknown item {row['item']!r}")
    return UnitPrice(**row)


# Parquet types of the fields of InstanceType and UnitPrice; names (of a GPU, a link, an item) are strings.
_PARQUET = {"float": "double!", "int": "int32!", "bool": "bool!", "date": "date32!", "tuple[int, ...]": "ints!"}
_TYPE_COLUMNS, _UNIT_COLUMNS = (
    {field.name: _PARQUET.get(str(field.type), "string!") for field in fields(record)}
    for record in (InstanceType, UnitPrice)
)
_OFFER_COLUMNS = {
    "instance_type": "string!",
    "region": "string!",
    "zone_ids": "string",
    "zone_ids_source": "string",
    "zone_ids_as_of": "date32",
    **{
        f"{kind}_{name}": parquet
        for kind in OFFER_PRICES
        for name, parquet in (("usd_per_hour", "double"), ("source", "string"), ("as_of", "date32"))
    },
    "spot_zone_id": "string",
    "dearer_spot_zone_ids": "string!",
    "dearer_spot_usd_per_hour": "doubles!",
    "interruption_low": "double",
    "interruption_high": "double",
    "interruption_source": "string",
    "interruption_as_of": "date32",
}
# By the name of Tables' field. After a change of columns, raise snapshot.FORMAT_VERSION and rebuild the snapshot.
TABLES: dict[str, _Table] = {
    "instance_types": _Table(_TYPE_COLUMNS, _parse_type, _flatten_type),
    "offers": _Table(_OFFER_COLUMNS, _parse_offer, _flatten_offer),
    "unit_prices": _Table(_UNIT_COLUMNS, _parse_unit_price, asdict),
}


def parse_table(name: str, data: bytes) -> list[Any]:
    """Rows of a parquet file; ValueError: not parquet, other columns, or an unknown GPU or unit price."""
    try:
        # Not pq.read_table: it imports pyarrow.dataset, and with it pandas, a quarter of a second. No threads: to start
        # Arrow's (https://arrow.apache.org/docs/cpp/threading.html) takes longer than to read a thousand rows.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except pa.ArrowException as error:
        raise ValueError(f"is not parquet: {error}") from error
    names = table.schema.names
    if not table.schema.remove_metadata().equals(_schema(name)):
        raise ValueError(f"has other columns than gpufleet {name} tables: {names}")
    columns = [column.to_pylist() for column in table.columns]
    parse = TABLES[name].parse
    return [parse(dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


def encode_table(name: str, tables: Tables) -> bytes:
    """Table ``name`` as a parquet file, sorted by its first two columns."""
    rows: list[Mapping[str, Any]] = [TABLES[name].flatten(row) for row in getattr(tables, name)]
    rows.sort(key=lambda row: [str(value) for value in list(row.values())[:2]])
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(name)), buffer, compression="zstd")
    return buffer.getvalue()


def _schema(name: str) -> pa.Schema:
    types = {
        "string": pa.string(),
        "double": pa.float64(),
        "int32": pa.int32(),
        "date32": pa.date32(),
        "bool": pa.bool_(),
    }
    types["ints"] = pa.list_(pa.field("element", pa.int32(), nullable=False))
    types["doubles"] = pa.list_(pa.field("element", pa.float64(), nullable=False))
    return pa.schema(
        [
            pa.field(column, types[kind.rstrip("!")], nullable=not kind.endswith("!"))
            for column, kind in TABLES[name].columns.items()
        ]
    )
