"""Steps of ``gpufleet up`` that commands between regions take too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.state import ENDED, ControllerState
from infra.settings import StackSettings
from optimizer.catalog.snapshot import DIRECTORY_VARIABLE
from optimizer.commands import stack_file
from optimizer.commands.asking import is_dry_run
from optimizer.commands.options import stack_path
from optimizer.commands.output import say
from optimizer.commands.preflight import check, count_levels, read_settings, write_findings
from optimizer.commands.pulumi_engine import carry_out
from optimizer.commands.recommend import command as recommend
from optimizer.commands.stack import put_plan, refuse
from optimizer.commands.status import live
from optimizer.commands.status.reading import Reading, read
from optimizer.commands.wheels import pack_wheels
from optimizer.contract.errors import GpufleetError
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import read_request_file, request_from_dict


def run_recommend(request: str, answer: Path, *flags: str) -> str:
    """Run ``gpufleet recommend REQUEST --save ANSWER`` with further flags, and return the path of its answer.

    Spot prices are today's, except in a dry run and in a catalog of the user's own choice, which are not refreshed.
    """
    wanted = request_from_dict(read_request_file(Path(request)), origin=request)
    is_kept = is_dry_run() or os.environ.get(DIRECTORY_VARIABLE)
    refresh = ["--refresh"] if "spot" in wanted.constraints.purchase_options and not is_kept else []
    arguments = [request, "--save", str(answer), *refresh, *flags]
    with recommend.make_context("recommend", arguments, parent=click.get_current_context().find_root()) as context:
        recommend.invoke(context)
    return str(answer)


def read_place(place: stack_file.StackFile, *, accept_stale_prices: bool) -> StackSettings:
    """Return the settings of a stack to deploy; raise, before a question, what refuses it without an account."""
    refuse(place.plan, place.path.parent, accept_stale_prices=accept_stale_prices)
    return read_settings(place)


def deploy(
    plan: FleetPlan,
    stack: str,
    directory: Path,
    again: str,
    *,
    config: Mapping[str, Any],
    accept_stale_prices: bool,
) -> None:
    """Write ``config`` and the plan into the stack's configuration, check the account, and run ``pulumi up``."""
    stack_file.caller_of(plan.region)  # before anything is written, or gigabytes of packages are downloaded
    if config:
        stack_file.change_stack_file(stack_path(directory, stack), config)
    put_plan(plan, stack, directory, accept_stale_prices=accept_stale_prices)
    if stack_file.WHEELS_KEY not in (file := stack_file.read_stack(stack, directory)).config:
        pack_wheels(file)
    findings = check(plan, stack, directory)
    write_findings([finding for finding in findings if finding.level != "ok"])
    counts = count_levels(findings)
    say("preflight: " + ", ".join(f"{count} {level}" for level, count in counts.items()))
    if counts["error"]:
        raise GpufleetError(
            "this account cannot carry out the plan; nothing was created", next_step=f"mend the errors, then {again}"
        )
    carry_out(stack, directory)


def follow_run(
    stack: str,
    directory: Path,
    *,
    follow: bool = True,
    leaves: Callable[[ControllerState], bool] = lambda state: False,
    again: str = "",
) -> bool:
    """Print what changes until the run has ended; a run that ends neither done nor stopped ends the program with 1.

    Returns True when the run ``leaves`` the stack; without somebody who follows it by ``again`` it does not. Without
    ``follow`` the function only says how to.
    """
    if not follow:
        say(f"the controller starts the nodes within a minute: gpufleet status --stack {stack} --watch 60")
        return False
    file, since = stack_file.read_stack(stack, directory), datetime.now(UTC)
    names = stack_file.resolve_names(file)

    def ended(reading: Reading) -> bool:
        state = reading.state
        return state is not None and state.updated_at > since and (state.phase in ENDED or leaves(state))

    plan = stack_file.follow_policy(file.plan, file.config)
    try:
        state = live.watch(plan, lambda: read(names, datetime.now(UTC)), live.POLL_S, ended=ended).state
    except KeyboardInterrupt:
        here = f" in {names.region} only, until {again} takes it up again" if again else ""
        say(
            f"\nno longer followed; the fleet goes on{here}. gpufleet status --stack {stack} --watch 60 follows it, "
            f"gpufleet stop --stack {stack} saves and ends its nodes, gpufleet down --stack {stack} ends all of it",
            err=True,
        )
        return False
    assert state is not None  # ended
    if state.phase not in ENDED:
        return True
    say(f"next: gpufleet down --stack {stack} ends what still costs by the hour, and keeps the checkpoints")
    if state.phase not in ("done", "stopped"):
        sys.exit(GpufleetError.exit_code)
    return False
