"""``gpufleet blocks``: find Capacity Blocks that AWS offers, list them by their days, and buy one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

import click

from bootstrap.contract.codec import time_text
from bootstrap.contract.timings import BLOCK_TAIL, BOOT, HOUR
from bootstrap.contract.words import counted
from optimizer.aws import blocks, clients, errors
from optimizer.aws.blocks import Offering, Search
from optimizer.catalog import load
from optimizer.commands.asking import dry_run_option, is_dry_run, require_terminal
from optimizer.commands.long_help import LongCommand
from optimizer.commands.options import F, WholeSentences, plan_arguments, read_plan_argument
from optimizer.commands.output import format_option, say, write_rows
from optimizer.commands.progress import patience
from optimizer.contract.errors import GpufleetError, InvalidInputError, NothingFeasibleError
from optimizer.contract.plan import FleetPlan, usable_hours

# Days of a calendar. A block starts up to eight weeks ahead:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html
CALENDAR, MOST_AHEAD = timedelta(days=60), timedelta(weeks=8)
region_option = click.option("--region", metavar="REGION", help="Region.  [default: PLAN's]")

# Published: programs read these names, in this order; further ones go to the end.
FIELDS: dict[str, Callable[[Offering], Any]] = {
    "offering_id": lambda offering: offering.id,
    "instance_type": lambda offering: offering.search.instance_type,
    "region": lambda offering: offering.search.region,
    "zone": lambda offering: offering.zone,
    "nodes": lambda offering: offering.nodes,
    "start": lambda offering: time_text(offering.times.start),
    "end": lambda offering: time_text(offering.times.end),
    "hours": lambda offering: round(offering.hours, 2),
    "upfront_usd": lambda offering: float(offering.usd),
    "usd_per_node_hour": lambda offering: round(offering.usd_per_node_hour, 4),
    "surplus_nodes": lambda offering: offering.nodes - offering.search.nodes,
    "usable_hours": lambda offering: round(usable_hours([offering.times], datetime.now(UTC)), 2),
}
COLUMNS = {name: name.replace("_", " ") for name in (*FIELDS, "fits_p95")}
SPARE = ("region", "instance_type", "surplus_nodes", "usable_hours", "end", "zone")


def search_options(function: F) -> F:
    """Add PLAN, ``--plan`` and where and when to search."""
    day = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"])
    until = click.option("--until", type=day, metavar="DATE", help="Latest end, UTC: 2026-12-24.")
    start = click.option("--from", "start", type=day, metavar="DATE", help="Earliest start, UTC.  [default: now]")
    return plan_arguments(region_option(start(until(function))))


@click.group(cls=WholeSentences)
def command() -> None:
    """Find Capacity Blocks, GPU nodes of given days paid upfront, and buy one.

    \b
    Example:
      gpufleet blocks calendar plans.json
      gpufleet blocks buy cb-0123456789abcdef0 plans.json
    """


@command.command()
@search_options
@format_option
def find(plan: str, plan_number: int, output_format: str, **flags: Any) -> None:
    """List the Capacity Blocks that AWS offers for PLAN's nodes and hours.

    AWS offers up to six blocks, of about the length asked for, all ending at 11:30 UTC. fits_p95 says whether PLAN's
    hours at the 95th percentile and its last checkpoint end before AWS ends the instances, 30 minutes before the
    block's end. Blocks of the same nodes can follow each other in one run: --from and --until find one for a part of
    it. Nothing is bought. Needs the permission ec2:DescribeCapacityBlockOfferings.

    Exit status: 0 found, 1 AWS cannot be asked, 2 wrong usage, 3 none is offered, or none that PLAN fits into.

    \b
    Example:
      gpufleet blocks find plans.json --from 2026-12-01
      gpufleet blocks find plans.json --region us-east-2 --format csv
    """
    chosen = read_plan_argument(plan, plan_number)
    search = _search(chosen, **flags)
    _answer(_offered(search), search, chosen, plan, plan_number, output_format)


@command.command()
@plan_arguments
@region_option
@format_option
def calendar(plan: str, plan_number: int, region: str | None, output_format: str) -> None:
    """List the Capacity Blocks of the next 60 days for PLAN's nodes and hours, the earliest first.

    AWS answers with few blocks at once, so each week is asked for by itself; all else is as of find.

    \b
    Example:
      gpufleet blocks calendar plans.json
    """
    chosen = read_plan_argument(plan, plan_number)
    whole = _search(chosen, region=region, start=None, until=None)
    now = datetime.now(UTC).replace(microsecond=0)
    found: dict[str, Offering] = {}
    for day in range(0, MOST_AHEAD.days, 7):
        is_last = day + 7 >= MOST_AHEAD.days
        until = now + (CALENDAR if is_last else timedelta(days=day + 7)) + timedelta(hours=whole.hours)
        search = replace(whole, start=now + timedelta(days=day) if day else None, until=until)
        found = {offering.id: offering for offering in _offered(search)} | found
    _answer(sorted(found.values(), key=lambda each: each.times.start), whole, chosen, plan, plan_number, output_format)


def _answer(
    offered: Sequence[Offering], whole: Search, plan: FleetPlan, path: str, plan_number: int, output_format: str
) -> None:
    """Print offerings, and how to buy the cheapest that the plan fits into."""
    now, needed = datetime.now(UTC), plan.hours_with_nodes.p95
    fitting = [each for each in offered if blocks.train_hours(plan, each.times, now) >= needed]
    rows = [{name: read(each) for name, read in FIELDS.items()} | {"fits_p95": each in fitting} for each in offered]
    if rows or output_format != "table":
        write_rows(rows, COLUMNS, output_format, spare=SPARE)
    if not fitting:
        short = f" that {needed:.1f} h fit into; {len(offered)} are too short" if offered else ""
        raise NothingFeasibleError(
            f"AWS offers no Capacity Block of {whole} in {whole.region}{short}",
            next_step="another --region, --from or --until; fewer nodes; several blocks, which follow each other",
        )
    cheapest = min(fitting, key=lambda each: each.usd)
    say(f"next: {_buy(cheapest, path, plan_number)}", err=True)


@command.command(
    cls=LongCommand,
    epilog="""\b
Example:
  gpufleet blocks buy cb-0123456789abcdef0 plans.json
  gpufleet blocks buy cb-0123456789abcdef0 plans.json --buy
  gpufleet blocks buy cb-0123456789abcdef0 plans.json --buy --price 10352.26
""",
)
@click.argument("offering_id")
@search_options
@dry_run_option
@click.option("--buy", "buys", is_flag=True, help="Buy it: asks for the exact price first.")
@click.option("--price", metavar="USD", help="The exact price, in place of typing it (scripts); needs --buy.")
def buy(offering_id: str, plan: str, plan_number: int, buys: bool, price: str | None, **flags: Any) -> None:
    """Buy the Capacity Block OFFERING_ID of blocks find; without --buy, show only what it would buy.

    Give the PLAN and the flags that found it: AWS tells an offering's price only as an answer to a search. A block is
    paid at once, for all of its hours, and cannot be cancelled or given back. --buy asks for the exact price to be
    typed; no flag but --price, the same price, stands in for it, and a price that is not the offering's current one
    buys nothing. Nor is a block bought a second time (same type, zone, nodes and times), or one that ends before PLAN
    trains. AWS's call to buy cannot be repeated safely, so it is sent once; where its outcome is unknown, the command
    says how to look.

    Afterwards the lines for the request are printed that make a plan for the block: its start and end follow. Without
    --buy AWS is only asked for the price. Needs ec2:DescribeCapacityBlockOfferings,
    ec2:DescribeCapacityReservations and ec2:PurchaseCapacityBlock, which gpufleet stack policy does not list.

    Exit status: 0 bought, or still offered; 1 refused by AWS, or unknown; 2 wrong usage or price; 3 not offered (any
    more), or too short for PLAN.
    """
    if price is not None and not buys:
        raise click.UsageError("--price buys nothing without --buy")
    typed = None if price is None else _parse_price(price)
    chosen = read_plan_argument(plan, plan_number)
    search = _search(chosen, **flags)
    offering = _find_buyable(search, offering_id, chosen)
    say(_describe(offering, chosen))
    again = _buy(offering, plan, plan_number)
    if not buys or is_dry_run():
        say(f"nothing was bought; to buy it: {again} --buy")
        return
    if typed is None:
        require_terminal(why="a block is paid at once and cannot be given back", next_step=f"{again} --buy --price USD")
        typed = _parse_price(click.prompt("It cannot be given back. Type its exact price in USD to buy it", err=True))
        # The block may have been sold, or have another price, while a person read.
        offering = _find_buyable(search, offering_id, chosen)
    if typed != offering.usd:
        raise InvalidInputError(
            f"the price given is {typed} USD",
            limit=f"{offering.usd} USD, what AWS asks for {offering_id} now",
            why="nothing was bought: a block cannot be given back",
            next_step=again,
        )
    say(_afterwards(offering, _purchase(offering)))


def _search(plan: FleetPlan, *, region: str | None, start: datetime | None, until: datetime | None) -> Search:
    """Return the search that PLAN and the flags ask for, of a part of the run where their days hold no more."""
    if plan.node_count > blocks.MOST_NODES:
        raise InvalidInputError(
            f"{plan.node_count} nodes are wanted",
            limit=f"{blocks.MOST_NODES}, the largest Capacity Block",
            why="a fleet runs in one reservation",
            next_step=f"gpufleet recommend --max-nodes {blocks.MOST_NODES}",
        )
    now = datetime.now(UTC)
    begin, end = (day and day.replace(tzinfo=UTC) for day in (start, until))
    begin = begin if begin and begin > now else None
    window_hours = (end - (begin or now)) / HOUR if end else math.inf
    if end and window_hours <= 0:
        raise click.UsageError(f"--until {time_text(end)} is not after the earliest start")
    hours = plan.hours_with_nodes.p95 + (BLOCK_TAIL + timedelta(seconds=plan.reserve_s)) / HOUR
    return Search(
        instance_type=plan.instance_type,
        region=load().check_region(region or plan.region),
        nodes=plan.node_count,
        hours=blocks.block_hours(hours, window_hours),
        start=begin,
        until=end,
    )


def _buy(offering: Offering, path: str, plan_number: int) -> str:
    """Return the command that makes the search again, and shows the offering."""
    search = offering.search
    dates = {"--from": search.start, "--until": search.until}
    number = ["--plan", str(plan_number)] if plan_number > 1 else []
    given = (word for name, day in dates.items() if day for word in (name, time_text(day)))
    return shlex.join(["gpufleet", "blocks", "buy", offering.id, path, *number, "--region", search.region, *given])


def _offered(search: Search) -> list[Offering]:
    with (
        patience("asking AWS"),
        errors.explained("AWS cannot be asked", next_step="credentials that allow ec2:DescribeCapacityBlockOfferings"),
    ):
        return blocks.find(clients.ec2(search.region), search)


def _find_buyable(search: Search, offering_id: str, plan: FleetPlan) -> Offering:
    offered = _offered(search)
    offering = next((each for each in offered if each.id == offering_id), None)
    if offering is None:
        raise NothingFeasibleError(
            f"{offering_id} is not among the {counted(len(offered), 'block')} of {search} that AWS offers "
            f"in {search.region} now",
            why="it is sold, or another search found it; without it its price is not known, so nothing was bought",
            next_step="gpufleet blocks find with the same PLAN and flags",
        )
    if blocks.train_hours(plan, offering.times, datetime.now(UTC)) <= BOOT / HOUR:
        raise NothingFeasibleError(
            f"{offering.id} ends before the run trains in it",
            why="AWS ends the instances 30 minutes before a block's end, and the last checkpoint is saved before",
            next_step="gpufleet blocks find PLAN",
        )
    with errors.explained("AWS cannot be asked", next_step="credentials that allow ec2:DescribeCapacityReservations"):
        there = blocks.bought(clients.ec2(search.region), offering)
    if there:
        raise GpufleetError(
            f"the account has this block already: {there[0]['CapacityReservationId']} ({there[0]['State']}), of the "
            "same type, zone, nodes and times",
            why="a second one would be paid too; nothing was bought now",
            next_step=f"put it into the request's existing_reservations: {_look(search)}",
        )
    return offering


def _describe(offering: Offering, plan: FleetPlan) -> str:
    surplus, hours = offering.nodes - plan.node_count, blocks.train_hours(plan, offering.times, datetime.now(UTC))
    lines = [
        f"{offering.id}: {offering.nodes} x {plan.instance_type} in {offering.zone} ({offering.search.region})",
        f"from {time_text(offering.times.start)} to {time_text(offering.times.end)}, {offering.hours:.1f} h; "
        "AWS ends the instances 30 minutes before",
        f"price: {offering.usd} USD upfront, {offering.usd_per_node_hour:,.2f} USD a node and hour",
    ]
    if surplus:
        lines.append(f"surplus: {counted(surplus, 'node')} more than asked for, paid too")
    if hours < (needed := plan.hours_with_nodes.p95):
        lines.append(
            f"a part of the run: it trains {hours:.1f} h, of {needed:.1f} h at the 95th percentile; the rest "
            "takes further blocks of the same nodes, or spot_fallback: on-demand"
        )
    return "\n".join(lines)


def _parse_price(text: str) -> Decimal:
    try:
        return Decimal(text.strip())
    except InvalidOperation:
        raise InvalidInputError(
            f"{text!r} is not a price", limit="USD without separators, like 10352.26", why="nothing was bought"
        ) from None


def _purchase(offering: Offering) -> Any:
    """Buy an offering; every failure says whether it may have been bought."""
    search = offering.search
    try:
        return blocks.buy(clients.ec2_once(search.region), offering)
    except (Exception, KeyboardInterrupt) as error:
        reason = errors.reason(error) if errors.is_aws_error(error) else repr(error)
        if blocks.is_refused(error):
            raise GpufleetError(
                f"{offering.id} was not bought: {reason}", next_step="gpufleet blocks find, and buy again"
            ) from error
        raise GpufleetError(
            f"whether {offering.id} was bought for {offering.usd} USD is not known: {reason}",
            why="AWS may have taken the request, and has no way to repeat one safely; it was sent once",
            next_step="do not buy again before you have looked, in some minutes too (a block of payment-pending or "
            f"scheduled is bought): {_look(search)}; aws ec2 describe-capacity-blocks --region {search.region}",
        ) from error


def _look(search: Search) -> str:
    return (
        f"aws ec2 describe-capacity-reservations --region {search.region} --filters "
        f"Name=instance-type,Values={search.instance_type}"
    )


def _afterwards(offering: Offering, reservation: Any) -> str:
    """Return the text that leads from a bought block to its plan.

    Twelve hours for the payment: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CapacityReservation.html
    """
    id_, search = reservation["CapacityReservationId"], offering.search
    zone = f"\n        zone_id: {reservation['AvailabilityZoneId']}" if "AvailabilityZoneId" in reservation else ""
    start = reservation.get("StartDate", offering.times.start)
    end = reservation.get("EndDate", offering.times.end)
    return f"""bought: {id_} ({reservation.get("State", "state not told")}) for {offering.usd} USD
AWS takes the payment within 12 hours; the block can be used from state scheduled or active on:
  aws ec2 describe-capacity-reservations --region {search.region} --capacity-reservation-ids {id_}
Its plan: put these lines into the request
constraints:
  purchase_options: [capacity-block]
  existing_reservations:
    - instance_type: {search.instance_type}
      region: {search.region}
      count: {offering.nodes}
      capacity_reservation_id: {id_}
      capacity_block:
        start: {time_text(start)}
        end: {time_text(end)}{zone}
(blocks of the same nodes follow each other), and run
  gpufleet recommend REQUEST.yaml --format json > plans.json
  gpufleet up plans.json --stack NAME"""
