"""Old spot prices: the note on them, and ``recommend --refresh``, which reads today's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bootstrap.contract.words import counted
from optimizer.catalog import Catalog, load
from optimizer.catalog.snapshot import DIRECTORY_VARIABLE
from optimizer.commands.output import say, write_notes
from optimizer.commands.progress import steps
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.recommend import Recommendation

# Binding constraints that another price could loosen.
_OF_PRICE = ("budget", "price")


def refresh_spot_prices(answer: Recommendation) -> Catalog:
    """Read today's spot prices for the request of an answer and return the catalog with them.

    Raises:
        InvalidInputError: the catalog is a fixed one, or the request takes no spot nodes.
        GpufleetError: no region answered.
    """
    from optimizer.catalog.refresh import enabled_regions, refresh_spot  # boto3 takes half a second

    problem = answer.problem
    if os.environ.get(DIRECTORY_VARIABLE):
        raise InvalidInputError(
            f"--refresh is set, and {DIRECTORY_VARIABLE} names {os.environ[DIRECTORY_VARIABLE]}",
            why="a refresh writes the user's catalog, which is not read then",
            next_step=f"unset {DIRECTORY_VARIABLE}",
        )
    options = problem.request.constraints.purchase_options
    if "spot" not in options:
        raise InvalidInputError(
            f"--refresh is set, and purchase_options are {', '.join(options)}",
            limit="a request that may take spot nodes",
            next_step="add --purchase spot, or leave --refresh out",
        )
    ruled_out = {entry.instance_type for entry in answer.rejected if entry.binding_constraint not in _OF_PRICE}
    types = {instance.name for instance in problem.instance_types} - ruled_out
    regions = sorted(set(problem.regions) & set(enabled_regions()))
    if not types or not regions:
        return problem.catalog
    with steps("spot prices of regions", len(regions)) as advance:
        result = refresh_spot(regions, types, progress=advance)
    for region in result.answers:
        write_notes((*region.skipped, *region.failures))
    write_notes(result.dropped)
    say(f"spot prices of {counted(len(types), 'type')} in {counted(len(regions), 'region')} are of today", err=True)
    return load()


def old_price_note(plans: Sequence[FleetPlan], *, brief: bool = False) -> str:
    """Say what the best spot plan at an old price costs and what a refresh settles; empty where it is no cheaper."""
    number, plan = next(((i, plan) for i, plan in enumerate(plans, start=1) if plan.spot_range), (0, None))
    if plan is None or plan.spot_range is None:
        return ""
    first = plans[0]
    if plan is not first and plan.cost_usd.expected >= first.cost_usd.expected:
        return ""
    prices, cost = plan.spot_range, plan.cost_usd
    if brief:
        what = "none is current" if plan is first else "none is first"
        return f"spot prices (~) are {counted(prices.age_days, 'day')} old, {what}: --refresh reads today's"
    days = f"{counted(prices.age_days, 'day')} old (limit: {prices.limit_days})"
    place = f"in {plan.purchase.zone_id}" if plan.purchase.zone_id else f"in {plan.region}, derived"
    text = f"spot prices are {days}: plan {number} costs {cost.expected:,.2f} USD {place}"
    text += f" ({cost.p95:,.2f} at the 95th percentile, with the spread of that age)"
    if prices.zones > 1:
        text += f", {prices.cost_usd_dearest:,.2f} expected in the dearest of {prices.zones} zones"
    if first.spot_range:
        return f"{text}; no plan at a current price is within the request; a refresh settles the price and the zone"
    return (
        f"{text}; plan 1 ({first.purchase.option}) is first at a current price, {first.cost_usd.expected:,.2f} USD; a "
        "refresh settles whether spot is cheaper, and in which zone"
    )


def refresh_offer() -> str:
    """Say how to refresh, for this machine; IMDS is not asked, as that takes seconds where there is none."""
    environment = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials",
        os.environ.get("AWS_CONFIG_FILE") or Path.home() / ".aws" / "config",
    )
    # https://docs.aws.amazon.com/boto3/latest/guide/credentials.html
    if any(os.environ.get(name) for name in environment) or any(Path(file).is_file() for file in files):
        return "AWS credentials are at hand, --refresh reads today's"
    return "--refresh reads today's, with credentials"
