"""``gpufleet drill``, in ``gpufleet stack``: interrupt a node on purpose, and count what that cost."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from bootstrap.contract.ledger import CATEGORIES, Summary, read_lines, summarize
from bootstrap.contract.state import ENDED, ControllerState
from bootstrap.contract.words import counted
from infra.naming import Names
from optimizer.aws import clients, control, errors, training
from optimizer.commands.asking import confirm, consent_options
from optimizer.commands.options import Hours, one_stack_options, repeat_command
from optimizer.commands.output import say
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import read_stack, resolve_names
from optimizer.commands.status.ranks import node_id
from optimizer.contract.errors import DataMissingError, GpufleetError

LOOK_S, FIS_LOOK_S = 30, 5
# Role that EC2's console and AWS's own tool make in an account: https://github.com/aws/amazon-ec2-spot-interrupter
FIS_ROLE = "aws-fis-itn"
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_awsfaultinjectionservice.html
FIS_ACTIONS = (
    "fis:CreateExperimentTemplate, fis:StartExperiment, fis:GetExperiment, fis:DeleteExperimentTemplate, iam:PassRole "
    f"of {FIS_ROLE}, and once iam:CreateServiceLinkedRole for fis.amazonaws.com"
)
LOSSES = [category for category in CATEGORIES if category != "useful"]


@click.command(
    epilog="""\b
Example:
  gpufleet drill --stack dev --dry-run
  gpufleet drill 1 --stack dev
"""
)
@click.argument("rank", default="0")
@one_stack_options
@consent_options
@click.option("--timeout", type=Hours(), default="2h", show_default=True, help="How long to wait for the gang.")
def command(rank: str, stack: str | None, directory: Path, yes: bool, timeout: float) -> None:
    """Interrupt the node with this RANK, or an instance id, and print the seconds and dollars that the run lost.

    A spot node gets EC2's own interruption notice through AWS Fault Injection Service, where the account has the role
    aws-fis-itn and you may use it; another node is ended through its group, whose hook is its notice. The run saves,
    restarts, and loses what a real interruption costs: the ledger has it. Only a whole gang with a checkpoint is
    interrupted. Exit status 1: the run did not come back within --timeout. A refusal names the permissions it takes.
    """
    names = resolve_names(read_stack(stack, directory))
    key = node_id(names, rank)
    lifecycle, step, lines = _check(names, key)
    if not yes:
        question = f"Interrupt {key} ({lifecycle}) of stack {names.stack}, which has saved step {step}?"
        confirm(question, why="the run is interrupted", again=repeat_command({}), nothing_was="interrupted")
        # The run may have ended, or a real interruption begun, while a person read.
        lifecycle, _, lines = _check(names, key)
    sent_at = datetime.now(UTC)
    if lifecycle != "spot" or not _interrupt_spot(names, key):
        needs = "credentials that allow autoscaling:TerminateInstanceInAutoScalingGroup"
        with errors.explained(f"{key} cannot be ended", next_step=needs):
            # Not off the group's size, which at 0 is a person's pause.
            clients.autoscaling(names.region).terminate_instance_in_auto_scaling_group(
                InstanceId=key, ShouldDecrementDesiredCapacity=False
            )
        say(f"{key} saves and ends, by its group's terminate hook", err=True)
    with patience("waiting until the gang trains again"):
        after = _wait(names, sent_at, timedelta(hours=timeout))
    click.echo(_describe(summarize(read_lines(lines)[0]), after))


def _check(names: Names, key: str) -> tuple[str, int, list[str]]:
    """Return the node's lifecycle, newest saved step and the ledger; refuse a run that would lose more."""
    state, lines = _read(names)
    node, progress = state.instances.get(key), training.parse_progress(lines)
    look = f"gpufleet status --stack {names.stack}"
    is_whole = state.phase == "running" and state.complete_since and not state.incomplete_since
    if not is_whole or state.is_silent(datetime.now(UTC)) or node is None or node.ended_at or node.interrupted:
        raise GpufleetError(
            f"{key} is no node of a whole gang: stack {names.stack} is {state.phase}, {state.reason}", next_step=look
        )
    if progress is None or not progress.saved_step or progress.finished:
        raise GpufleetError(
            f"stack {names.stack} has no checkpoint of a run that trains",
            why="an interruption would lose all its work",
            next_step=look,
        )
    return node.lifecycle, progress.saved_step, lines


def _read(names: Names) -> tuple[ControllerState, list[str]]:
    """Return the controller's state and the ledger's lines."""
    s3 = clients.s3(names.region)
    with errors.explained(f"stack {names.stack} cannot be looked at"):
        state = control.read_state(s3, names.bucket, names.control_prefix)
        lines = training.read_ledger_lines(s3, names.bucket, names.checkpoint_prefix)
    if state is None:
        raise DataMissingError(f"the controller of stack {names.stack} has never ticked", next_step="gpufleet status")
    return state, lines


def _interrupt_spot(names: Names, key: str) -> bool:
    """Return whether EC2 interrupts a spot node, as FIS asks it to.

    https://docs.aws.amazon.com/fis/latest/userguide/fis-actions-reference.html#send-spot-instance-interruptions
    """
    fis = clients.fis(names.region)
    target = {"resourceType": "aws:ec2:spot-instance", "resourceArns": [names.arn("ec2", f"instance/{key}")]}
    action = {"actionId": "aws:ec2:send-spot-instance-interruptions", "targets": {"SpotInstances": "node"}}
    try:
        template = fis.create_experiment_template(
            description=f"gpufleet drill of {key}",
            stopConditions=[{"source": "none"}],
            targets={"node": {**target, "selectionMode": "ALL"}},
            actions={"interrupt": {**action, "parameters": {"durationBeforeInterruption": "PT2M"}}},
            roleArn=f"arn:{names.partition}:iam::{names.account_id}:role/{FIS_ROLE}",
        )["experimentTemplate"]["id"]
        try:
            experiment = fis.start_experiment(experimentTemplateId=template)["experiment"]
            for _ in range(12):
                if experiment["state"]["status"] not in ("pending", "initiating"):
                    break
                time.sleep(FIS_LOOK_S)
                experiment = fis.get_experiment(id=experiment["id"])["experiment"]
        finally:
            fis.delete_experiment_template(id=template)
        if experiment["state"]["status"] in ("failed", "stopped"):
            raise GpufleetError(experiment["state"].get("reason", "the experiment failed"))
    except (GpufleetError, *errors.AWS_ERRORS) as error:
        needs = f"; it takes {FIS_ACTIONS}" if errors.is_not_permitted(error) else ""
        say(f"note: FIS sends no interruption: {errors.reason(error)}{needs}", err=True)
        return False
    say(f"EC2 interrupts {key} in two minutes (FIS experiment {experiment['id']})", err=True)
    return True


def _wait(names: Names, since: datetime, limit: timedelta) -> Summary:
    """Return the ledger once a whole gang trains again."""
    ends_at = time.monotonic() + limit.total_seconds()
    while True:
        time.sleep(LOOK_S)
        state, lines = _read(names)
        progress, whole_at = training.parse_progress(lines), state.complete_since
        if progress and whole_at and since < whole_at < progress.at and progress.steps_per_second:
            return summarize(read_lines(lines)[0])
        if state.phase in ENDED or time.monotonic() >= ends_at:
            break
    raise GpufleetError(
        f"the run did not come back within {limit.total_seconds() / 3600:g} h: it is {state.phase}, {state.reason}",
        next_step=f"gpufleet status --stack {names.stack}, gpufleet report {names.stack}",
    )


def _describe(before: Summary, after: Summary) -> str:
    seconds = {name: after.seconds[name] - before.seconds[name] for name in LOSSES}
    parts = ", ".join(f"{name} {value:,.0f} s" for name, value in seconds.items() if value >= 0.5)
    usd = "no price is known"
    if before.usd and after.usd:
        usd = f"{sum(after.usd[name] - before.usd[name] for name in LOSSES):,.2f} USD"
    repeated = counted(after.lost_steps - before.lost_steps, "step")
    return f"the interruption cost {sum(seconds.values()):,.0f} s and {usd}: {parts}; {repeated} repeated"
