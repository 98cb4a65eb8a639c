"""Build the shipped catalog snapshot from the readable inputs beside it and the answers moto records from AWS.

    python tools/build_snapshot.py

moto's maintainers keep the real answers of DescribeInstanceTypes and DescribeInstanceTypeOfferings for its EC2
emulation; they go through the same parsers as a live refresh. This script also writes the table of
optimizer/catalog/data/PROVENANCE.md, which tells the story in words.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from optimizer.catalog import invariants
from optimizer.catalog.gpus import DATA, read_table
from optimizer.catalog.model import UNIT_ITEMS, UnitPrice
from optimizer.catalog.snapshot import SHIPPED, build_catalog, list_sources, write_snapshot
from optimizer.catalog.sources import Skipped, instance_types, offerings
from optimizer.catalog.tables import Tables
from optimizer.contract.hardware import DERIVED_SPOT, HourlyPrice, InstanceType, InterruptionBand, Offer, Zones

INPUTS = DATA / "inputs"
_MOTO = Path(str(metadata.distribution("moto").locate_file("moto"))) / "ec2" / "resources"
MOTO_VERSION = "5.2.5"
MOTO_BUILT = date(2026, 10, 27)
MADE_AT = datetime(2026, 11, 23, tzinfo=UTC)
# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/price-changes.html
PRICE_LIST = "AWS public price list"
# https://aws.amazon.com/ec2/capacityblocks/pricing/: a block costs its rate for each hour, upfront, used or not.
BLOCKS = "AWS Capacity Blocks pricing page"
# catalogs/v9/aws/vms.csv of https://github.com/skypilot-org/skypilot-catalog, commit 3e9a175, Apache-2.0.
QUOTES = "SkyPilot catalog v9"
# https://aws.amazon.com/ec2/spot/instance-advisor/: share of instances interrupted in the trailing month, and its mean
# saving over on-demand, which may be negative.
ADVISOR = "AWS Spot Advisor"
BANDS: dict[str, tuple[float, float | None]] = {
    "<5%": (0.0, 0.05),
    "5-10%": (0.05, 0.10),
    "10-15%": (0.10, 0.15),
    "15-20%": (0.15, 0.20),
    ">20%": (0.20, None),
}

Row = dict[str, str]
Place = tuple[str, str]  # instance type and region


def main() -> None:
    """Write optimizer/catalog/data/snapshot and print the rows left out."""
    if metadata.version("moto") != MOTO_VERSION:
        sys.exit(f"moto {metadata.version('moto')} is installed; the snapshot's facts are those of moto {MOTO_VERSION}")
    tables, skipped = build()
    violations = invariants.check(build_catalog(tables, made_at=MADE_AT, origin="build"))
    if violations:
        sys.exit("\n".join(map(str, violations)))
    write_snapshot(SHIPPED, tables, made_at=MADE_AT)
    provenance = DATA / "PROVENANCE.md"
    text = provenance.read_text(encoding="utf-8")
    begin, end = "<!-- written by tools/build_snapshot.py -->\n", "<!-- end -->"
    head, rest = text.split(begin)
    table = provenance_table(tables)
    provenance.write_text(head + begin + table + end + rest.split(end)[1], encoding="utf-8")
    sys.stderr.write("".join(f"{line}\n" for line in skipped))


def build() -> tuple[Tables, list[Skipped]]:
    """Build the snapshot's tables; also returns the unused input rows."""
    recorded = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(INPUTS.glob("describe_instance_types*.json"))
    ]
    recorded.append(
        {
            "source": f"EC2 DescribeInstanceTypes, recorded in moto {MOTO_VERSION}",
            "as_of": MOTO_BUILT.isoformat(),
            "InstanceTypes": read_recorded_types().values(),
        }
    )
    types: dict[str, InstanceType] = {}
    skipped: list[Skipped] = []
    for answer in recorded:
        as_of = date.fromisoformat(answer["as_of"])
        parsed, unusable = instance_types.parse(answer["InstanceTypes"], source=answer["source"], as_of=as_of)
        types |= parsed
        skipped += unusable

    offers: dict[tuple[str, str], Offer] = {}

    def update(place: Place, **facts: Any) -> None:
        offer = offers.get(place) or Offer(instance=types[place[0]], region=place[1])
        offers[place] = replace(offer, **facts)

    def leave_out(source: str, place: Place, reason: str) -> None:
        skipped.append(Skipped(source=source, place=" in ".join(place), reason=reason))

    for file in sorted((_MOTO / "instance_type_offerings" / "availability-zone-id").iterdir()):
        region = file.name.removesuffix(".json.gz")
        origin = f"{offerings.ORIGIN}, recorded in moto {MOTO_VERSION}"
        for name, zone_ids in offerings.parse(_read_moto(file)).items():
            if name in types:
                update((name, region), zones=Zones(ids=zone_ids, source=origin, as_of=MOTO_BUILT))
    for place, on_demand, reserved in read_table("inputs/prices.csv", _parse_published):
        if place[0] in types:
            update(place, on_demand=on_demand, reserved_1yr=reserved)
        else:
            leave_out(PRICE_LIST, place, "type without facts")
    for place, rate in read_table("inputs/capacity_blocks.csv", _parse_block):
        if place in offers:
            update(place, capacity_block=rate)
        else:
            leave_out(BLOCKS, place, "no offer there")
    quoted: defaultdict[Place, list[HourlyPrice]] = defaultdict(list)
    for place, on_demand, spot in read_table("inputs/zone_prices.csv", _parse_quote):
        offer = offers[place]
        if on_demand and (offer.on_demand is None or on_demand.as_of > offer.on_demand.as_of):
            update(place, on_demand=on_demand)
        if spot and spot.zone_id in offer.zone_ids:
            quoted[place].append(spot)
        elif spot:
            leave_out(QUOTES, place, f"zone {spot.zone_id} does not offer the type")
    for place, prices in quoted.items():
        offers[place] = offers[place].with_spot(prices)
    for place, band, saving in read_table("inputs/spot_advisor.csv", _parse_advice):
        if place not in offers or (price := offers[place].on_demand) is None:
            leave_out(ADVISOR, place, "no on-demand price to derive a spot price from")
            continue
        update(place, interruptions=band)
        if offers[place].spot:
            continue
        if saving < 0:
            leave_out(ADVISOR, place, f"saving {saving:.0%}: spot above on-demand, no spot price kept")
            continue
        # Four decimals, as AWS quotes.
        usd = round(price.usd_per_hour * (1 - saving), 4)
        update(place, spot=HourlyPrice(usd_per_hour=usd, source=DERIVED_SPOT, as_of=band.as_of))
    units = read_table("inputs/unit_prices.csv", _parse_unit)
    return Tables(instance_types=list(types.values()), offers=list(offers.values()), unit_prices=units), skipped


def _place(row: Row) -> Place:
    return row["instance_type"], row["region"]


def _price(usd: str, as_of: str, source: str, zone_id: str = "") -> HourlyPrice | None:
    if not usd:
        return None
    return HourlyPrice(usd_per_hour=float(usd), source=source, as_of=date.fromisoformat(as_of), zone_id=zone_id)


def _parse_published(row: Row) -> tuple[Place, HourlyPrice | None, HourlyPrice | None]:
    reserved = _price(row["reserved_1yr_no_upfront_usd_per_hour"], row["reserved_as_of"], PRICE_LIST)
    return _place(row), _price(row["on_demand_usd_per_hour"], row["as_of"], PRICE_LIST), reserved


def _parse_block(row: Row) -> tuple[Place, HourlyPrice | None]:
    return _place(row), _price(row["usd_per_hour"], row["as_of"], BLOCKS)


def _parse_quote(row: Row) -> tuple[Place, HourlyPrice | None, HourlyPrice | None]:
    on_demand = _price(row["on_demand_usd_per_hour"], row["as_of"], QUOTES)
    return _place(row), on_demand, _price(row["spot_usd_per_hour"], row["as_of"], QUOTES, row["zone_id"])


def _parse_advice(row: Row) -> tuple[Place, InterruptionBand, float]:
    low, high = BANDS[row["interruption_frequency_per_month"]]
    band = InterruptionBand(low=low, high=high, source=ADVISOR, as_of=date.fromisoformat(row["as_of"]))
    return _place(row), band, float(row["savings_over_on_demand_pct"]) / 100


def _parse_unit(row: Row) -> UnitPrice:
    if row["item"] not in UNIT_ITEMS:
        raise ValueError(f"item {row['item']!r} is none of {', '.join(UNIT_ITEMS)}")
    return UnitPrice(
        item=row["item"],
        region=row["region"],
        usd=float(row["usd"]),
        source=row["source"],
        as_of=date.fromisoformat(row["as_of"]),
    )


def provenance_table(tables: Tables) -> str:
    """The generated part of PROVENANCE.md."""
    lines = ["| table | rows |", "| --- | ---: |"]
    lines += [f"| {name} | {len(getattr(tables, name))} |" for name in Tables._fields]
    lines += ["", "| facts | origin | oldest | newest | rows |", "| --- | --- | --- | --- | ---: |"]
    lines += [f"| {s.name} | {s.origin} | {s.as_of} | {s.newest} | {s.rows} |" for s in list_sources(tables)]
    return "\n".join(lines) + "\n"


def read_recorded_types() -> dict[str, Any]:
    """Answers of DescribeInstanceTypes that moto records, by type."""
    types: dict[str, Any] = _read_moto(_MOTO / "instance_types.json.gz")
    return types


def _read_moto(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


if __name__ == "__main__":
    main()
