"""Catalog snapshots on disk: three parquet tables and a manifest that names them with their checksums.

A snapshot is written under names that hold the tables' checksums and takes effect with the manifest, which is
replaced last and at once: a reader sees the old snapshot or the new one, never half of each.

Which snapshot ``load()`` reads, first match:
    1. the directory given to it, or in the environment variable GPUFLEET_CATALOG;
    2. the user's, written by ``gpufleet catalog refresh``, if it can be read and was made after the shipped one;
    3. the shipped one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from optimizer.catalog.gpus import DATA, gpu_table
from optimizer.catalog.model import UNIT_ITEMS, UNIT_PER, Catalog, Source, UnitItem, UnitPrice
from optimizer.errors import DataMissingError
from optimizer.hardware import CpuArchitecture, HourlyPrice, InstanceType, Interconnect, Offer

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SHIPPED = DATA / "snapshot"
DIRECTORY_VARIABLE = "GPUFLEET_CATALOG"

# Column names and types of each table; a row is a dict with exactly these keys.
TABLES: dict[str, dict[str, str]] = {
    "instance_types": {
        "name": "string!",
        "gpu": "string!",
        "gpu_count": "double!",
        "gpu_memory_gib": "double!",
        "vcpus": "int32!",
        "memory_gib": "double!",
        "nvme_gb": "double!",
        "network_gbit_per_s": "double!",
        "network_cards": "int32!",
        "efa_cards": "int32!",
        "interconnect": "string!",
        "cpu_architecture": "string!",
        "source": "string!",
        "as_of": "date32!",
    },
    "offers": {
        "instance_type": "string!",
        "region": "string!",
        "zone_ids": "string",
        "zone_ids_source": "string",
        "zone_ids_as_of": "date32",
        "on_demand_usd_per_hour": "double",
        "on_demand_source": "string",
        "on_demand_as_of": "date32",
        "reserved_1yr_usd_per_hour": "double",
        "reserved_1yr_source": "string",
        "reserved_1yr_as_of": "date32",
        "spot_usd_per_hour": "double",
        "spot_source": "string",
        "spot_as_of": "date32",
        "spot_zone_id": "string",
        "interruption_low": "double",
        "interruption_high": "double",
        "interruption_source": "string",
        "interruption_as_of": "date32",
    },
    "unit_prices": {
        "item": "string!",
        "region": "string!",
        "usd": "double!",
        "source": "string!",
        "as_of": "date32!",
    },
}
Rows = dict[str, list[dict[str, Any]]]


def user_directory() -> Path:
    """Where ``refresh`` writes: XDG_CACHE_HOME/gpufleet/catalog (https://specifications.freedesktop.org/basedir/)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "gpufleet" / "catalog"


@dataclass(frozen=True, kw_only=True)
class Current:
    """The snapshot in use: its rows, when it was made, where it lies, and what a user should know about the choice."""

    rows: Rows
    made_at: datetime
    origin: str
    notes: tuple[str, ...] = ()


def load(path: Path | None = None) -> Catalog:
    """Read a catalog snapshot.

    Args:
        path: a snapshot directory; by default the one the module's docstring says.

    Raises:
        DataMissingError: the snapshot is missing, empty, damaged, or of another format.
    """
    found = current(path)
    return replace(to_catalog(found.rows, found.made_at, origin=found.origin), notes=found.notes)


def current(path: Path | None = None) -> Current:
    """Choose a snapshot and read its rows; arguments and errors as for ``load``."""
    if path is None and os.environ.get(DIRECTORY_VARIABLE):
        path = Path(os.environ[DIRECTORY_VARIABLE])
    if path is not None:
        rows, made_at = read_rows(path)
        return Current(rows=rows, made_at=made_at, origin=str(path))
    return newest()


def newest() -> Current:
    """The user's snapshot or the shipped one, whichever is newer and whole: what a refresh starts from.

    Raises:
        DataMissingError: the shipped snapshot is damaged.
    """
    rows, made_at = read_rows(SHIPPED)
    user = user_directory()
    if not (user / MANIFEST).exists():
        return Current(rows=rows, made_at=made_at, origin="shipped")
    try:
        user_rows, user_made_at = read_rows(user)
        to_catalog(user_rows, user_made_at, origin=str(user))
    except DataMissingError as error:
        note = f"the refreshed catalog cannot be used, the shipped one is read instead: {error.got}"
    else:
        if user_made_at > made_at:
            return Current(rows=user_rows, made_at=user_made_at, origin=str(user))
        note = f"the refreshed catalog in {user} is from {user_made_at:%Y-%m-%d}, before the shipped one: not used"
    return Current(rows=rows, made_at=made_at, origin="shipped", notes=(note,))


def read_rows(directory: Path) -> tuple[Rows, datetime]:
    """The tables of a snapshot as rows, and when it was made (UTC).

    Raises:
        DataMissingError: the snapshot is missing, empty, damaged, or of another format.
    """
    manifest_path = directory / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        if manifest["format_version"] != FORMAT_VERSION:
            raise _unusable(manifest_path, f"format version {manifest['format_version']}, not {FORMAT_VERSION}")
        made_at = datetime.fromisoformat(manifest["made_at"])
        rows = {name: _read_table(directory, name, manifest["tables"][name]) for name in TABLES}
    except OSError as error:
        raise _unusable(manifest_path, f"cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(manifest_path, f"is not a catalog manifest: {error!r}") from error
    for name in ("instance_types", "offers"):
        if not rows[name]:
            raise _unusable(directory, f"table {name} has no rows")
    return rows, made_at


def _read_table(directory: Path, name: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = directory / Path(str(entry["file"])).name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise _unusable(path, f"{len(data)} bytes with another checksum than {MANIFEST} gives")
    try:
        # Not pq.read_table: it imports pyarrow.dataset, and with it pandas, a quarter of a second. No threads: to start
        # Arrow's (https://arrow.apache.org/docs/cpp/threading.html) takes longer than to read a thousand rows.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except pa.ArrowException as error:
        raise _unusable(path, f"is not parquet: {error}") from error
    if not table.schema.remove_metadata().equals(_schema(name)):
        raise _unusable(path, f"has other columns than gpufleet {name} tables: {table.schema.names}")
    columns = [column.to_pylist() for column in table.columns]
    return [dict(zip(table.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def write_rows(directory: Path, rows: Rows, *, made_at: datetime) -> dict[str, Any]:
    """Write a snapshot and return its manifest; an existing snapshot stays whole until the last step.

    Raises:
        OSError: the directory cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory.mkdir(parents=True, exist_ok=True)
    tables = {}
    for name in TABLES:
        ordered = sorted(rows[name], key=lambda row: tuple(str(value) for value in list(row.values())[:2]))
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(ordered, schema=_schema(name)), buffer, compression="zstd")
        data = buffer.getvalue()
        checksum = hashlib.sha256(data).hexdigest()
        file = f"{name}-{checksum[:12]}.parquet"
        _replace(directory / file, data)
        tables[name] = {"file": file, "rows": len(ordered), "sha256": checksum}
    manifest = {
        "format_version": FORMAT_VERSION,
        "made_at": made_at.astimezone(UTC).isoformat(timespec="seconds"),
        "tables": tables,
        "sources": [
            {**asdict(source), "as_of": source.as_of.isoformat(), "newest": source.newest.isoformat()}
            for source in sources_of(rows)
        ],
    }
    _replace(directory / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    kept = {entry["file"] for entry in tables.values()}
    for old in directory.glob("*.parquet"):
        if old.name not in kept:
            old.unlink(missing_ok=True)
    return manifest


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def to_catalog(rows: Rows, made_at: datetime, *, origin: str) -> Catalog:
    """Rows as a catalog.

    Raises:
        DataMissingError: a row names a GPU, type or item that gpufleet does not know.
    """
    types = {row["name"]: _instance_type(row, origin) for row in rows["instance_types"]}
    offers = tuple(_offer(row, types, origin) for row in rows["offers"])
    priced = [offer.on_demand.as_of for offer in offers if offer.on_demand]
    if not priced:
        raise _unusable(Path(origin), "holds no on-demand price")
    return Catalog(
        offers=offers,
        instance_types=tuple(types[name] for name in sorted(types)),
        gpus=tuple(gpu_table().values()),
        unit_prices=tuple(_unit_price(row, origin) for row in rows["unit_prices"]),
        sources=sources_of(rows),
        made_at=made_at,
        as_of=min(priced),
        origin=origin,
    )


def sources_of(rows: Rows) -> tuple[Source, ...]:
    """Where the facts of ``rows`` come from: one Source a kind of fact and origin."""
    found: dict[tuple[str, str], list[date]] = {}

    def add(name: str, origin: str | None, as_of: date | None) -> None:
        if origin and as_of:
            found.setdefault((name, origin), []).append(as_of)

    for row in rows["instance_types"]:
        add("instance types", row["source"], row["as_of"])
    for gpu in gpu_table().values():
        add("GPU table", "vendor datasheets (data/gpus.csv)", gpu.as_of)
    for row in rows["offers"]:
        add("on-demand prices", row["on_demand_source"], row["on_demand_as_of"])
        add("reserved prices", row["reserved_1yr_source"], row["reserved_1yr_as_of"])
        add("spot prices", row["spot_source"], row["spot_as_of"])
        add("interruption bands", row["interruption_source"], row["interruption_as_of"])
        add("zones", row["zone_ids_source"], row["zone_ids_as_of"])
    for row in rows["unit_prices"]:
        # One source for a price list, not one for each of its lines: "AWS Price List: AmazonEC2 EBS:VolumeUsage.gp3".
        add("unit prices", re.split(r": | \(", row["source"], maxsplit=1)[0], row["as_of"])
    return tuple(
        Source(name=name, origin=origin, as_of=min(dates), newest=max(dates), rows=len(dates))
        for (name, origin), dates in found.items()
    )


def type_row(instance: InstanceType) -> dict[str, Any]:
    """An instance type as a row of the instance_types table."""
    return {name: instance.gpu.key if name == "gpu" else getattr(instance, name) for name in TABLES["instance_types"]}


def offer_row(instance_type: str, region: str) -> dict[str, Any]:
    """A row of the offers table that knows no price yet."""
    return {**dict.fromkeys(TABLES["offers"]), "instance_type": instance_type, "region": region}


def _instance_type(row: Mapping[str, Any], origin: str) -> InstanceType:
    gpu = gpu_table().get(row["gpu"])
    if gpu is None:
        raise _unusable(Path(origin), f"type {row['name']} has GPU {row['gpu']!r}, which is not in the GPU table")
    facts = {name: row[name] for name in TABLES["instance_types"] if name not in ("gpu",)}
    facts["interconnect"] = cast(Interconnect, row["interconnect"])
    facts["cpu_architecture"] = cast(CpuArchitecture, row["cpu_architecture"])
    return InstanceType(gpu=gpu, **facts)


def _offer(row: Mapping[str, Any], types: Mapping[str, InstanceType], origin: str) -> Offer:
    instance = types.get(row["instance_type"])
    if instance is None:
        raise _unusable(Path(origin), f"an offer in {row['region']} is of unknown type {row['instance_type']!r}")
    low = row["interruption_low"]
    return Offer(
        instance=instance,
        region=row["region"],
        zone_ids=tuple((row["zone_ids"] or "").split()),
        on_demand=_price(row, "on_demand"),
        reserved_1yr=_price(row, "reserved_1yr"),
        spot=_price(row, "spot"),
        interruption_band=None if low is None else (low, row["interruption_high"]),
    )


def _price(row: Mapping[str, Any], kind: str) -> HourlyPrice | None:
    usd, source, as_of = row[f"{kind}_usd_per_hour"], row[f"{kind}_source"], row[f"{kind}_as_of"]
    if usd is None:
        return None
    zone_id = row["spot_zone_id"] or "" if kind == "spot" else ""
    return HourlyPrice(usd_per_hour=usd, source=source, as_of=as_of, zone_id=zone_id)


def _unit_price(row: Mapping[str, Any], origin: str) -> UnitPrice:
    if row["item"] not in UNIT_ITEMS:
        raise _unusable(Path(origin), f"unit price of unknown item {row['item']!r}")
    item = cast(UnitItem, row["item"])
    return UnitPrice(
        item=item, region=row["region"], usd=row["usd"], per=UNIT_PER[item], source=row["source"], as_of=row["as_of"]
    )


def _schema(name: str) -> pa.Schema:
    import pyarrow as pa

    types = {"string": pa.string(), "double": pa.float64(), "int32": pa.int32(), "date32": pa.date32()}
    fields = [(column, types[kind.rstrip("!")], not kind.endswith("!")) for column, kind in TABLES[name].items()]
    return pa.schema([pa.field(column, kind, nullable=nullable) for column, kind, nullable in fields])


def _unusable(path: Path, what: str) -> DataMissingError:
    if path.is_relative_to(SHIPPED) or str(path) == "shipped":
        next_step = "pip install --force-reinstall gpufleet (the snapshot it ships is damaged)"
    else:
        next_step = f"unset {DIRECTORY_VARIABLE} to use the shipped snapshot, or write one by gpufleet catalog refresh"
    return DataMissingError(
        f"catalog {path} {what}",
        limit=f"a directory with {MANIFEST} and the parquet tables it names, as `gpufleet catalog refresh` writes it",
        why="prices and instance facts are never guessed",
        next_step=next_step,
    )
