"""``gpufleet catalog``: show, verify and refresh the catalog."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from optimizer.catalog import Catalog, Source, load, ttl
from optimizer.catalog.refresh import enabled_regions
from optimizer.catalog.refresh import refresh as refresh_regions
from optimizer.catalog.snapshot import DIRECTORY_VARIABLE, find_broken, read_snapshot
from optimizer.commands.calibrate import command as calibrate
from optimizer.commands.learn import COLUMNS as POOL_COLUMNS
from optimizer.commands.learn import learn, pool_rows
from optimizer.commands.options import WholeSentences
from optimizer.commands.output import format_option, say, write_json, write_notes, write_rows, write_table
from optimizer.commands.progress import steps
from optimizer.contract.errors import GpufleetError


@click.group(cls=WholeSentences)
def command() -> None:
    """Show, check and refresh the catalog of instance types and prices.

    \b
    Example:
      gpufleet catalog show
      gpufleet catalog refresh --region us-east-1 --region us-west-2
    """


command.add_command(calibrate, "calibrate")
command.add_command(learn)


@command.command()
@format_option
def show(output_format: str) -> None:
    """Show the catalog's sources with dates and ages, and counts.

    JSON has everything; a table or CSV the sources, with counts on standard error. A table also has the pools whose
    capacity events were learned from your own stacks.

    \b
    Example:
      gpufleet catalog show
      gpufleet catalog show --format json
    """
    catalog = load()
    write_notes(catalog.notes)
    sources = [_source_row(source) for source in catalog.sources]
    if output_format == "json":
        learned = pool_rows(catalog, catalog.learned)
        write_json({**_summary(catalog), "sources": sources, "learned": learned})
        return
    columns = {
        "name": "facts",
        "origin": "origin",
        "rows": "rows",
        "as_of": "oldest",
        "newest": "newest",
        "age_days": "age, days",
        "ttl_days": "good for, days",
        "stale": "stale",
    }
    write_rows(sources, columns, output_format)
    if catalog.learned and output_format == "table":
        click.echo()
        title = "Capacity events of your own stacks, and what recommend takes from them"
        write_table(pool_rows(catalog, catalog.learned), POOL_COLUMNS, title=title)
    for name, value in _summary(catalog).items():
        say(f"{name}: {value}", err=True)


@command.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@format_option
def verify(directory: Path | None, output_format: str) -> None:
    """Check a catalog against its invariants; exit status 1 if one is broken.

    Checks the catalog in use, or the snapshot in DIRECTORY.

    \b
    Example:
      gpufleet catalog verify
      gpufleet catalog verify ~/.cache/gpufleet/catalog
    """
    catalog = load() if directory is None else read_snapshot(directory)
    write_notes(catalog.notes)
    violations = find_broken(catalog)
    if violations or output_format != "table":
        rows = [broken._asdict() for broken in violations]
        write_rows(rows, {"place": "where", "value": "value", "rule": "rule"}, output_format)
    say(
        f"catalog {catalog.origin}: {len(catalog.instance_types)} types, {len(catalog.offers)} offers, "
        f"{len(catalog.unit_prices)} unit prices: {len(violations) or 'no'} broken invariants",
        err=True,
    )
    if violations:
        sys.exit(GpufleetError.exit_code)


@command.command()
@click.option(
    "--region", "regions", multiple=True, metavar="REGION", help="AWS region to read; repeatable. Default: all."
)
@format_option
def refresh(regions: tuple[str, ...], output_format: str) -> None:
    """Read instance types, zones and prices from AWS, and keep them for the commands that follow.

    Calls DescribeInstanceTypes, DescribeInstanceTypeOfferings, DescribeSpotPriceHistory, DescribeAvailabilityZones
    and pricing:GetProducts (and DescribeRegions without --region). A source that fails keeps its last good data, with
    the reason on standard error; if none answers, nothing changes and the exit status is 1. Spot prices
    are those in force in each zone.

    In the region where the account has enabled EC2 Capacity Manager, GetCapacityManagerMetricData gives the
    interruptions of its own spot instances by type and zone. recommend counts them on top of the Spot Advisor's band,
    which weighs ten, in place of those that catalog learn read before.

    \b
    Example:
      gpufleet catalog refresh
      gpufleet catalog refresh --region us-east-1 --region eu-west-1
    """
    chosen = tuple(dict.fromkeys(regions)) or enabled_regions()
    with steps("prices of regions", len(chosen)) as advance:
        result = refresh_regions(chosen, progress=advance)
    rows = [
        {
            "region": answer.region,
            "types": answer.types and len(answer.types),
            "zones": answer.zones and len(answer.zones),
            "on_demand": answer.prices and len(answer.prices),
            "reserved_1yr": answer.prices and sum(price.reserved_1yr is not None for price in answer.prices.values()),
            "spot": answer.spot and sum(map(len, answer.spot.values())),
            "unit_prices": len(answer.units),
            "own_pools": len(answer.own_pools),
            "failed": len(answer.failures),
        }
        for answer in result.answers
    ]
    write_rows(rows, {name: name.replace("_", " ") for name in rows[0]}, output_format)
    for answer in result.answers:
        write_notes(answer.notes)
    write_notes(result.dropped)
    say(f"written to {result.directory}", err=True)
    if os.environ.get(DIRECTORY_VARIABLE):
        say(f"note: {DIRECTORY_VARIABLE} is set: commands read {os.environ[DIRECTORY_VARIABLE]}", err=True)


def _summary(catalog: Catalog) -> dict[str, Any]:
    return {
        "catalog": catalog.origin,
        "made_at": catalog.made_at.isoformat(),
        "as_of": catalog.as_of.isoformat(),
        "instance_types": len(catalog.instance_types),
        "regions": len(catalog.regions),
        "offers": len(catalog.offers),
        "unit_prices": len(catalog.unit_prices),
    }


def _source_row(source: Source) -> dict[str, Any]:
    return {
        **source.to_dict(),
        "age_days": ttl.age_days(source.as_of),
        "ttl_days": ttl.source_ttl_days(source.name, source.origin),
        "stale": "yes" if ttl.is_old(source) else "no",
    }
