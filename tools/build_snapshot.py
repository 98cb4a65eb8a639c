"""Build the catalog snapshot gpufleet ships, from the readable inputs beside it and the answers moto records from AWS.

    python tools/build_snapshot.py

moto's maintainers keep the real answers of DescribeInstanceTypes and DescribeInstanceTypeOfferings for its EC2
emulation; they go through the same parsers as a live refresh. optimizer/catalog/data/PROVENANCE.md tells the story
in words, and its table is written by this script.
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
from optimizer.catalog.snapshot import SHIPPED, Rows, offer_row, sources_of, to_catalog, type_row, write_rows
from optimizer.catalog.sources import Skipped, instance_types, offerings, published_prices, spot_advisor, unit_prices

INPUTS = DATA / "inputs"
_MOTO = Path(str(metadata.distribution("moto").locate_file("moto"))) / "ec2" / "resources"
MOTO_VERSION = "5.2.5"
MOTO_BUILT = date(2026, 10, 27)
P3_SOURCE, P3_BUILT = "EC2 DescribeInstanceTypes, recorded in moto 5.1.18 (the last with p3)", date(2025, 11, 30)
MADE_AT = datetime(2026, 11, 21, tzinfo=UTC)


def main() -> None:
    """Write optimizer/catalog/data/snapshot and print what was left out."""
    if metadata.version("moto") != MOTO_VERSION:
        sys.exit(f"moto {metadata.version('moto')} is installed; the snapshot's facts are those of moto {MOTO_VERSION}")
    rows, skipped = build()
    violations = invariants.check(to_catalog(rows, MADE_AT, origin="build"))
    if violations:
        sys.exit("\n".join(str(violation) for violation in violations))
    manifest = write_rows(SHIPPED, rows, made_at=MADE_AT)
    provenance = DATA / "PROVENANCE.md"
    text = provenance.read_text(encoding="utf-8")
    begin, end = "<!-- written by tools/build_snapshot.py -->\n", "<!-- end -->"
    head, rest = text.split(begin)
    provenance.write_text(head + begin + provenance_table(rows, manifest) + end + rest.split(end)[1], encoding="utf-8")
    sys.stderr.write("".join(f"{line}\n" for line in skipped))
    sys.stdout.write(json.dumps(manifest["tables"], indent=2) + "\n")


def build() -> tuple[Rows, list[Skipped]]:
    """The snapshot's rows, and every input row that was not used."""
    source = f"EC2 DescribeInstanceTypes, recorded in moto {MOTO_VERSION}"
    types, skipped = instance_types.parse(_moto("instance_types.json.gz").values(), source=source, as_of=MOTO_BUILT)
    p3 = json.loads((INPUTS / "describe_instance_types_p3.json").read_text(encoding="utf-8"))
    old, old_skipped = instance_types.parse(p3, source=P3_SOURCE, as_of=P3_BUILT)
    types = {**old, **types}
    skipped += old_skipped

    offers: dict[tuple[str, str], dict[str, Any]] = {}

    def row(instance_type: str, region: str) -> dict[str, Any]:
        return offers.setdefault((instance_type, region), offer_row(instance_type, region))

    for file in (_MOTO / "instance_type_offerings" / "availability-zone-id").iterdir():
        region = file.name.removesuffix(".json.gz")
        answer = json.loads(gzip.decompress(file.read_bytes()))
        for name, zone_ids in offerings.parse(answer, region).items():
            if name in types:
                row(name, region).update(
                    zone_ids=" ".join(zone_ids),
                    zone_ids_source=f"{offerings.ORIGIN}, recorded in moto {MOTO_VERSION}",
                    zone_ids_as_of=MOTO_BUILT,
                )
    prices, price_skipped = published_prices.parse((INPUTS / "prices.csv").read_text(encoding="utf-8").splitlines())
    skipped += price_skipped
    for price in prices:
        if price["instance_type"] not in types:
            skipped.append(_left_out(published_prices.NAME, price, "type without facts"))
            continue
        found = row(price["instance_type"], price["region"])
        found.update(
            on_demand_usd_per_hour=price["on_demand"],
            on_demand_source=published_prices.ORIGIN,
            on_demand_as_of=price["as_of"],
        )
        if price["reserved"] is not None:
            found.update(
                reserved_1yr_usd_per_hour=price["reserved"],
                reserved_1yr_source=published_prices.ORIGIN,
                reserved_1yr_as_of=price["reserved_as_of"],
            )
    advice, advice_skipped = spot_advisor.parse((INPUTS / "spot_advisor.csv").read_text(encoding="utf-8").splitlines())
    skipped += advice_skipped
    for advised in advice:
        found_offer = offers.get((advised["instance_type"], advised["region"]))
        if found_offer is None or found_offer["on_demand_usd_per_hour"] is None:
            skipped.append(_left_out(spot_advisor.NAME, advised, "no on-demand price to derive a spot price from"))
            continue
        found_offer.update(
            interruption_low=advised["low"],
            interruption_high=advised["high"],
            interruption_source=spot_advisor.ORIGIN,
            interruption_as_of=advised["as_of"],
        )
        usd = spot_advisor.spot_price(found_offer["on_demand_usd_per_hour"], advised["saving"])
        if usd is None:
            reason = f"saving {advised['saving']:.0%}: spot above on-demand, no spot price kept"
            skipped.append(_left_out(spot_advisor.NAME, advised, reason))
            continue
        found_offer.update(spot_usd_per_hour=usd, spot_source=spot_advisor.PRICE_SOURCE, spot_as_of=advised["as_of"])
    units, unit_skipped = unit_prices.parse((INPUTS / "unit_prices.csv").read_text(encoding="utf-8").splitlines())
    skipped += unit_skipped
    return {
        "instance_types": [type_row(instance) for instance in types.values()],
        "offers": list(offers.values()),
        "unit_prices": units,
    }, skipped


def provenance_table(rows: Rows, manifest: dict[str, Any]) -> str:
    """The part of PROVENANCE.md that follows from the data."""
    lines = ["| table | rows | sha256 |", "| --- | ---: | --- |"]
    lines += [f"| {name} | {table['rows']} | `{table['sha256']}` |" for name, table in manifest["tables"].items()]
    lines += ["", "| facts | origin | oldest | newest | rows |", "| --- | --- | --- | --- | ---: |"]
    lines += [f"| {s.name} | {s.origin} | {s.as_of} | {s.newest} | {s.rows} |" for s in sources_of(rows)]
    return "\n".join(lines) + "\n"


def _left_out(source: str, row: dict[str, Any], reason: str) -> Skipped:
    return Skipped(source=source, place=f"{row['instance_type']} in {row['region']}", reason=reason)


def _moto(name: str) -> Any:
    return json.loads(gzip.decompress((_MOTO / name).read_bytes()))


if __name__ == "__main__":
    main()
