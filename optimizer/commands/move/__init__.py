"""``gpufleet move``: a run goes on in another region; ``gpufleet up --regions`` takes the same steps (``regions.py``).

A run moves in two steps, which a repeated call takes up again. ``stand_up`` makes the new stack, which starts no node.
``hand_over`` ends the old nodes, copies the newest valid checkpoint, and then lets the new stack run with the dollars
spent. Until that last write one of the two stacks is asked to stop and names the other, so that one side trains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import click

from bootstrap.contract.request import merge_spends
from bootstrap.contract.state import ENDED, ControllerState
from bootstrap.contract.timings import HOUR
from infra.control_settings import job_id
from infra.naming import read_s3_prefix
from optimizer.aws import clients, errors
from optimizer.catalog import load
from optimizer.catalog.region_transfer import transfer_usd
from optimizer.commands import options
from optimizer.commands.asking import choose_folder, confirm, consent_options, end_dry_run
from optimizer.commands.deploying import deploy, follow_run, run_recommend
from optimizer.commands.move.copying import Carried, copy, find_carried
from optimizer.commands.output import say
from optimizer.commands.preflight import read_settings
from optimizer.commands.progress import patience
from optimizer.commands.pulumi_engine import require_pulumi
from optimizer.commands.resume import let_run
from optimizer.commands.stack import refuse
from optimizer.commands.stack_file import (
    OWN_KEYS,
    StackFile,
    check_name,
    find_stack,
    follow_policy,
    read_asked,
    read_stack,
    read_state,
    resolve_names,
)
from optimizer.commands.stop import end_nodes
from optimizer.contract.errors import DataMissingError, InvalidInputError, NothingFeasibleError, unreadable
from optimizer.contract.plan import Spread
from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.policy_outlook import forecast_rest

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
@options.one_stack_options
@click.option("--plans", metavar="PLAN", help="Plan for a new stack.  [default: recommend's, for the stack's request]")
@options.plan_number_option
@options.config_option
@consent_options
@options.stale_option
@options.follow_option
def command(
    region: str,
    stack: str | None,
    directory: Path,
    plans: str | None,
    plan_number: int,
    config_given: dict[str, str],
    yes: bool,
    accept_stale_prices: bool,
    follow: bool,
) -> None:
    """Move a run to another REGION: its newest checkpoint, ledger, and what it has spent of its ceiling.

    Shows what the copy and the rest cost, and asks. Then a stack without nodes is made in REGION, NAME-REGION where
    none trains the job there, while the old nodes still train. These save and end as with gpufleet stop. The newest
    valid checkpoint is copied inside S3. The new stack's meter goes on from the old one's dollars, and its controller
    starts the nodes. The old stack stays without nodes; gpufleet down ends what it costs. Nothing of the old bucket
    changes. A call that was interrupted goes on when repeated; with the old REGION it is taken back.
    """
    require_pulumi()
    load().check_region(region)
    source, target = find_run(read_stack(stack, directory), directory)
    again = options.repeat_command({"stack": ["--stack", source.stack]})
    if target is not None and region not in (source.plan.region, target.plan.region):
        raise InvalidInputError(
            f"the run of stack {source.stack} is on its way to stack {target.stack}",
            next_step=f"gpufleet move {target.plan.region} --stack {source.stack}",
        )
    if source.plan.region == region:
        if target is None:
            say(f"the run is in {region} already, as stack {source.stack}")
            end_dry_run("nothing is left to move")
            if not follow:
                return
        else:
            # The other stack was asked to stop before this one was.
            end_dry_run(f"stack {source.stack} would go on, and its move to stack {target.stack} be taken back")
            let_run(resolve_names(source))
            say(f"the move to stack {target.stack} is taken back: stack {source.stack} goes on")
        target = source
    else:
        if target is None:
            place = find_place(source, region, directory, config_given, plans=plans, plan_number=plan_number)
            refuse(place.plan, directory, accept_stale_prices=accept_stale_prices)
            say(weigh(source, place, *read_run(source)).words)
            if not yes:
                why = "nodes end, and the copy and the new stack cost money"
                confirm("Move it?", why=why, again=again, nothing_was="changed", next_step=again)
            target = stand_up(place, source, directory, again, accept_stale_prices=accept_stale_prices)
        end_dry_run(f"stack {target.stack} would take over what an interrupted move left; nothing was changed")
        hand_over(source, target, again)
    follow_run(target.stack, directory, follow=follow)


def others_of_job(file: StackFile, directory: Path) -> list[StackFile]:
    """Return the folder's stacks of other regions that train the job of ``file``."""
    known = (find_stack(name, directory) for name in options.list_stacks(directory))
    return [
        other
        for other in known
        if other and other.plan.region != file.plan.region and job_id(other.plan) == job_id(file.plan)
    ]


def find_run(file: StackFile, directory: Path) -> tuple[StackFile, StackFile | None]:
    """Return the stack that has the run, by the moves from ``file``, and the one that an interrupted move goes to."""
    asked = read_asked(resolve_names(file))
    while asked and asked.moved_to:
        other = read_stack(asked.moved_to, directory)
        theirs = read_asked(resolve_names(other))
        if theirs and theirs.moved_to == file.stack:
            # Each names the other until the run has arrived. The one that it leaves was asked last.
            return (file, other) if asked.at >= theirs.at else (other, file)
        file, asked = other, theirs
    return file, None


def read_run(file: StackFile) -> tuple[ControllerState | None, Carried]:
    """Read the controller's state, and find the newest valid checkpoint and the ledger, which go along."""
    names = resolve_names(file)
    with errors.explained(f"the checkpoints in {names.bucket} cannot be read"):
        carried = find_carried(clients.s3(names.region), names.bucket, names.checkpoint_prefix)
    return read_state(names), carried


def find_place(
    source: StackFile,
    region: str,
    directory: Path,
    given: Mapping[str, str],
    *,
    plans: str | None = None,
    plan_number: int = 1,
) -> StackFile:
    """Return the folder's stack in the region that trains the job, else a new one with a plan of ``plans``.

    Its configuration is what it gets beside its plan. Without ``plans`` the request that ``gpufleet up`` keeps is
    planned for the region.
    """
    if (mode := source.config.get("gpufleet:mode", "training")) != "training":
        raise InvalidInputError(
            f"gpufleet:mode of stack {source.stack} is {mode}",
            limit="training",
            why="the checkpoint of one training run is moved",
        )
    known = next((other for other in others_of_job(source, directory) if other.plan.region == region), None)
    name = known.stack if known else f"{source.stack.removesuffix(f'-{source.plan.region}')}-{region}"
    check_name(name)
    kept = {key: value for key, value in (known or source).config.items() if key not in (*OWN_KEYS, *given)}
    config = {**kept, **given}
    data_region = _locate_data(config, region)
    if known:
        _refuse_second_run(known)
        say(f"note: stack {name} keeps its plan; gpufleet stack set PLAN --stack {name} changes it", err=True)
        return replace(known, config=config)
    secret = [key for key, value in kept.items() if isinstance(value, Mapping) and "secure" in value]
    if bound := secret + [key for key in BOUND_KEYS if kept.get(key)]:
        raise InvalidInputError(
            f"stack {source.stack} has {', '.join(bound)}",
            why=f"it names something of {source.plan.region}, or is a secret that is encrypted for its stack",
            next_step="--config KEY=VALUE for the new stack; empty for none",
        )
    if plans is None:
        document = _read_kept_request(directory / f"plans.{source.stack}.json")
        if data_region and document.get("workload", {}).get("data_gib"):
            document["workload"]["data_region"] = data_region if data_region != region else None
        request, answer = (choose_folder(directory) / f"{file}.{name}.json" for file in ("request", "plans"))
        request.write_text(json.dumps(document, indent=1) + "\n")
        # The request may leave the global batch to recommend.
        flags = ("--region", region, "--global-batch", str(source.plan.job.global_batch))
        plans = run_recommend(str(request), answer, *flags)
    plan = options.read_plan_argument(plans, plan_number)
    if plan.region != region or job_id(plan) != job_id(source.plan):
        raise InvalidInputError(
            f"the plan is for {plan.region} and job {job_id(plan)}",
            limit=f"{region}, and job {job_id(source.plan)} of stack {source.stack}",
            why="the checkpoint and the meter are of one job",
            next_step=f"plan the same request for the region: gpufleet recommend REQUEST --region {region}",
        )
    return StackFile(stack=name, path=options.stack_path(directory, name), plan=plan, config=config)


def _refuse_second_run(file: StackFile) -> None:
    names = resolve_names(file)
    asked, state = read_asked(names), read_state(names)
    is_asked = asked is not None and asked.want == "run"
    if state and state.phase not in ENDED and (is_asked or state.nodes.in_service + state.nodes.pending):
        raise InvalidInputError(
            f"stack {file.stack} runs the same job in {names.region} already",
            why="two runs do not become one",
            next_step=f"gpufleet stop --stack {file.stack}, and its run ends for the one that moves there",
        )


def _locate_data(config: Mapping[str, Any], region: str) -> str | None:
    """Return the region of the training data, where it is named; refuse data that the new nodes cannot reach."""
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
    return located.get("gpufleet:data")


def _read_kept_request(kept: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(kept.read_text(encoding="utf-8"))["request"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataMissingError(
            f"no request is kept: {unreadable(kept, error)}",
            why="the plan for another region is made from the request",
            next_step="gpufleet recommend REQUEST --region REGION --save PLAN, then --plans PLAN",
        ) from error


class Rest(NamedTuple):
    """Rest of a run in a place, in words too; it is late where its 95th percentile misses the deadline."""

    words: str
    hours: Spread
    usd: Spread  # with the copy of its checkpoint
    is_late: bool


def weigh(source: StackFile, place: StackFile, state: ControllerState | None, carried: Carried) -> Rest:
    """Return what the rest of a run takes in a place, under the spot policy and the ceiling that its stack has there.

    Raises:
        NothingFeasibleError: the ceiling does not pay for it.
        InvalidInputError: the run is done, or the Pulumi program refuses the place.
    """
    if state and state.phase == "done":
        raise InvalidInputError(f"the run of stack {source.stack} is done", next_step="gpufleet down")
    plan, left_hours = follow_policy(place.plan, place.config), None
    if state and plan.job.deadline_hours:
        start_hours = RESTART_HOURS + (plan.staging.node_hours if plan.staging else 0.0)
        left_hours = plan.job.deadline_hours - (datetime.now(UTC) - state.run_started_at) / HOUR - start_hours
    # The next checkpoint may be larger than the newest one.
    copy_usd = transfer_usd(max(carried.gib, source.plan.job.checkpoint_gib), source.plan.region, plan.region)
    hours, usd = forecast_rest(plan, 1 - min(1.0, carried.step / plan.job.steps), left_hours=left_hours)
    usd = usd.model_copy(update={name: value + copy_usd for name, value in usd})
    ceiling = read_settings(place).ceiling_usd
    left_usd = ceiling - (state.spent_usd if state else 0.0) if ceiling else None
    words = (
        f"the rest is expected to take {hours.expected:,.1f} h and {usd.expected:,.2f} USD, {copy_usd:,.2f} "
        f"of them for the copy of its checkpoint; "
        + ("no ceiling" if left_usd is None else f"{left_usd:,.2f} USD of the ceiling are left")
    )
    if left_usd is not None and usd.expected > left_usd:
        raise NothingFeasibleError(
            words,
            why="the controller would end the run before it is done",
            next_step="--config ceilingUsd=USD for a new stack, or stay",
        )
    words = (
        f"\nfrom stack {source.stack} in {source.plan.region}, {source.plan.fleet}, to stack {place.stack} in "
        f"{place.plan.region}, {place.plan.fleet}: {words}"
    )
    return Rest(words, hours, usd, is_late=left_hours is not None and hours.p95 > left_hours)


def stand_up(
    place: StackFile, source: StackFile, directory: Path, again: str, *, accept_stale_prices: bool
) -> StackFile:
    """Make or update a place's stack without a node; nobody resumes it before the hand-over.

    ``again`` is the command to go on with.
    """
    config = {**place.config, "gpufleet:waits": True}
    deploy(place.plan, place.stack, directory, again, config=config, accept_stale_prices=accept_stale_prices)
    target = read_stack(place.stack, directory)
    end_nodes(target, moved_to=source.stack)
    return target


def hand_over(source: StackFile, target: StackFile, again: str) -> None:
    """End the old nodes, copy the checkpoint, and let the new stack go on from it and from the dollars spent."""
    names = end_nodes(source, moved_to=target.stack)
    last = datetime.now(UTC) + SETTLES_WITHIN
    with patience("waiting for the controller to see the last node's end"):
        while (state := read_state(names)) is not None:
            now = datetime.now(UTC)
            is_settled = all(instance.ended_at for instance in state.instances.values())
            if is_settled or state.is_silent(now) or now >= last:
                break
            time.sleep(POLL_S)
    _, carried = read_run(source)
    new = resolve_names(target)
    say(f"copying {carried.gib:,.2f} GiB inside S3", err=True)
    with errors.explained(
        f"the copy to {new.bucket} did not end",
        why=f"stack {source.stack} has no node, and its checkpoints are as they were",
        next_step=again,
    ):
        copy(names, new, carried, lambda line: say(line, err=True))
    # The controller may not have ticked since the run came here.
    request = read_asked(names)
    elsewhere = merge_spends(state.elsewhere if state else {}, request.elsewhere if request else {})
    run: dict[str, Any] = {}
    if state is not None:
        own = state.settle(datetime.now(UTC))
        # Bytes that an interrupted call copied were billed too.
        copy_usd = transfer_usd(carried.gib, names.region, new.region)
        elsewhere[source.stack] = replace(own, usd=own.usd + copy_usd)
        run = {"begun_at": state.run_started_at, "progress": state.progress}
    elsewhere.pop(target.stack, None)
    let_run(new, elsewhere=elsewhere, **run)
    total = sum(spend.usd for spend in elsewhere.values())
    say(
        f"stack {target.stack} goes on from step {carried.step:,} with {total:,.2f} USD on its meter, which "
        f"counts what stack {source.stack} costs until gpufleet down --stack {source.stack}; its checkpoints stay"
    )
