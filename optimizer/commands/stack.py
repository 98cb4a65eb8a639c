"""``gpufleet stack``: hand a plan to a Pulumi stack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.words import counted
from infra.images import dlami_of
from infra.refusals import plan_refusals
from infra.settings import ConfigError
from optimizer.aws import errors, images
from optimizer.catalog.ttl import age_days, is_stale_spot, spot_limit_days
from optimizer.commands import options
from optimizer.commands.asking import is_dry_run
from optimizer.commands.drill import command as drill
from optimizer.commands.output import say
from optimizer.commands.policy import command as policy
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import (
    IMAGE_KEY,
    POLICY_KEY,
    REGION_KEY,
    ZONE_KEY,
    change_stack_file,
    check_name,
    find_stack,
    write_stack_file,
)
from optimizer.commands.wheels import command as wheels
from optimizer.contract.errors import DataStaleError, InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.economics.policy_outlook import price_policies
from optimizer.training_code import describe_demands


@click.group(cls=options.WholeSentences)
def command() -> None:
    """Hand a plan to a Pulumi stack, pack its wheels, print the permissions it takes, drill an interruption."""


command.add_command(wheels, "wheels")
command.add_command(policy, "policy")
command.add_command(drill, "drill")


@command.command(
    "set",
    epilog="""\b
Example:
  gpufleet recommend request.yaml --format json > plans.json
  gpufleet stack set plans.json --stack dev
  gpufleet recommend request.yaml --format json | gpufleet stack set - --stack dev --plan 2
""",
)
@options.plan_arguments
@click.option("--stack", required=True, metavar="NAME", help="Pulumi stack; a new name makes one.")
@options.directory_option
@options.stale_option
@click.option("--new-image", is_flag=True, help="Take AWS's newest image in place of the one that the stack has.")
def set_plan(
    plan: str,
    stack: str,
    plan_number: int,
    directory: Path,
    accept_stale_prices: bool,
    new_image: bool,
) -> None:
    """Write PLAN into a stack's configuration, Pulumi.NAME.yaml.

    PLAN is one plan or the output of recommend; - reads standard input. Only gpufleet:plan, aws:region and
    gpufleet:dlami change; other keys and comments stay. With AWS credentials the newest Deep Learning AMI for the
    plan's type is written (gpufleet:dlami) and stays until --new-image. Nothing is written when the plan is wrong; its
    numbers must agree (docs/plans.md). Exit status 4: its spot prices are older than their limit. Needs no Pulumi CLI.
    """
    check_name(stack)
    chosen = options.read_plan_argument(plan, plan_number)
    put_plan(chosen, stack, directory, accept_stale_prices=accept_stale_prices, new_image=new_image)
    say(f"next: pulumi stack select --create {stack} && pulumi up")


def put_plan(
    chosen: FleetPlan,
    stack: str,
    directory: Path,
    *,
    accept_stale_prices: bool,
    new_image: bool = False,
) -> None:
    """Check a plan, write it into a stack's configuration, and print what changed and what is still to set."""
    refuse(chosen, directory, accept_stale_prices=accept_stale_prices)
    path, had = options.stack_path(directory, stack), find_stack(stack, directory)
    before = write_stack_file(path, chosen)
    say(
        f"{path}: gpufleet:plan is {chosen.fleet} training {chosen.job.model}, expected "
        f"{chosen.hours.expected:,.1f} h and {chosen.cost_usd.expected:,.2f} USD; aws:region is {chosen.region}"
    )
    zone_id = chosen.purchase.zone_id
    for key in ("gpufleet:subnetIds", ZONE_KEY):
        if zone_id and before.get(key) and before[key] != zone_id:
            say(f"the spot price is of zone {zone_id}; {key} decides where the nodes go", err=True)
    if before.get(REGION_KEY, chosen.region) != chosen.region:
        say(
            f"aws:region was {before[REGION_KEY]}: resources do not move between regions, so where this stack is "
            "deployed already, destroy it first or set this plan in another --stack",
            err=True,
        )
    elif had and had.plan.wanted_zone_ids[:1] not in ((), chosen.wanted_zone_ids[:1]):
        # docs/infrastructure.md, 'Changing a running stack'
        was = had.plan.wanted_zone_ids[0]
        say(f"the plan's zone was {was}: if nodes run there, gpufleet stop --stack {stack} before pulumi up")
    with patience("asking AWS for the newest image"):
        image, image_words = _choose_image(chosen, before, new=new_image)
    change_stack_file(path, {IMAGE_KEY: image})
    say(image_words)
    say(describe_demands(chosen))
    has_choice = before.get("gpufleet:mode") != "workers" and POLICY_KEY not in before
    if has_choice and (outlook := price_policies(chosen)):
        say(f"spot policy: {outlook.describe()}")
        if outlook.policy == "adaptive":
            say(f"once: pulumi config set {POLICY_KEY} adaptive")
    if not before.get("gpufleet:trainCommand") and (chosen.beyond_trainer or before.get("gpufleet:trainDir")):
        say("once: pulumi config set gpufleet:trainCommand COMMAND; without one the nodes are paid and idle")


def refuse(plan: FleetPlan, directory: Path, *, accept_stale_prices: bool) -> None:
    """Raise an error where a plan cannot be deployed, its folder is no project, or its spot prices are too old."""
    if refusals := list(plan_refusals(plan)):
        raise InvalidInputError("this plan cannot be deployed:\n  " + "\n  ".join(refusals))
    # A dry run comes before `gpufleet init`, too.
    if not (directory / "Pulumi.yaml").is_file() and not (is_dry_run() and directory.is_dir()):
        raise InvalidInputError(
            f"{directory}/Pulumi.yaml is missing",
            why="the stack's configuration belongs next to the project it configures",
            next_step="gpufleet init lays one out; or run in its folder, or name that with --directory",
        )
    for price in plan.prices if plan.purchase.option == "spot" and not accept_stale_prices else ():
        if price.node and price.node.market == "spot" and is_stale_spot(price):
            raise DataStaleError(
                f"the plan's price {price.item} is {counted(age_days(price.as_of), 'day')} old "
                f"({price.source}, {price.as_of})",
                limit=counted(spot_limit_days(price.source), "day"),
                why="zone, cost and ceiling of the fleet follow from it, and spot prices move with supply",
                next_step="gpufleet recommend --refresh plans at today's prices; --accept-stale-prices takes this plan",
            )


def _choose_image(plan: FleetPlan, before: Mapping[str, Any], *, new: bool) -> tuple[Mapping[str, Any] | None, str]:
    """Return what names the image beside the plan, None where the user does or AWS names none, and why."""
    own = next((f"gpufleet:{key}" for key in ("amiId", "amiName") if before.get(f"gpufleet:{key}")), "")
    if own:
        return None, f"image: {before[own]} ({own})"
    try:
        parameter = dlami_of(plan).parameter
    except ConfigError as error:
        return None, f"image: none; {error}"
    place, had = {"parameter": parameter, "region": plan.region}, before.get(IMAGE_KEY)
    if not new and isinstance(had, Mapping) and place.items() <= had.items():
        return had, f"image: {had.get('id')} stays (--new-image takes the newest of {parameter})"
    try:
        pinned = {"id": images.newest(plan.region, parameter), **place}
    except errors.AWS_ERRORS as error:
        again = "gpufleet stack set pins it once AWS answers"
        return None, f"image: the newest of {parameter} at each pulumi up; {again} ({errors.reason(error)})"
    return pinned, f"image: {pinned['id']}, the newest of {parameter} ({IMAGE_KEY})"
