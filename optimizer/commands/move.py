"""``gpufleet move``: a run goes on in another region."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from ruamel.yaml import YAML

from bootstrap.contract.request import PersonRequest
from bootstrap.contract.state import ControllerState
from infra.control_settings import job_id
from optimizer.aws.copying import Carried
from optimizer.catalog import load
from optimizer.catalog.region_transfer import transfer_price, transfer_usd
from optimizer.commands.asking import confirm, consent_options, end_dry_run, require_terminal
from optimizer.commands.deploying import follow_run
from optimizer.commands.handover import (
    end_nodes,
    find_carried,
    hand_over,
    locate_data,
    others_of_job,
    read_asked,
    read_controller,
    recommend_in,
    stand_up,
)
from optimizer.commands.options import (
    config_option,
    one_stack_options,
    plan_number_option,
    read_plan_argument,
    stack_path,
)
from optimizer.commands.output import say
from optimizer.commands.pulumi_engine import require_pulumi
from optimizer.commands.stack_file import (
    IMAGE_KEY,
    PLAN_KEY,
    REGION_KEY,
    ZONE_KEY,
    StackFile,
    check_name,
    follow_policy,
    read_stack,
    resolve_names,
)
from optimizer.commands.wheels import WHEELS_KEY
from optimizer.contract.errors import DataMissingError, InvalidInputError, NothingFeasibleError
from optimizer.contract.plan import FleetPlan
from optimizer.economics.policy_outlook import forecast_rest

# Follow from the plan, the image and the packages of the new stack.
NEW_KEYS = (PLAN_KEY, REGION_KEY, ZONE_KEY, IMAGE_KEY, WHEELS_KEY)
# Name something of one region.
BOUND_KEYS = ("gpufleet:vpcId", "gpufleet:subnetIds", "gpufleet:amiId", "gpufleet:image")


@click.command(
    epilog="""\b
Example:
  gpufleet move us-west-2
  gpufleet move eu-west-1 --stack dev --yes --no-follow
  gpufleet recommend request.yaml --region eu-west-1 --save plans.json && gpufleet move eu-west-1 --plans plans.json
"""
)
@click.argument("region")
@one_stack_options
@click.option("--to", metavar="NAME", help="Stack in REGION.  [default: the run's stack there, else NAME-REGION]")
@click.option("--plans", metavar="PLAN", help="Plan for a new stack.  [default: recommend's, for the stack's request]")
@plan_number_option
@config_option
@consent_options
@click.option(
    "--refresh/--no-refresh", default=None, help="Read today's spot prices.  [default: for a request with spot nodes]"
)
@click.option("--accept-stale-prices", is_flag=True, help="As of gpufleet stack set.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Follow the run until it has ended.")
def command(
    region: str,
    stack: str | None,
    directory: Path,
    to: str | None,
    plans: str | None,
    plan_number: int,
    config_given: dict[str, str],
    yes: bool,
    refresh: bool | None,
    accept_stale_prices: bool,
    follow: bool,
) -> None:
    """Move a run to another REGION: its newest checkpoint, ledger, and what it has spent of its ceiling.

    Shows what the copy and the rest cost, and asks. Then a stack without nodes is made in REGION while the old nodes
    still train. These save and end as with gpufleet stop. The newest valid checkpoint is copied inside S3. The new
    stack's meter goes on from the old one's dollars, and its controller starts the nodes. The old stack stays without
    nodes; gpufleet down ends what it costs. Nothing of the old bucket changes. A call that was interrupted goes on when
    repeated.
    """
    require_pulumi()
    source = read_stack(stack, directory)
    _check_movable(source, region)
    name = to or _find_target(source, region, directory)
    check_name(name)
    again = _again(region, source.stack, directory, to)
    names, caller = resolve_names(source)
    asked = read_asked(names)
    if asked and asked.moved_to not in ("", name):
        raise InvalidInputError(
            f"the run of stack {source.stack} moved to stack {asked.moved_to} already",
            next_step=f"gpufleet move {region} --stack {asked.moved_to}",
        )
    target = _existing(name, directory, source, region)
    if target is None:
        config = _carry_config(source, config_given)
        data_region = locate_data(config, region)
        plan = _choose_plan(source, region, data_region, name, directory, plans, plan_number, refresh)
    else:
        plan, config = target.plan, {**target.config, **config_given}
        if plans:
            say(f"note: stack {name} keeps its plan; gpufleet stack set PLAN --stack {name} changes it", err=True)
        locate_data(config, region)
    if asked and asked.moved_to == name and target and _has_arrived(target, source.stack, asked):
        say(f"the run of stack {source.stack} is stack {name}'s already")
        end_dry_run("nothing is left to move")
    else:
        if not (asked and asked.moved_to):
            state = read_controller(names)
            if state and state.phase == "done":
                raise InvalidInputError(f"the run of stack {source.stack} is done", next_step="gpufleet down")
            _show(source, plan, name, config, state, find_carried(names))
            if not yes:
                _ask(again)
        end_dry_run(f"stack {name} would take over what an interrupted move left; nothing was changed")
        new = config_given if target else config
        target_names = stand_up(
            plan, name, source.stack, directory, again, config=new, accept_stale_prices=accept_stale_prices
        )
        end_nodes(source, names, caller, name)
        hand_over(source, names, target_names, caller, again)
    if follow:
        follow_run(name, directory)
    else:
        say(f"the controller starts the nodes within a minute: gpufleet status --stack {name} --watch 60")


def _check_movable(source: StackFile, region: str) -> None:
    load().check_region(region)
    if region == source.plan.region:
        raise InvalidInputError(f"stack {source.stack} is in {region} already", next_step="name another region")
    if (mode := source.config.get("gpufleet:mode", "training")) != "training":
        raise InvalidInputError(
            f"gpufleet:mode of stack {source.stack} is {mode}",
            limit="training",
            why="the checkpoint of one training run is moved",
            next_step="deploy a second stack: gpufleet up PLAN --stack NAME",
        )


def _again(region: str, stack: str, directory: Path, to: str | None) -> str:
    words = ["gpufleet", "move", region, "--stack", stack, *(["--to", to] if to else [])]
    return shlex.join([*words, *(["--directory", str(directory)] if directory != Path() else [])])


def _find_target(source: StackFile, region: str, directory: Path) -> str:
    """Return the name of the folder's stack in the region that trains the same job, or of a new one."""
    found = [other.stack for other in others_of_job(source, directory) if other.plan.region == region]
    if len(found) > 1:
        raise InvalidInputError(
            f"stacks {', '.join(found)} in {region} train the job of {source.stack}", next_step="choose: --to NAME"
        )
    return found[0] if found else f"{source.stack.removesuffix(f'-{source.plan.region}')}-{region}"


def _existing(name: str, directory: Path, source: StackFile, region: str) -> StackFile | None:
    """Read the stack to move to, if an earlier call or a person made its configuration."""
    path = stack_path(directory, name)
    if not path.exists() or PLAN_KEY not in ((YAML(typ="safe").load(path) or {}).get("config") or {}):
        return None
    file = read_stack(name, directory)
    _check_same_job(file.plan, source, region, f"stack {name}")
    return file


def _check_same_job(plan: FleetPlan, source: StackFile, region: str, what: str) -> None:
    if plan.region != region:
        raise InvalidInputError(f"{what} is for {plan.region}", limit=region, next_step="gpufleet recommend --region")
    if job_id(plan) == job_id(source.plan):
        return
    old, new = (each.job.model_dump(mode="json") for each in (source.plan, plan))
    limits = {"budget_usd", "deadline_hours"}
    differ = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in limits)
    raise InvalidInputError(
        f"{what} trains another job than stack {source.stack}: {', '.join(differ)} differ",
        why="the checkpoint and the meter are of one job",
        next_step="plan the same request for the region: gpufleet recommend REQUEST --region " + region,
    )


def _choose_plan(
    source: StackFile,
    region: str,
    data_region: str | None,
    name: str,
    directory: Path,
    plans: str | None,
    plan_number: int,
    refresh: bool | None,
) -> FleetPlan:
    if plans is None:
        job = source.plan.job
        flags = ["--global-batch", str(job.global_batch)]
        flags += ["--budget", str(job.budget_usd)] if job.budget_usd else []
        flags += ["--deadline", f"{job.deadline_hours}h"] if job.deadline_hours else []
        document = _read_request_document(source, directory)
        plans = recommend_in(region, document, data_region, name, directory, refresh, *flags)
    plan = read_plan_argument(plans, plan_number)
    _check_same_job(plan, source, region, f"plan {plan_number} of {plans}")
    return plan


def _read_request_document(source: StackFile, directory: Path) -> dict[str, Any]:
    kept = directory / f"plans.{source.stack}.json"
    try:
        document = json.loads(kept.read_text(encoding="utf-8"))["request"]
        assert isinstance(document, dict)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataMissingError(
            f"{kept} has no request: {error!r}",
            why="the plan for another region is made from the request",
            next_step="gpufleet recommend REQUEST --region REGION --save PLAN, then --plans PLAN",
        ) from error
    return document


def _carry_config(source: StackFile, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of the new stack without its plan."""
    kept = {key: value for key, value in source.config.items() if key not in NEW_KEYS}
    for key, value in kept.items():
        secret = isinstance(value, Mapping) and "secure" in value
        if key not in given and (secret or (key in BOUND_KEYS and value)):
            raise InvalidInputError(
                f"{key} of stack {source.stack} is {'a secret' if secret else value}",
                why="a secret is encrypted for its stack" if secret else f"it is of region {source.plan.region}",
                next_step=f"--config {key.removeprefix('gpufleet:')}=VALUE for the new stack; empty for none",
            )
    return {**kept, **given}


def _has_arrived(target: StackFile, stack: str, asked: PersonRequest) -> bool:
    """Return whether the target took over the run that ``asked`` stopped."""
    request = read_asked(resolve_names(target)[0])
    return bool(request and stack in request.elsewhere and request.elsewhere[stack].at >= asked.at)


def _show(
    source: StackFile,
    plan: FleetPlan,
    name: str,
    config: Mapping[str, Any],
    state: ControllerState | None,
    carried: Carried,
) -> None:
    """Print what the move takes; NothingFeasibleError where the ceiling does not pay for the rest."""
    plan = follow_policy(plan, config)
    # The next checkpoint may be larger than the newest one.
    gib = max(carried.gib, source.plan.job.checkpoint_gib)
    price, usd = transfer_price(source.plan.region, plan.region), transfer_usd(gib, source.plan.region, plan.region)
    left = 1 - min(1.0, (carried.step or 0) / plan.job.steps)
    spent = state.spent_usd if state else 0.0
    ceiling = float(config.get("gpufleet:ceilingUsd") or 0) or plan.job.budget_usd
    left_hours = None
    if state and plan.job.deadline_hours:
        ran_hours = (datetime.now(UTC) - state.run_started_at) / timedelta(hours=1)
        left_hours = plan.job.deadline_hours - ran_hours
    hours_left, usd_left = forecast_rest(plan, left, left_hours=left_hours)
    rest = usd_left.expected
    say(
        f"\nfrom stack {source.stack} in {source.plan.region}, {source.plan.fleet}, to stack {name} in {plan.region}, "
        f"{plan.fleet}\n"
        f"copy    {gib:,.1f} GiB between the regions, {usd:,.2f} USD ({price.usd_per_gb:g} USD a GB; {price.source}, "
        f"{price.as_of})\n"
        f"left    {left:.0%} of the steps, expected {hours_left.expected:,.1f} h and {rest:,.2f} USD there\n"
        f"meter   {spent:,.2f} USD spent" + (f", of a ceiling of {ceiling:,.2f}" if ceiling else ", no ceiling")
    )
    if ceiling and spent + usd + rest > ceiling:
        raise NothingFeasibleError(
            f"{spent:,.2f} USD are spent, the copy costs {usd:,.2f} and the rest {rest:,.2f}",
            limit=f"ceiling {ceiling:,.2f} USD",
            why="the controller would end the run before it is done",
            next_step="--config ceilingUsd=USD for a new stack, or stay",
        )


def _ask(again: str) -> None:
    require_terminal(why="the nodes end, and the copy and the new stack cost money", next_step=f"{again} --yes")
    confirm("Move it?", nothing_was="changed", next_step=again)
