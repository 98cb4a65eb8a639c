"""``gpufleet offers``: priced instance types, one row a type and region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import click

from optimizer.aws import ttl
from optimizer.catalog import load
from optimizer.catalog.model import Catalog
from optimizer.catalog.select import Filter, PricedAs, Range, SortKey, parse_range, price_of, select, sort
from optimizer.clouds.providers import CLOUDS
from optimizer.commands.output import format_option, write_catalog_notes, write_rows
from optimizer.errors import DataMissingError, NothingFeasibleError
from optimizer.hardware import Offer

if TYPE_CHECKING:
    from optimizer.clouds.offers import CloudOffer

# Published: programs read these names. Listed by hand, so that a new attribute cannot change the format; further ones
# go to the end.
COLUMNS = (
    "instance_type",
    "region",
    "gpu",
    "gpu_count",
    "gpu_memory_gib",
    "vcpus",
    "memory_gib",
    "network_gbit_per_s",
    "efa_cards",
    "interconnect",
    "on_demand_usd_per_hour",
    "reserved_1yr_usd_per_hour",
    "spot_usd_per_hour",
    "spot_source",
    "as_of",
    "reserved_1yr_as_of",
    "spot_as_of",
    "spot_zone_id",
    "interruption_low",
    "interruption_high",
    "nvme_gb",
    "network_cards",
    "cpu_architecture",
    "gpu_key",
    "zone_ids",
    "on_demand_source",
    "facts_source",
    "cloud",
    "fabric",
    "note",
)
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
    "spot_usd_per_hour": "spot $/h",
    "spot_source": "spot source",
    "interrupted": "interrupted",
    "as_of": "priced",
}
# Other clouds have none of the columns that only AWS publishes.
CLOUD_TABLE = {
    "cloud": "cloud",
    **{name: TABLE[name] for name in list(TABLE)[: list(TABLE).index("efa_cards")]},
    "fabric": "fabric",
    "interconnect": TABLE["interconnect"],
    "on_demand_usd_per_hour": TABLE["on_demand_usd_per_hour"],
    "spot_usd_per_hour": TABLE["spot_usd_per_hour"],
    "as_of": TABLE["as_of"],
    "note": "note",
}


def _range(_: click.Context, __: click.Parameter, value: str | None) -> Range:
    try:
        return Range() if value is None else parse_range(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _finite(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a price; write USD an hour, like 12.50")
    return value


@click.command()
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
@click.option("--type", "types", multiple=True, metavar="PATTERN", help="Instance type or pattern (p5*); repeatable.")
@click.option(
    "--max-price",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    metavar="USD",
    help="Highest price of an hour.",
)
@click.option(
    "--price",
    "priced_as",
    type=click.Choice(get_args(PricedAs)),
    default="on-demand",
    show_default=True,
    help="The price that --max-price and --sort look at.",
)
@click.option(
    "--sort",
    "sort_key",
    type=click.Choice(get_args(SortKey)),
    default="price-per-gpu",
    show_default=True,
    help="Order of the rows.",
)
@click.option(
    "--max-age",
    type=click.IntRange(min=0),
    metavar="DAYS",
    help="End with exit status 4 if a price shown is older than this.",
)
@format_option
def command(
    cloud: str,
    gpus: tuple[str, ...],
    count: Range,
    memory: Range,
    regions: tuple[str, ...],
    types: tuple[str, ...],
    max_price: float | None,
    priced_as: PricedAs,
    sort_key: SortKey,
    max_age: int | None,
    output_format: str,
) -> None:
    """List instance types with their prices, one row a type and region.

    AWS's, or with --cloud those of Azure, Tencent Cloud and Alibaba Cloud; prices not in USD are converted at a rate
    whose source and date on_demand_source gives. A row without a price says why in its note.

    A RANGE is 8 (exactly), 8.. (at least), ..8 (at most) or 2..8. A price nobody published is a dash (an empty field
    in CSV, null in JSON). as_of is the date of the on-demand price; reserved_1yr_as_of and spot_as_of are those of the
    others. A spot price "advisor-derived" is on-demand x (1 - the Spot Advisor's saving), not a price AWS charged.
    Where no row has the price that --price names, exit status 4.

    \b
    Example:
      gpufleet offers --gpu H100 --count 8 --region 'us-*'
      gpufleet offers --memory 80.. --price spot --max-price 20 --sort price
      gpufleet offers --type 'p5*' --format csv
      gpufleet offers --cloud all --gpu A100 --count 8
    """
    catalog = load()
    others: dict[tuple[str, str], CloudOffer] = {}
    if cloud in ("aws", "all"):
        write_catalog_notes(catalog)
    if cloud != "aws":
        catalog, others = _join_clouds(catalog, cloud)
    chosen = Filter(
        gpus=gpus,
        count=count,
        memory_gib=memory,
        regions=regions,
        types=types,
        max_price_usd_per_hour=max_price,
        priced_as=priced_as,
    )
    offers = sort(select(catalog, chosen), sort_key, priced_as)
    _check_priced(select(catalog, replace(chosen, max_price_usd_per_hour=None)), priced_as, cloud)
    if max_age is not None:
        ttl.check_max_age(offers, max_age, next_step=_next_step(cloud))
    rows = [row(offer, others.get((offer.instance.name, offer.region))) for offer in offers]
    table = TABLE if cloud == "aws" else CLOUD_TABLE
    columns = table if output_format == "table" else {name: name for name in COLUMNS}
    if offers or output_format != "table":
        write_rows(rows, columns, output_format)
    if not offers:
        raise NothingFeasibleError(
            f"none of {len(catalog.offers)} offers passes all the filters",
            next_step="drop one filter at a time; gpufleet offers without filters lists everything",
        )


def _next_step(cloud: str) -> str:
    """Advice where prices are too old; empty for AWS, whose advice names the region."""
    if cloud == "all":
        refreshes = [each.next_step for each in CLOUDS.values() if each.price_api]
        return ", and ".join(["gpufleet catalog refresh", *refreshes])
    return CLOUDS[cloud].next_step if cloud in CLOUDS else ""


def _check_priced(offers: Sequence[Offer], priced_as: PricedAs, cloud: str) -> None:
    """Refuse to sort and filter by a kind of price that none of the offers has.

    Raises:
        DataMissingError: naming the kind.
    """
    if not offers or priced_as == "on-demand" or any(price_of(offer, priced_as) for offer in offers):
        return
    refreshable = priced_as == "spot" and cloud in CLOUDS and CLOUDS[cloud].price_api
    raise DataMissingError(
        f"none of {len(offers)} offers has a {priced_as} price",
        why="no source has one"
        if cloud in ("aws", "all")
        else "other clouds' rows have on-demand prices only, but for Azure's spot prices after a refresh",
        next_step=CLOUDS[cloud].next_step if refreshable else "leave out --price",
    )


def _join_clouds(catalog: Catalog, cloud: str) -> tuple[Catalog, dict[tuple[str, str], CloudOffer]]:
    """A catalog with the asked cloud's offers, and other clouds' own facts by type and region."""
    # Here: offers of AWS alone must not wait for it.
    from optimizer.clouds.offers import join_catalog, load_offers, price_notes

    clouds = load_offers(tuple(CLOUDS) if cloud == "all" else (cloud,))
    for note in price_notes(clouds):
        click.echo(f"note: {note}", err=True)
    by_place = {(other.offer.instance.name, other.offer.region): other for other in clouds.offers}
    return join_catalog(catalog, clouds, aws=cloud == "all"), by_place


def row(offer: Offer, other: CloudOffer | None = None) -> dict[str, Any]:
    """An offer with the published field names; whole numbers without a decimal point.

    Args:
        offer: facts and prices.
        other: the same offer as another cloud's, of which disks and cards are not known; None for AWS's.
    """
    instance, band = offer.instance, offer.interruption_band
    return {
        "instance_type": instance.name,
        "region": offer.region,
        "gpu": instance.gpu.name,
        "gpu_count": _whole(instance.gpu_count),
        "gpu_memory_gib": _whole(instance.gpu_memory_gib),
        "vcpus": instance.vcpus,
        "memory_gib": _whole(instance.memory_gib),
        "network_gbit_per_s": _whole(instance.network_gbit_per_s) or None,
        "efa_cards": instance.efa_cards,
        "interconnect": instance.interconnect,
        "on_demand_usd_per_hour": offer.on_demand.usd_per_hour if offer.on_demand else None,
        "reserved_1yr_usd_per_hour": offer.reserved_1yr.usd_per_hour if offer.reserved_1yr else None,
        "spot_usd_per_hour": offer.spot.usd_per_hour if offer.spot else None,
        "spot_source": offer.spot.source if offer.spot else None,
        "as_of": offer.on_demand.as_of.isoformat() if offer.on_demand else None,
        "reserved_1yr_as_of": offer.reserved_1yr.as_of.isoformat() if offer.reserved_1yr else None,
        "spot_as_of": offer.spot.as_of.isoformat() if offer.spot else None,
        "spot_zone_id": (offer.spot.zone_id or None) if offer.spot else None,
        "interruption_low": band[0] if band else None,
        "interruption_high": band[1] if band else None,
        "interrupted": _band(band),
        "nvme_gb": None if other else _whole(instance.nvme_gb),
        "network_cards": None if other else instance.network_cards,
        "cpu_architecture": instance.cpu_architecture,
        "gpu_key": instance.gpu.key,
        "zone_ids": " ".join(offer.zone_ids) or None,
        "on_demand_source": offer.on_demand.source if offer.on_demand else None,
        "facts_source": instance.source,
        "cloud": other.cloud if other else "aws",
        "fabric": other.fabric if other else "efa" if instance.efa_cards else "ethernet",
        "note": (other.note or None) if other else None,
    }


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _band(band: tuple[float, float | None] | None) -> str | None:
    if band is None:
        return None
    low, high = band
    if high is None:
        return f">{low:.0%}"
    return f"<{high:.0%}" if low == 0 else f"{100 * low:.0f}-{high:.0%}"
