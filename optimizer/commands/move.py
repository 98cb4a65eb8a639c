"""``gpufleet move``: a run goes on in another region."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.asking import confirm, require_terminal
from optimizer.commands.options import config_option, one_stack_options, plan_number_option, read_plan_argument
from optimizer.commands.stack.engine import carry_out, require_pulumi
from optimizer.commands.stack.file import (
    IMAGE_KEY,
    PLAN_KEY,
    REGION_KEY,
    ZONE_KEY,
    StackFile,
    change_stack_file,
    check_name,
    only_stack,
    read_stack,
    resolve_names,
)
from optimizer.commands.stack_paths import list_stacks, stack_path
from optimizer.commands.wheels import WHEELS_KEY
from optimizer.errors import DataMissingError, InvalidInputError, NothingFeasibleError
from optimizer.plan import FleetPlan

if TYPE_CHECKING:
    from bootstrap.contract.request import PersonRequest
    from bootstrap.contract.state import ControllerState
    from infra.naming import Names
    from optimizer.aws.copying import Carried
    from optimizer.economics.moving import MoveCost

# Follow from the plan, the image and the packages of the new stack.
NEW_KEYS = (PLAN_KEY, REGION_KEY, ZONE_KEY, IMAGE_KEY, WHEELS_KEY)
# Name something of one region.
BOUND_KEYS = ("gpufleet:vpcId", "gpufleet:subnetIds", "gpufleet:amiId", "gpufleet:image")
DATA_KEYS = ("gpufleet:data", "gpufleet:baseWeights")
# A controller that lives sees the ended nodes within two ticks.
SETTLES_WITHIN = timedelta(minutes=4)
POLL_S = 15


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
@click.option(
    "--request",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Request to plan from.  [default: that of plans.NAME.json, which gpufleet up keeps]",
)
@config_option
@click.option("--yes", is_flag=True, help="Do not ask.")
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
    request: Path | None,
    config_given: dict[str, str],
    yes: bool,
    refresh: bool | None,
    accept_stale_prices: bool,
    follow: bool,
) -> None:
    """Move a run to another REGION: its newest checkpoint, ledger, and what it has spent of its ceiling.

    Shows minutes and dollars, and asks. Then a stack without nodes is made in REGION while the old nodes still train.
    These save and end as with gpufleet stop. The newest valid checkpoint is copied inside S3. The new stack's meter
    goes on from the old one's dollars, and its controller starts the nodes. The old stack stays without nodes; gpufleet
    down ends what it costs. Nothing of the old bucket changes. A call that was interrupted goes on when repeated.
    """
    require_pulumi()
    source = read_stack(stack or only_stack(directory), directory)
    _check_movable(source, region)
    name = to or _find_target(source, region, directory)
    check_name(name)
    again = _again(region, source.stack, directory, to)
    names, caller = resolve_names(source)
    asked = _read_request(names)
    if asked and asked.moved_to not in ("", name):
        raise InvalidInputError(
            f"the run of stack {source.stack} moved to stack {asked.moved_to} already",
            next_step=f"gpufleet move {region} --stack {asked.moved_to}",
        )
    target = _existing(name, directory, source, region)
    if target is None:
        config = _carry_config(source, config_given)
        data_region = _locate_data(config, region)
        plan = _choose_plan(source, region, data_region, name, directory, plans, plan_number, request, refresh)
    else:
        plan, config = target.plan, {**target.config, **config_given}
        if plans or request:
            click.echo(
                f"note: stack {name} keeps its plan; gpufleet stack set PLAN --stack {name} changes it", err=True
            )
        _locate_data(config, region)
    if asked and asked.moved_to == name and target and _has_arrived(target, source.stack, asked):
        click.echo(f"the run of stack {source.stack} is stack {name}'s already")
    else:
        if not (asked and asked.moved_to):
            state = _read_state(names)
            if state and state.phase == "done":
                raise InvalidInputError(f"the run of stack {source.stack} is done", next_step="gpufleet down")
            _show(source, plan, name, config, state, _find_carried(names))
            if not yes:
                _ask(again)
        new = config_given if target else config
        change_stack_file(stack_path(directory, name), {**new, "gpufleet:waits": True})
        target_names = _stand_up(plan, name, source.stack, directory, again, accept_stale_prices=accept_stale_prices)
        _end_nodes(source, names, caller, name)
        _hand_over(source, names, target_names, caller)
    if follow:
        from optimizer.commands.up import follow_run

        follow_run(name, directory)
    else:
        click.echo(f"the controller starts the nodes within a minute: gpufleet status --stack {name} --watch 60")


def _check_movable(source: StackFile, region: str) -> None:
    from optimizer.catalog import load

    load().check_region(region)
    if region == source.plan.region:
        raise InvalidInputError(f"stack {source.stack} is in {region} already", next_step="name another region")
    for key, only in (("gpufleet:platform", "ec2"), ("gpufleet:mode", "training")):
        if (value := source.config.get(key, only)) != only:
            raise InvalidInputError(
                f"{key} of stack {source.stack} is {value}",
                limit=only,
                why="the checkpoint of one training run is moved, and its nodes start without a person's help",
                next_step="deploy a second stack: gpufleet up PLAN --stack NAME",
            )


def _again(region: str, stack: str, directory: Path, to: str | None) -> str:
    words = ["gpufleet", "move", region, "--stack", stack, *(["--to", to] if to else [])]
    return shlex.join([*words, *(["--directory", str(directory)] if directory != Path() else [])])


def _find_target(source: StackFile, region: str, directory: Path) -> str:
    """Return the name of the folder's stack in the region that trains the same job, or of a new one."""
    from infra.control_settings import job_id

    found = []
    for name in list_stacks(directory):
        try:
            file = read_stack(name, directory)
        except InvalidInputError:
            continue
        if file.plan.region == region and job_id(file.plan) == job_id(source.plan):
            found.append(name)
    if len(found) > 1:
        raise InvalidInputError(
            f"stacks {', '.join(found)} in {region} train the job of {source.stack}", next_step="choose: --to NAME"
        )
    return found[0] if found else f"{source.stack.removesuffix(f'-{source.plan.region}')}-{region}"


def _existing(name: str, directory: Path, source: StackFile, region: str) -> StackFile | None:
    """Read the stack to move to, if an earlier call or a person made its configuration."""
    from ruamel.yaml import YAML

    path = stack_path(directory, name)
    if not path.exists() or PLAN_KEY not in ((YAML(typ="safe").load(path) or {}).get("config") or {}):
        return None
    file = read_stack(name, directory)
    _check_same_job(file.plan, source, region, f"stack {name}")
    return file


def _check_same_job(plan: FleetPlan, source: StackFile, region: str, what: str) -> None:
    from infra.control_settings import job_id

    if plan.region != region:
        raise InvalidInputError(f"{what} is for {plan.region}", limit=region, next_step="gpufleet recommend --region")
    if job_id(plan) == job_id(source.plan):
        return
    old, new = (one.job.model_dump(mode="json") for one in (source.plan, plan))
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
    request: Path | None,
    refresh: bool | None,
) -> FleetPlan:
    from optimizer.commands.up import run_recommend

    if plans is None:
        file = directory / f"request.{name}.json"
        document = _read_request_document(source, directory, request)
        work = document.get("workload")
        if data_region and isinstance(work, dict) and work.get("data_gib"):
            document = {**document, "workload": {**work, "data_region": data_region}}
        file.write_text(json.dumps(document, indent=1) + "\n")
        job = source.plan.job
        flags = ["--region", region, "--global-batch", str(job.global_batch)]
        flags += ["--budget", str(job.budget_usd)] if job.budget_usd else []
        flags += ["--deadline", f"{job.deadline_hours}h"] if job.deadline_hours else []
        plans = run_recommend(str(file), directory / f"plans.{name}.json", refresh, *flags)
    plan = read_plan_argument(plans, plan_number)
    _check_same_job(plan, source, region, f"plan {plan_number} of {plans}")
    return plan


def _read_request_document(source: StackFile, directory: Path, request: Path | None) -> dict[str, Any]:
    from optimizer.request import read_request_file

    if request is not None:
        return read_request_file(request)
    kept = directory / f"plans.{source.stack}.json"
    try:
        document = json.loads(kept.read_text(encoding="utf-8"))["request"]
        assert isinstance(document, dict)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataMissingError(
            f"{kept} has no request: {error!r}",
            why="the plan for another region is made from the request",
            next_step="--request REQUEST.yaml, or --plans PLAN with a plan for the region",
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


def _locate_data(config: Mapping[str, Any], region: str) -> str | None:
    """Return the region of the training data where it is another one; refuse data that the new nodes cannot reach."""
    from infra.s3_uri import read_s3_prefix
    from optimizer.aws import clients, errors

    reaches_others = str(config.get("gpufleet:nat")).lower() == "true" or config.get("gpufleet:vpcId")
    located = {}
    for key in DATA_KEYS:
        place = read_s3_prefix(str(config.get(key, "")))
        if place is None:
            continue
        with errors.explained(f"the region of s3://{place[0]} ({key}) is unknown"):
            # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
            located[key] = clients.s3(region).head_bucket(Bucket=place[0])["BucketRegion"]
        if located[key] != region and not reaches_others:
            raise InvalidInputError(
                f"{key} is {config[key]}, in {located[key]}",
                limit=f"a bucket in {region}",
                # https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-endpoints-s3.html
                why="the nodes reach S3 through an endpoint of their own region",
                next_step=f"copy it, then --config {key.removeprefix('gpufleet:')}=s3://BUCKET/PREFIX; or "
                "--config nat=true, which pays for each node's copy by the GB",
            )
    data_region = located.get("gpufleet:data", region)
    return data_region if data_region != region else None


def _read_request(names: Names) -> PersonRequest | None:
    from optimizer.aws import clients, control, errors

    with errors.explained(f"bucket {names.bucket} of stack {names.stack} cannot be read"):
        return control.read_request(clients.s3(names.region), names.bucket, names.control_prefix)


def _read_state(names: Names) -> ControllerState | None:
    from optimizer.aws import clients, control, errors

    with errors.explained(f"bucket {names.bucket} of stack {names.stack} cannot be read"):
        return control.read_state(clients.s3(names.region), names.bucket, names.control_prefix)


def _find_carried(names: Names) -> Carried:
    from optimizer.aws import clients, copying, errors

    with errors.explained(f"the checkpoints in {names.bucket} cannot be read"):
        carried = copying.find_carried(clients.s3(names.region), names.bucket, names.checkpoint_prefix)
    for fault in carried.faults:
        click.echo(f"note: passed over, not valid: {fault}", err=True)
    return carried


def _has_arrived(target: StackFile, stack: str, asked: PersonRequest) -> bool:
    """Return whether the target took over the run that ``asked`` stopped."""
    request = _read_request(resolve_names(target)[0])
    return bool(request and stack in request.elsewhere and request.elsewhere[stack].at >= asked.at)


def _price(source: FleetPlan, target: FleetPlan, carried: Carried) -> MoveCost:
    from optimizer.aws.copying import COPIES
    from optimizer.catalog import load
    from optimizer.economics.moving import price_move

    return price_move(load(), source, target, gib=carried.gib, writes=carried.requests, copies=COPIES)


def _show(
    source: StackFile,
    plan: FleetPlan,
    name: str,
    config: Mapping[str, Any],
    state: ControllerState | None,
    carried: Carried,
) -> None:
    """Print what the move takes; NothingFeasibleError where the ceiling does not pay for the rest."""
    from optimizer.catalog.region_transfer import transfer_price

    # The next checkpoint may be larger than what lies there now.
    if carried.gib < source.plan.job.checkpoint_gib:
        missing = round((source.plan.job.checkpoint_gib - carried.gib) * 2**30)
        carried = replace(carried, objects={**carried.objects, "": missing})
    cost = _price(source.plan, plan, carried)
    price = transfer_price(source.plan.region, plan.region)
    left = 1 - min(1.0, (carried.step or 0) / plan.job.steps)
    spent = state.spent_usd if state else 0.0
    ceiling = float(config.get("gpufleet:ceilingUsd") or 0) or plan.job.budget_usd
    rest = left * plan.cost_usd.expected
    click.echo(
        f"\nfrom stack {source.stack} in {source.plan.region}, {source.plan.node_count} x {source.plan.instance_type} "
        f"({source.plan.purchase.option}), to stack {name} in {plan.region}, {plan.node_count} x {plan.instance_type} "
        f"({plan.purchase.option})\n"
        f"save    at most {cost.drain_hours * 60:,.0f} min, {cost.drain_usd:,.2f} USD of the old nodes\n"
        f"copy    {carried.gib:,.1f} GiB, about {cost.copy_hours * 60:,.0f} min, {cost.copy_usd:,.2f} USD "
        f"({price.usd_per_gb:g} USD a GB; {price.source}, {price.as_of})\n"
        f"start   about {cost.start_hours * 60:,.0f} min, {cost.start_usd:,.2f} USD of the new nodes\n"
        f"in all  {cost.hours * 60:,.0f} min without training, {cost.usd:,.2f} USD; a wait for capacity comes on top\n"
        f"left    {left:.0%} of the steps, expected {left * plan.hours.expected:,.1f} h and {rest:,.2f} USD there\n"
        f"meter   {spent:,.2f} USD spent" + (f", of a ceiling of {ceiling:,.2f}" if ceiling else ", no ceiling")
    )
    if ceiling and spent + cost.usd + rest > ceiling:
        raise NothingFeasibleError(
            f"{spent:,.2f} USD are spent, the move costs {cost.usd:,.2f} and the rest {rest:,.2f}",
            limit=f"ceiling {ceiling:,.2f} USD",
            why="the controller would end the run before it is done",
            next_step="--config ceilingUsd=USD for a new stack, or stay",
        )


def _ask(again: str) -> None:
    require_terminal(why="the nodes end, and the copy and the new stack cost money", next_step=f"{again} --yes")
    confirm("Move it?", nothing_was="changed", next_step=again)


def _stand_up(
    plan: FleetPlan, name: str, source: str, directory: Path, again: str, *, accept_stale_prices: bool
) -> Names:
    """Make or update the stack in the new region, without a node; nobody resumes it before the hand-over."""
    from optimizer.commands.stop import ask, follow_drain
    from optimizer.commands.up import count_declared, prepare

    prepare(plan, name, directory, again, accept_stale_prices=accept_stale_prices)
    carry_out(name, directory, count_declared=lambda: count_declared(name, directory))
    names, caller = resolve_names(read_stack(name, directory))
    request = _read_request(names)
    if request is None or request.want != "stop" or not request.moved_to:
        ask(names, caller, "stop", moved_to=source)
        follow_drain(names, timedelta(seconds=plan.terminate_timeout_s))
    return names


def _end_nodes(source: StackFile, names: Names, caller: str, target: str) -> None:
    from optimizer.commands.stop import ask, follow_drain

    ask(names, caller, "stop", moved_to=target)
    follow_drain(names, timedelta(seconds=source.plan.terminate_timeout_s))


def _hand_over(source: StackFile, names: Names, target: Names, caller: str) -> None:
    """Copy the checkpoint, then let the new stack go on from it and from the dollars spent."""
    from bootstrap.contract.request import merge_spends
    from optimizer.aws import clients, copying, errors
    from optimizer.commands.resume import let_run

    state = _settle(names)
    carried = _find_carried(names)
    if carried.step is None:
        click.echo("note: there is no valid checkpoint yet; the run begins at its first step", err=True)
    with errors.explained(
        f"the copy to {target.bucket} did not end",
        why=f"stack {source.stack} has no node, and its checkpoints are as they were",
        next_step=_again(target.region, source.stack, source.path.parent, target.stack),
    ):
        copied = copying.copy(
            clients.s3(names.region),
            clients.s3(target.region),
            carried,
            from_bucket=names.bucket,
            to_bucket=target.bucket,
            prefix=names.checkpoint_prefix,
            say=lambda line: click.echo(line, err=True),
        )
    step = "no checkpoint" if carried.step is None else f"the checkpoint of step {carried.step:,}"
    click.echo(f"{step} and {len(carried.objects):,} objects are in {target.bucket}; {copied / 2**30:,.2f} GiB copied")
    # The controller may not have ticked since the run came here.
    request = _read_request(names)
    elsewhere = merge_spends(state.elsewhere if state else {}, request.elsewhere if request else {})
    rate = 0.0
    if state is not None:
        spend = state.settle(datetime.now(UTC))
        rate = spend.usd_per_hour
        # Bytes that an interrupted call copied were billed too.
        billed = _price(source.plan, read_stack(target.stack, source.path.parent).plan, carried).copy_usd
        elsewhere[source.stack] = replace(spend, usd=spend.usd + billed)
    elsewhere.pop(target.stack, None)
    run = {"begun_at": state.run_started_at, "progress": state.progress} if state else {}
    let_run(target, caller, elsewhere=elsewhere, **run)
    click.echo(
        f"stack {target.stack} goes on, with {sum(one.usd for one in elsewhere.values()):,.2f} USD on its meter. Stack "
        f"{source.stack} in {names.region} has no node and costs {rate:,.3f} USD an hour, on the same meter, until "
        f"gpufleet down --stack {source.stack}; its checkpoints stay"
    )


def _settle(names: Names) -> ControllerState | None:
    """Return the controller's state once nodes and start reservations ended, or as it is where it does not answer."""
    last = datetime.now(UTC) + SETTLES_WITHIN
    while True:
        state, now = _read_state(names), datetime.now(UTC)
        if state is None or state.is_silent(now) or now >= last:
            return state
        if all(instance.ended_at for instance in state.instances.values()) and not state.unused_usd_per_hour:
            return state
        time.sleep(POLL_S)
