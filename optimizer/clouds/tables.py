"""Tables of other clouds' types, prices and exchange rates (data/, kept by hand), and refreshed prices in the cache.

data/PROVENANCE.md tells where the rows come from.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from optimizer.catalog.snapshot import user_directory
from optimizer.clouds.providers import CLOUDS
from optimizer.contract.errors import DataMissingError
from optimizer.contract.hardware import Interconnect

SHIPPED = Path(__file__).parent / "data"
TYPES, PRICES, RATES = "types.csv", "prices.csv", "exchange_rates.csv"


def _known_cloud(name: str) -> str:
    if name not in CLOUDS:
        raise ValueError(f"{name!r} is none of {', '.join(CLOUDS)}")
    return name


EmptyIsNone = BeforeValidator(lambda value: None if value == "" else value)
CloudName = Annotated[str, AfterValidator(_known_cloud)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TypeRow(_Row):
    """A line of types.csv: one instance type."""

    cloud: CloudName
    instance_type: Text
    series: Text
    gpu: Text
    gpu_count: Annotated[int, Field(ge=1)]
    vcpus: Annotated[int, Field(ge=1)]
    memory_gib: Positive
    network_gbit_per_s: Annotated[Positive | None, EmptyIsNone]
    fabric: Literal["ethernet", "infiniband"]
    interconnect: Interconnect
    retired: Annotated[date | None, EmptyIsNone]
    source: Text
    as_of: date
    note: str


class PriceRow(_Row):
    """A line of prices.csv: one price in ``regions`` (names between blanks), or why there is none."""

    cloud: CloudName
    instance_type: Text
    regions: Text
    on_demand_per_hour: Annotated[Positive | None, EmptyIsNone]
    spot_per_hour: Annotated[Positive | None, EmptyIsNone]
    currency: str
    source: str
    as_of: Annotated[date | None, EmptyIsNone]
    unpriced_because: str

    @model_validator(mode="after")
    def _check_price(self) -> PriceRow:
        priced = self.on_demand_per_hour is not None
        if priced and not (self.currency and self.source and self.as_of):
            raise ValueError("a price has a currency, a source and a date")
        if not priced and (self.spot_per_hour is not None or not self.unpriced_because):
            raise ValueError("a type without an on-demand price says why")
        return self


class RateRow(_Row):
    """A line of exchange_rates.csv."""

    currency: Text
    per_usd: Positive
    source: Text
    as_of: date


R = TypeVar("R", bound=_Row)


def read_table(path: Path, row_type: type[R]) -> list[R]:
    """Rows of a CSV file; DataMissingError where it is missing or malformed."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [row_type.model_validate(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error, ValidationError) as error:
        raise DataMissingError(
            f"{path} cannot be used: {error}",
            limit="one line a type or price, every column of the header there",
            next_step="pip install --force-reinstall gpufleet" if path.parent == SHIPPED else f"rm {path}",
        ) from error


def read_types() -> list[TypeRow]:
    """Types of all clouds."""
    return read_table(SHIPPED / TYPES, TypeRow)


def type_names(cloud: str) -> list[str]:
    """Names of a cloud's types."""
    return [row.instance_type for row in read_types() if row.cloud == cloud]


def refreshed_directory() -> Path:
    """Folder of refreshed prices: XDG_CACHE_HOME/gpufleet/other_clouds."""
    return user_directory().parent / "other_clouds"


def refreshed_file(cloud: str) -> Path:
    """File of a cloud's refreshed prices."""
    return refreshed_directory() / f"{cloud}.csv"


def read_newest_prices() -> tuple[list[PriceRow], list[str]]:
    """Prices of all clouds: a refreshed file unless broken or older than the shipped rows; and notes."""
    rows = read_table(SHIPPED / PRICES, PriceRow)
    known_types = {row.instance_type for row in read_types()}
    notes = []
    for cloud in CLOUDS.values():
        path = refreshed_file(cloud.name)
        if not path.exists():
            continue
        try:
            refreshed = [
                row
                for row in read_table(path, PriceRow)
                if row.cloud == cloud.name and row.instance_type in known_types
            ]
        except DataMissingError as error:
            notes.append(f"{error.got}; the shipped {cloud.title} prices are used")
            continue
        if _newest(refreshed) >= _newest(row for row in rows if row.cloud == cloud.name):
            rows = [row for row in rows if row.cloud != cloud.name] + refreshed
    return rows, notes


def _newest(rows: Iterable[PriceRow]) -> date:
    return max((row.as_of for row in rows if row.as_of is not None), default=date.min)


def write_prices(path: Path, rows: Iterable[PriceRow]) -> None:
    """Write price rows as CSV; a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[Any] = csv.DictWriter(file, fieldnames=list(PriceRow.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump(mode="json") for row in rows)
    partial.replace(path)
