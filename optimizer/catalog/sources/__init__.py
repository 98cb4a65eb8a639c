"""Sources of catalog facts: one a file, with a pure parser and, where AWS has a call, a fetch.

The shipped snapshot and `gpufleet catalog refresh` use the same parsers.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from datetime import date
from typing import NamedTuple, Protocol, TypeVar

from optimizer.contract.hardware import HourlyPrice


class Skipped(NamedTuple):
    """An unusable row of a source, its place and the reason."""

    source: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, {self.place}: {self.reason}"


class UnusableRowError(ValueError):
    """A row that is malformed or of a kind the catalog does not hold; the message says why."""


class _Record(Protocol):
    @property
    def region(self) -> str: ...


R = TypeVar("R", bound=_Record)


def parse_csv(
    lines: Iterable[str], source: str, parse_row: Callable[[dict[str, str]], R], *, key: str
) -> tuple[list[R], list[Skipped]]:
    """Parse a CSV file; malformed rows, and a second record of one ``key`` and place, are skipped with their line."""
    reader = csv.DictReader(lines)
    records: dict[tuple[str, str, str], R] = {}
    skipped = []
    for row in reader:
        try:
            record = parse_row(row)
            name = getattr(record, key)
            if not name or not record.region:
                raise UnusableRowError(f"no {key.replace('_', ' ')} or region")
            place = (name, record.region, getattr(record, "zone_id", ""))
            if place in records:
                raise UnusableRowError(f"a second price of {name} in {place[2] or record.region}")
            records[place] = record
        except (UnusableRowError, KeyError, TypeError, ValueError) as error:
            skipped.append(Skipped(source=source, place=f"line {reader.line_num}", reason=str(error) or repr(error)))
    return list(records.values()), skipped


def parse_price(usd: str, as_of: str, source: str, zone_id: str = "") -> HourlyPrice:
    """Read a price in USD per hour; UnusableRowError unless it is above 0 and finite."""
    if not 0 < float(usd) < float("inf"):  # refuses NaN, too
        raise UnusableRowError(f"a price is above 0 USD per hour, got {usd}")
    return HourlyPrice(usd_per_hour=float(usd), source=source, as_of=date.fromisoformat(as_of), zone_id=zone_id)
