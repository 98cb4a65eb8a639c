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
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from optimizer.catalog import invariants
from optimizer.catalog.gpus import DATA
from optimizer.catalog.snapshot import SHIPPED, Snapshot, build_catalog, list_sources, write_snapshot
from optimizer.catalog.sources import (
    Skipped,
    capacity_blocks,
    instance_types,
    offerings,
    published_prices,
    spot_advisor,
    unit_prices,
    zone_prices,
)
from optimizer.catalog.sources.capacity_blocks import BlockRate
from optimizer.catalog.sources.published_prices import PublishedPrice
from optimizer.catalog.sources.spot_advisor import SpotAdvice
from optimizer.catalog.sources.zone_prices import QuotedPrices
from optimizer.catalog.tables import OfferRow, Tables, Zones
from optimizer.contract.hardware import InstanceType

INPUTS = DATA / "inputs"
_MOTO = Path(str(metadata.distribution("moto").locate_file("moto"))) / "ec2" / "resources"
MOTO_VERSION = "5.2.5"
MOTO_BUILT = date(2026, 10, 27)
MADE_AT = datetime(2026, 11, 23, tzinfo=UTC)


def main() -> None:
    """Write optimizer/catalog/data/snapshot and print the rows left out."""
    if metadata.version("moto") != MOTO_VERSION:
        sys.exit(f"moto {metadata.version('moto')} is installed; the snapshot's facts are those of moto {MOTO_VERSION}")
    tables, skipped = build()
    violations = invariants.check(build_catalog(Snapshot(tables=tables, made_at=MADE_AT, origin="build")))
    if violations:
        sys.exit("\n".join(map(str, violations)))
    manifest = write_snapshot(SHIPPED, tables, made_at=MADE_AT)
    provenance = DATA / "PROVENANCE.md"
    text = provenance.read_text(encoding="utf-8")
    begin, end = "<!-- written by tools/build_snapshot.py -->\n", "<!-- end -->"
    head, rest = text.split(begin)
    table = provenance_table(tables, manifest)
    provenance.write_text(head + begin + table + end + rest.split(end)[1], encoding="utf-8")
    sys.stderr.write("".join(f"{line}\n" for line in skipped))
    sys.stdout.write(json.dumps(manifest["tables"], indent=2) + "\n")


def build() -> tuple[Tables, list[Skipped]]:
    """Build the snapshot's tables; also returns the unused input rows."""
    recorded = [json.loads(path.read_text(encoding="utf-8")) for path in INPUTS.glob("describe_instance_types*.json")]
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

    offers: dict[tuple[str, str], OfferRow] = {}

    def update(instance_type: str, region: str, **facts: Any) -> None:
        row = offers.get((instance_type, region)) or OfferRow(instance_type=instance_type, region=region)
        offers[instance_type, region] = row._replace(**facts)

    def leave_out(source: str, row: PublishedPrice | SpotAdvice | QuotedPrices | BlockRate, reason: str) -> None:
        skipped.append(Skipped(source=source, place=f"{row.instance_type} in {row.region}", reason=reason))

    for file in (_MOTO / "instance_type_offerings" / "availability-zone-id").iterdir():
        region = file.name.removesuffix(".json.gz")
        origin = f"{offerings.ORIGIN}, recorded in moto {MOTO_VERSION}"
        for name, zone_ids in offerings.parse(_read_moto(file), region).items():
            if name in types:
                update(name, region, zones=Zones(ids=zone_ids, source=origin, as_of=MOTO_BUILT))
    prices, price_skipped = published_prices.parse(_read_input("prices.csv").splitlines())
    skipped += price_skipped
    for price in prices:
        if price.instance_type in types:
            update(price.instance_type, price.region, on_demand=price.on_demand, reserved_1yr=price.reserved_1yr)
        else:
            leave_out(published_prices.NAME, price, "type without facts")
    blocks, blocks_skipped = capacity_blocks.parse(_read_input("capacity_blocks.csv").splitlines())
    skipped += blocks_skipped
    for block in blocks:
        if (block.instance_type, block.region) in offers:
            update(block.instance_type, block.region, capacity_block=block.rate)
        else:
            leave_out(capacity_blocks.NAME, block, "no offer there")
    quotes, quotes_skipped = zone_prices.parse(_read_input("zone_prices.csv").splitlines())
    skipped += quotes_skipped
    for place, zones in quotes.items():
        offer = offers[place]
        for on_demand in (quote.on_demand for quote in zones if quote.on_demand):
            if offer.on_demand is None or on_demand.as_of > offer.on_demand.as_of:
                offer = offer._replace(on_demand=on_demand)
        offered = offer.zones.ids if offer.zones else ()
        for quote in zones:
            if quote.zone_id not in offered:
                leave_out(zone_prices.NAME, quote, f"zone {quote.zone_id} does not offer the type")
        offers[place] = offer.with_spot(quote.spot for quote in zones if quote.spot and quote.zone_id in offered)
    advice, advice_skipped = spot_advisor.parse(_read_input("spot_advisor.csv").splitlines())
    skipped += advice_skipped
    for advised in advice:
        row = offers.get((advised.instance_type, advised.region))
        if row is None or row.on_demand is None:
            leave_out(spot_advisor.NAME, advised, "no on-demand price to derive a spot price from")
            continue
        update(advised.instance_type, advised.region, interruptions=advised.interruptions)
        if row.spot:
            continue
        spot = spot_advisor.spot_price(row.on_demand, advised)
        update(advised.instance_type, advised.region, spot=spot)
        if spot is None:
            reason = f"saving {advised.saving:.0%}: spot above on-demand, no spot price kept"
            leave_out(spot_advisor.NAME, advised, reason)
    units, unit_skipped = unit_prices.parse(_read_input("unit_prices.csv").splitlines())
    skipped += unit_skipped
    return Tables(instance_types=list(types.values()), offers=list(offers.values()), unit_prices=units), skipped


def provenance_table(tables: Tables, manifest: dict[str, Any]) -> str:
    """The generated part of PROVENANCE.md."""
    lines = ["| table | rows | sha256 |", "| --- | ---: | --- |"]
    lines += [f"| {name} | {table['rows']} | `{table['sha256']}` |" for name, table in manifest["tables"].items()]
    lines += ["", "| facts | origin | oldest | newest | rows |", "| --- | --- | --- | --- | ---: |"]
    lines += [f"| {s.name} | {s.origin} | {s.as_of} | {s.newest} | {s.rows} |" for s in list_sources(tables)]
    return "\n".join(lines) + "\n"


def read_recorded_types() -> dict[str, Any]:
    """Answers of DescribeInstanceTypes that moto records, by type."""
    types: dict[str, Any] = _read_moto(_MOTO / "instance_types.json.gz")
    return types


def _read_input(name: str) -> str:
    return (INPUTS / name).read_text(encoding="utf-8")


def _read_moto(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


if __name__ == "__main__":
    main()
