"""``gpufleet offers``: priced instance types, one row a type and region."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import click

from optimizer.catalog import load
from optimizer.catalog.select import ANY, PricedAs, Range, parse_range, price_of, select, sort
from optimizer.clouds.offers import CLOUDS, CloudOffer, join_catalog, load_offers, price_notes
from optimizer.commands.long_help import LongCommand
from optimizer.commands.output import format_option, write_notes, write_rows, write_truer
from optimizer.contract.errors import DataMissingError, NothingFeasibleError
from optimizer.contract.hardware import HourlyPrice, InterruptionBand, Offer, break_even_hours


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _of(market: str, part: str) -> Callable[[Offer], Any]:
    """Return the reader of a part of an offer's price in a market; None where there is none."""
    return lambda offer: getattr(getattr(offer, market), part, None)


def _pays_from(commitment: HourlyPrice | None, other: HourlyPrice | None) -> int | None:
    hours = break_even_hours(commitment, other)
    return None if hours is None else math.ceil(hours)


# Published: programs read these names, in this order; further ones go to the end.
FIELDS: dict[str, Callable[[Offer], Any]] = {
    "instance_type": lambda offer: offer.instance.name,
    "region": lambda offer: offer.region,
    "gpu": lambda offer: offer.instance.gpu.name,
    "gpu_count": lambda offer: _whole(offer.instance.gpu_count),
    "gpu_memory_gib": lambda offer: _whole(offer.instance.gpu_memory_gib),
    "vcpus": lambda offer: offer.instance.vcpus,
    "memory_gib": lambda offer: _whole(offer.instance.memory_gib),
    "network_gbit_per_s": lambda offer: _whole(offer.instance.network_gbit_per_s) or None,
    "efa_cards": lambda offer: offer.instance.efa_cards,
    "interconnect": lambda offer: offer.instance.interconnect,
    "on_demand_usd_per_hour": _of("on_demand", "usd_per_hour"),
    "reserved_1yr_usd_per_hour": _of("reserved_1yr", "usd_per_hour"),
    "spot_usd_per_hour": _of("spot", "usd_per_hour"),
    "spot_source": _of("spot", "source"),
    "as_of": _of("on_demand", "as_of"),
    "reserved_1yr_as_of": _of("reserved_1yr", "as_of"),
    "spot_as_of": _of("spot", "as_of"),
    "spot_zone_id": lambda offer: (offer.spot.zone_id or None) if offer.spot else None,
    "interruption_low": _of("interruptions", "low"),
    "interruption_high": _of("interruptions", "high"),
    "nvme_gb": lambda offer: _whole(offer.instance.nvme_gb),
    "network_cards": lambda offer: offer.instance.network_cards,
    "cpu_architecture": lambda offer: offer.instance.cpu_architecture,
    "gpu_key": lambda offer: offer.instance.gpu.key,
    "zone_ids": lambda offer: " ".join(offer.zone_ids) or None,
    "on_demand_source": _of("on_demand", "source"),
    "facts_source": lambda offer: offer.instance.source,
    "cloud": lambda _: "aws",
    "fabric": lambda offer: "efa" if offer.instance.efa_cards else "ethernet",
    "note": lambda _: None,
    "spot_by_zone": lambda offer: (
        " ".join(f"{p.zone_id}={p.usd_per_hour:g}" for p in offer.spot_by_zone if p.zone_id) or None
    ),
    "reserved_1yr_source": _of("reserved_1yr", "source"),
    "capacity_block_usd_per_hour": _of("capacity_block", "usd_per_hour"),
    "capacity_block_source": _of("capacity_block", "source"),
    "capacity_block_as_of": _of("capacity_block", "as_of"),
    "reserved_1yr_break_even_hours": lambda offer: _pays_from(offer.reserved_1yr, offer.on_demand),
    "reserved_1yr_spot_break_even_hours": lambda offer: _pays_from(offer.reserved_1yr, offer.spot),
}
TABLE = {
    "instance_type": "type",
    "region": "region",
    "gpu": "GPU",
    "gpu_count": "GPUs",
    "gpu_memory_gib": "GiB each",
    "vcpus": "vCPUs",
    "memory_gib": "RAM GiB",
    "network_gbit_per_s": "Gbit/s",
    "efa_cards": "EFA",
    "interconnect": "link",
    "on_demand_usd_per_hour": "on-demand $/h",
    "reserved_1yr_usd_per_hour": "reserved $/h",
    "reserved_1yr_break_even_hours": "pays from h/year",
    "capacity_block_usd_per_hour": "block $/h",
    "spot_usd_per_hour": "spot $/h",
    "spot_source": "spot source",
    "interrupted": "interrupted",
    "as_of": "priced",
}
# Columns that a narrow table leaves out, in this order.
SPARE = (
    *("capacity_block_usd_per_hour", "reserved_1yr_break_even_hours", "spot_source", "memory_gib", "vcpus"),
    *("reserved_1yr_usd_per_hour", "efa_cards", "fabric", "interconnect"),
    *("interrupted", "network_gbit_per_s", "note", "as_of", "gpu_memory_gib", "cloud"),
)
# Without the columns that only AWS publishes.
_CLOUD = (
    *("cloud", "instance_type", "region", "gpu", "gpu_count", "gpu_memory_gib", "vcpus", "memory_gib"),
    *("network_gbit_per_s", "fabric", "interconnect", "on_demand_usd_per_hour", "spot_usd_per_hour", "as_of", "note"),
)
CLOUD_TABLE = {name: TABLE.get(name, name) for name in _CLOUD}


def _range(_: click.Context, __: click.Parameter, value: str | None) -> Range:
    try:
        return ANY if value is None else parse_range(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(
    cls=LongCommand,
    epilog="""\b
Example:
  gpufleet offers --gpu H100 --count 8 --region 'us-*'
  gpufleet offers --memory 80.. --price spot
  gpufleet offers --instance-type 'p5*' --format csv
  gpufleet offers --cloud all --gpu A100 --count 8
""",
)
@click.option(
    "--cloud",
    type=click.Choice(["aws", *CLOUDS, "all"]),
    default="aws",
    show_default=True,
    help="Whose instance types; gpufleet provisions on AWS only, the others are for comparing prices.",
)
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="GPU model (H100) or key (a100-80gb); repeatable.")
@click.option("--count", callback=_range, metavar="RANGE", help="GPUs of one instance.")
@click.option(
    "--memory",
    callback=_range,
    metavar="RANGE",
    help="Memory of one GPU in GiB, as EC2 reports it (A10G and L4: 22.4).",
)
@click.option("--region", "regions", multiple=True, metavar="PATTERN", help="Region or pattern (us-*); repeatable.")
@click.option("--instance-type", "instance_types", multiple=True, metavar="TYPE", help="Type or p5*; repeatable.")
@click.option(
    "--price",
    "priced_as",
    type=click.Choice(get_args(PricedAs)),
    default="on-demand",
    show_default=True,
    help="The price by which the rows are sorted, a GPU's cheapest first.",
)
@format_option
def command(
    cloud: str,
    gpus: tuple[str, ...],
    count: Range,
    memory: Range,
    regions: tuple[str, ...],
    instance_types: tuple[str, ...],
    priced_as: PricedAs,
    output_format: str,
) -> None:
    """List instance types with their prices, one row a type and region.

    --cloud lists Azure's, Tencent Cloud's or Alibaba Cloud's types in place of AWS's; other currencies are converted at
    a rate whose source and date on_demand_source gives. A row without a price says why in its note.

    A RANGE is 8 (exactly), 8.. (at least), ..8 (at most) or 2..8. A price nobody published is a dash (an empty field
    in CSV, null in JSON). as_of is the date of the on-demand price; reserved_1yr_as_of and spot_as_of are the others'.
    A commitment is paid for its whole term, used or not: reserved_1yr_break_even_hours is the use in a year from which
    a one-year reservation costs less than on-demand, reserved_1yr_spot_break_even_hours than spot. A Capacity Block's
    rate is the published one; AWS offers each block at its own price.
    A spot price "advisor-derived" is on-demand x (1 - the Spot Advisor's saving), not a price AWS charged. Exit status
    4: no row has the price that --price names.
    """
    catalog = load()
    others: Sequence[CloudOffer] = ()
    write_notes(catalog.notes)
    if cloud != "aws":
        others = load_offers(tuple(CLOUDS) if cloud == "all" else (cloud,))
        write_notes(price_notes(others))
        catalog = join_catalog(catalog, others, aws=cloud == "all")
    chosen = select(catalog, gpus=gpus, count=count, memory_gib=memory, regions=regions, types=instance_types)
    offers = sort(chosen, priced_as)
    if offers and priced_as != "on-demand" and not any(price_of(offer, priced_as) for offer in offers):
        raise DataMissingError(
            f"no offer of {len(offers):,} has a {priced_as} price",
            why="no source has one" if cloud in ("aws", "all") else "other clouds' rows have on-demand prices only",
            next_step="leave out --price",
        )
    by_place = {(other.offer.instance.name, other.offer.region): other for other in others}
    rows = [row(offer, by_place.get((offer.instance.name, offer.region))) for offer in offers]
    table = TABLE if cloud == "aws" else CLOUD_TABLE
    columns = table if output_format == "table" else {name: name for name in FIELDS}
    if offers or output_format != "table":
        write_rows(rows, columns, output_format, spare=SPARE)
    if not offers:
        raise NothingFeasibleError(
            f"no offer of {len(catalog.offers):,} passes all the filters",
            next_step="drop one filter at a time; gpufleet offers without filters lists everything",
        )
    if cloud in ("aws", "all"):
        write_truer(catalog)


def row(offer: Offer, other: CloudOffer | None = None) -> dict[str, Any]:
    """An offer by published field names, and "interrupted" for the table; ``other`` has another cloud's own facts."""
    fields = {name: read(offer) for name, read in FIELDS.items()} | {"interrupted": _band(offer.interruptions)}
    if other:
        fields |= {"cloud": other.cloud, "fabric": other.fabric, "note": other.note or None}
        fields |= {"nvme_gb": None, "network_cards": None}
    return fields


def _band(band: InterruptionBand | None) -> str | None:
    if band is None:
        return None
    low, high, *_ = band
    if high is None:
        return f">{low:.0%}"
    return f"<{high:.0%}" if low == 0 else f"{100 * low:.0f}-{high:.0%}"
