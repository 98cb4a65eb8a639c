"""Steps that bring a run from one region's stack to another's, for ``gpufleet move`` and ``gpufleet up --regions``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bootstrap.contract.request import PersonRequest, merge_spends
from bootstrap.contract.state import ControllerState
from bootstrap.contract.words import counted
from infra.control_settings import job_id
from infra.naming import Names
from infra.s3_uri import read_s3_prefix
from optimizer.aws import clients, control, copying, errors
from optimizer.aws.copying import Carried
from optimizer.catalog.region_transfer import transfer_usd
from optimizer.commands.asking import choose_folder
from optimizer.commands.deploying import deploy, run_recommend
from optimizer.commands.options import list_stacks
from optimizer.commands.output import say
from optimizer.commands.progress import patience, relayed
from optimizer.commands.resume import let_run
from optimizer.commands.stack_file import StackFile, find_stack, read_stack, resolve_names
from optimizer.commands.stop import ask, follow_drain
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.plan import FleetPlan

DATA_KEYS = ("gpufleet:data", "gpufleet:baseWeights")
# A controller that lives sees the ended nodes within two ticks.
SETTLES_WITHIN = timedelta(minutes=4)
POLL_S = 15


def others_of_job(file: StackFile, directory: Path) -> list[StackFile]:
    """Return the folder's stacks of other regions that train the job of ``file``."""
    known = (find_stack(name, directory) for name in list_stacks(directory))
    return [
        other
        for other in known
        if other and other.plan.region != file.plan.region and job_id(other.plan) == job_id(file.plan)
    ]


def locate_data(config: Mapping[str, Any], region: str) -> str | None:
    """Return the region of the training data where it is another one; refuse data that the new nodes cannot reach."""
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


def recommend_in(
    region: str,
    document: Mapping[str, Any],
    data_region: str | None,
    name: str,
    directory: Path,
    refresh: bool | None,
    *flags: str,
) -> str:
    """Recommend for a request in one region; keep it as request.NAME.json, and return the path of plans.NAME.json."""
    work = document.get("workload")
    if data_region and isinstance(work, dict) and work.get("data_gib"):
        document = {**document, "workload": {**work, "data_region": data_region}}
    folder = choose_folder(directory)
    file = folder / f"request.{name}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    return run_recommend(str(file), folder / f"plans.{name}.json", refresh, "--region", region, *flags)


def read_asked(names: Names) -> PersonRequest | None:
    """Read the last person's request of a stack; GpufleetError where its bucket cannot be read."""
    with errors.explained(f"bucket {names.bucket} of stack {names.stack} cannot be read"):
        return control.read_request(clients.s3(names.region), names.bucket, names.control_prefix)


def read_asked_if_up(names: Names) -> PersonRequest | None:
    """Read the last person's request as ``read_asked`` does; None also where the stack was never up."""
    try:
        return read_asked(names)
    except GpufleetError as error:
        cause = error.__cause__
        if isinstance(cause, Exception) and errors.is_aws_error(cause) and errors.is_not_found(cause):
            return None
        raise


def read_controller(names: Names) -> ControllerState | None:
    """Read the state of a stack's controller; GpufleetError where its bucket cannot be read."""
    with errors.explained(f"bucket {names.bucket} of stack {names.stack} cannot be read"):
        return control.read_state(clients.s3(names.region), names.bucket, names.control_prefix)


def find_carried(names: Names) -> Carried:
    """Find the newest valid checkpoint and the ledger, which go along; name checkpoints that are not valid."""
    with errors.explained(f"the checkpoints in {names.bucket} cannot be read"):
        carried = copying.find_carried(clients.s3(names.region), names.bucket, names.checkpoint_prefix)
    for fault in carried.faults:
        say(f"note: passed over, not valid: {fault}", err=True)
    return carried


def stand_up(
    plan: FleetPlan,
    name: str,
    source: str,
    directory: Path,
    again: str,
    *,
    config: Mapping[str, Any],
    accept_stale_prices: bool,
) -> Names:
    """Make or update the stack in the new region, without a node; nobody resumes it before the hand-over.

    The run is stack ``source``'s. ``config`` is written into the new stack's; ``again`` is the command to go on with.
    """
    waiting = {**config, "gpufleet:waits": True}
    deploy(plan, name, directory, again, config=waiting, accept_stale_prices=accept_stale_prices)
    names, caller = resolve_names(read_stack(name, directory))
    request = read_asked(names)
    if request is None or request.want != "stop" or not request.moved_to:
        ask(names, caller, "stop", moved_to=source)
        follow_drain(names, timedelta(seconds=plan.terminate_timeout_s))
    return names


def end_nodes(source: StackFile, names: Names, caller: str, target: str) -> None:
    """End the nodes as ``gpufleet stop`` does; the stack remembers that its run goes on as stack ``target``."""
    ask(names, caller, "stop", moved_to=target)
    follow_drain(names, timedelta(seconds=source.plan.terminate_timeout_s))


def hand_over(source: StackFile, names: Names, target: Names, caller: str, again: str) -> None:
    """Copy the checkpoint, then let the new stack go on from it and from the dollars spent."""
    state = _settle(names)
    carried = find_carried(names)
    if carried.step is None:
        say("note: there is no valid checkpoint yet; the run begins at its first step", err=True)
    with (
        errors.explained(
            f"the copy to {target.bucket} did not end",
            why=f"stack {source.stack} has no node, and its checkpoints are as they were",
            next_step=again,
        ),
        relayed(f"copying {carried.gib:,.2f} GiB inside S3") as show,
    ):
        copied = copying.copy(
            clients.s3(names.region),
            clients.s3(target.region),
            carried,
            from_bucket=names.bucket,
            to_bucket=target.bucket,
            prefix=names.checkpoint_prefix,
            say=show,
        )
    step = "no checkpoint" if carried.step is None else f"the checkpoint of step {carried.step:,}"
    say(
        f"{step} and {counted(len(carried.objects), 'object')} are in {target.bucket}; {copied / 2**30:,.2f} GiB copied"
    )
    # The controller may not have ticked since the run came here.
    request = read_asked(names)
    elsewhere = merge_spends(state.elsewhere if state else {}, request.elsewhere if request else {})
    rate = 0.0
    if state is not None:
        own = state.settle(datetime.now(UTC))
        rate = own.usd_per_hour
        # Bytes that an interrupted call copied were billed too.
        billed = transfer_usd(carried.gib, names.region, target.region)
        elsewhere[source.stack] = replace(own, usd=own.usd + billed)
    elsewhere.pop(target.stack, None)
    run = {"begun_at": state.run_started_at, "progress": state.progress} if state else {}
    let_run(target, caller, elsewhere=elsewhere, **run)
    total = sum(spend.usd for spend in elsewhere.values())
    say(
        f"stack {target.stack} goes on, with {total:,.2f} USD on its meter. Stack {source.stack} in "
        f"{names.region} has no node and costs {rate:,.3f} USD an hour, on the same meter, until "
        f"gpufleet down --stack {source.stack}; its checkpoints stay"
    )


def _settle(names: Names) -> ControllerState | None:
    """Return the controller's state once its nodes ended, or as it is where it does not answer."""
    last = datetime.now(UTC) + SETTLES_WITHIN
    minutes = SETTLES_WITHIN / timedelta(minutes=1)
    with patience(f"waiting for the controller to see the last node's end, {minutes:.0f} min at most"):
        while True:
            state, now = read_controller(names), datetime.now(UTC)
            if state is None or state.is_silent(now) or now >= last:
                return state
            if all(instance.ended_at for instance in state.instances.values()):
                return state
            time.sleep(POLL_S)
