"""Catalog snapshots on disk: one JSON file of three tables, replaced atomically.

``load()`` reads the first of:
    1. the directory given to it, or in the environment variable GPUFLEET_CATALOG;
    2. the user's, written by ``gpufleet catalog refresh``, if readable and made after the shipped one;
    3. the shipped one.
Over 2 and 3 it lays what the user's stacks learned (``learned.py``).
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

from bootstrap.contract.capacity import PoolEvents
from bootstrap.contract.codec import to_text
from bootstrap.contract.words import counted
from optimizer.catalog import invariants, learned
from optimizer.catalog.gpus import DATA, gpu_table
from optimizer.catalog.learned import Learned, LearnedStack
from optimizer.catalog.model import Catalog, Source
from optimizer.catalog.tables import Tables, encode_tables, parse_tables
from optimizer.contract.errors import DataMissingError

FORMAT_VERSION = 7
FILE = "catalog.json"
SHIPPED = DATA / "snapshot"
DIRECTORY_VARIABLE = "GPUFLEET_CATALOG"
_WRONG = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)  # for a document of another shape


def user_directory() -> Path:
    """Folder that ``refresh`` writes (XDG_CACHE_HOME: https://specifications.freedesktop.org/basedir/)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "gpufleet" / "catalog"


def learned_file() -> Path:
    """File that ``gpufleet catalog learn`` writes."""
    return user_directory().parent / learned.FILE


def load(path: Path | None = None) -> Catalog:
    """Read the snapshot at ``path``, or the first of the list above; DataMissingError where it cannot be used."""
    if path is None and os.environ.get(DIRECTORY_VARIABLE):
        path = Path(os.environ[DIRECTORY_VARIABLE])
    if path is not None:
        return _check_usable(read_snapshot(path))
    return learned.lay_over(read_newest(), learned_file())


def read_newest() -> Catalog:
    """The newer of the user's and the shipped snapshot, if the user's can be read."""
    shipped = read_snapshot(SHIPPED, origin="shipped")
    directory = user_directory()
    if not (directory / FILE).exists():
        return shipped
    try:
        user = _check_usable(read_snapshot(directory))
    except DataMissingError as error:
        note = f"the refreshed catalog cannot be used, the shipped one is read instead: {error.got}"
    else:
        if user.made_at > shipped.made_at:
            return user
        note = f"the refreshed catalog in {directory} is from {user.made_at:%Y-%m-%d}, before the shipped one: not used"
    return replace(shipped, notes=(note,))


def read_snapshot(directory: Path, *, origin: str | None = None) -> Catalog:
    """Read a snapshot; DataMissingError where it is missing, empty, damaged, or of another format."""
    path = directory / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format_version"] != FORMAT_VERSION:
            raise _unusable(path, f"format version {document['format_version']}, not {FORMAT_VERSION}")
        made_at, tables = datetime.fromisoformat(document["made_at"]).astimezone(UTC), parse_tables(document)
        return build_catalog(tables, made_at=made_at, origin=origin or str(directory))
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error
    except _WRONG as error:
        raise _unusable(path, f"is no catalog: {error!r}") from error


def write_snapshot(directory: Path, tables: Tables, *, made_at: datetime) -> None:
    """Write a snapshot; an existing one stays whole until the last step."""
    directory.mkdir(parents=True, exist_ok=True)
    made = made_at.astimezone(UTC).isoformat(timespec="seconds")
    head = f'{{\n"format_version": {FORMAT_VERSION},\n"made_at": "{made}",\n'
    _replace(directory / FILE, f"{head}{encode_tables(tables)}\n}}\n".encode())


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def keep_events(place: str, stack: str, pools: Mapping[str, PoolEvents], *, now: datetime) -> None:
    """Write a stack's capacity events (of Capacity Manager's without ``stack``) in place of its earlier ones.

    Raises ValueError for a key of ``pools`` that names none, DataMissingError where the file cannot be used, OSError.
    """
    new = LearnedStack(stack=stack, learned_at=now.replace(microsecond=0), pools=dict(pools))
    changed = Learned(stacks=learned.read_learned(learned_file()).stacks | {place: new})
    changed.pools()
    learned_file().parent.mkdir(parents=True, exist_ok=True)
    _replace(learned_file(), to_text(changed).encode())


def _check_usable(catalog: Catalog) -> Catalog:
    """Return the catalog; DataMissingError where it breaks a rule, as a price that a plan would take as free does."""
    if broken := find_broken(catalog):
        several = f"; gpufleet catalog verify {catalog.origin} lists all" if len(broken) > 1 else ""
        raise _unusable(Path(catalog.origin), f"breaks {counted(len(broken), 'rule')}: {broken[0]}{several}")
    return catalog


def find_broken(catalog: Catalog) -> list[invariants.InvariantViolation]:
    """List the rules that a catalog breaks today; DataMissingError where a value is of a wrong type."""
    try:
        return invariants.check(catalog, today=datetime.now(UTC).date())
    except _WRONG as error:
        raise _unusable(Path(catalog.origin), f"is no catalog: {error!r}") from error


def build_catalog(tables: Tables, *, made_at: datetime, origin: str) -> Catalog:
    """The catalog of a snapshot's tables; DataMissingError without any on-demand price."""
    dates = [offer.on_demand.as_of for offer in tables.offers if offer.on_demand]
    if not dates:
        raise _unusable(Path(origin), "holds no on-demand price")
    return Catalog(
        offers=tuple(tables.offers),
        instance_types=tuple(sorted(tables.instance_types, key=lambda instance: instance.name)),
        gpus=tuple(gpu_table().values()),
        unit_prices=tuple(tables.unit_prices),
        sources=list_sources(tables),
        made_at=made_at,
        as_of=min(dates),
        origin=origin,
    )


def list_sources(tables: Tables) -> tuple[Source, ...]:
    """Sources of the facts: one a kind of fact and origin."""
    dates: defaultdict[tuple[str, str], list[date]] = defaultdict(list)
    for instance in tables.instance_types:
        dates["instance types", instance.source].append(instance.as_of)
    for gpu in gpu_table().values():
        dates["GPU table", "vendor datasheets (data/gpus.csv)"].append(gpu.as_of)
    for row in tables.offers:
        for name, fact in (
            ("on-demand prices", row.on_demand),
            ("reserved prices", row.reserved_1yr),
            ("Capacity Block rates", row.capacity_block),
            ("spot prices", row.spot),
            *(("spot prices", price) for price in row.dearer_spot),
            ("interruption bands", row.interruptions),
            ("zones", row.zones),
        ):
            if fact is not None:
                dates[name, fact.source].append(fact.as_of)
    for price in tables.unit_prices:
        # One source for a price list, not one for each of its lines: "AWS Price List: AmazonEC2 EBS:VolumeUsage.gp3".
        dates["unit prices", re.split(r": | \(", price.source, maxsplit=1)[0]].append(price.as_of)
    return tuple(
        Source(name=name, origin=origin, as_of=min(days), newest=max(days), rows=len(days))
        for (name, origin), days in dates.items()
    )


def _unusable(path: Path, problem: str) -> DataMissingError:
    if path.is_relative_to(SHIPPED) or str(path) == "shipped":
        next_step = "pip install --force-reinstall gpufleet (the snapshot it ships is damaged)"
    else:
        next_step = f"unset {DIRECTORY_VARIABLE} to use the shipped snapshot, or write one by gpufleet catalog refresh"
    return DataMissingError(
        f"catalog {path} {problem}",
        limit=f"a folder with {FILE}, as `gpufleet catalog refresh` writes it",
        why="prices and instance facts are never guessed",
        next_step=next_step,
    )
