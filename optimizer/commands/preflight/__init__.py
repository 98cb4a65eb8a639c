"""``gpufleet preflight``: check that the account can carry out a plan, before anything is created or paid."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from pulumi import RunError

from bootstrap.contract.launcher import EXPANDED, READS_TEXT, loses_sigterm, split_command, start_of
from infra import configuration
from infra.offline.preview import stand_in
from infra.settings import ConfigError, StackSettings
from optimizer.aws import clients
from optimizer.commands.options import directory_option, plan_arguments, read_plan_argument, stack_path
from optimizer.commands.output import format_option, say, write_csv, write_json
from optimizer.commands.preflight import capacity, image, money, network, reservation
from optimizer.commands.preflight.dry_run import DRY_RUNS
from optimizer.commands.preflight.model import LEVELS, Check, Context, Finding, ask, failure, named, passed, warning
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import StackFile, caller_of, check_name, read_stack
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.plan import SCHEMA_VERSION, FleetPlan
from optimizer.training_code import describe_demands, other_code

# In the order of printing within a level.
CHECKS = (
    Check("instance quotas", capacity.check_instance_quotas),
    Check("reservation", reservation.check_reservation),
    Check("image", image.check_image),
    Check("container image", image.check_container_image),
    Check("data bucket", network.check_data_bucket),
    Check("VPC", network.check_vpc),
    Check("addresses", network.check_addresses),
    Check("way to AWS", network.check_reach),
    Check("prices", money.check_prices),
)
# EC2 throttles describe calls far above this, by account and region:
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html
CHECKS_AT_ONCE = 8
COLUMNS = ("level", "check", "found", "value", "limit", "why", "next")
# The Pulumi program needs a stack's name; without --stack nothing that is named after the stack is checked.
_NO_STACK = "preflight"


@click.command(
    epilog="""\b
Example:
  gpufleet preflight plans.json
  gpufleet preflight plans.json --plan 2 --stack dev
  gpufleet preflight plans.json --stack dev --format json > preflight.json
"""
)
@plan_arguments
@click.option("--stack", metavar="NAME", help="Pulumi stack of the plan: its configuration counts.")
@directory_option
@click.option(
    "--dry-run-calls",
    is_flag=True,
    help="Also ask EC2, by dry runs that create nothing, whether these credentials may start the plan's nodes "
    "and make its reservation.",
)
@format_option
def command(
    plan: str,
    plan_number: int,
    stack: str | None,
    directory: Path,
    dry_run_calls: bool,
    output_format: str,
) -> None:
    """Check whether this AWS account can carry out PLAN now; every failure is listed, and nothing is changed.

    Asks with the credentials of the environment, which need read permissions only (gpufleet stack policy preflight):
    quotas less their use, reservations and Capacity Blocks, an own image, network, prices.
    An unanswered check is "unknown", with the missing permission. PLAN is one plan or the output
    of recommend; - reads standard input. With --stack, its configuration in Pulumi.NAME.yaml counts.

    Exit status: 0 no error (warnings and unknowns may be there), 1 at least one error, or AWS cannot be asked.
    """
    chosen = read_plan_argument(plan, plan_number)
    at = datetime.now(UTC)
    findings = check(chosen, stack, directory, more=DRY_RUNS if dry_run_calls else ())
    if output_format == "json":
        write_json(_document(findings, at, chosen, stack))
    elif output_format == "csv":
        write_csv(list(map(_row, findings)), COLUMNS)
    else:
        write_findings(findings)
    counts = count_levels(findings)
    say(", ".join(f"{count} {level}" for level, count in counts.items()), err=output_format != "table")
    if counts["error"]:
        sys.exit(GpufleetError.exit_code)


def check(plan: FleetPlan, stack: str | None, directory: Path, *, more: Sequence[Check] = ()) -> list[Finding]:
    """Check a plan with the configuration of its stack; raises as ``preflight``."""
    file = None
    if stack is not None:
        check_name(stack)
        if (path := stack_path(directory, stack)).exists():
            file = read_stack(stack, directory)
        else:
            say(f"note: {path} is not there: the stack is looked at with the default configuration", err=True)
    with patience("asking AWS about the account"):
        settings, findings = _read_settings(plan, stack, file)
        offline = [*named("configuration", findings), *named("training code", [_check_training_code(settings)])]
        return preflight(settings, stack=stack or "", more=more, offline=offline)


def count_levels(findings: Sequence[Finding]) -> dict[str, int]:
    """Return the number of findings of each level."""
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}


def preflight(
    settings: StackSettings,
    *,
    stack: str = "",
    more: Sequence[Check] = (),
    offline: Sequence[Finding] = (),
    at: datetime | None = None,
) -> list[Finding]:
    """Check with AWS whether a configuration can be carried out ``at`` a time, by default now; ``stack`` is its name.

    ``more`` are further checks, ``offline`` findings made without AWS. Errors come first.

    Raises:
        GpufleetError: no credentials, refused ones, or no way to AWS.
    """
    region = settings.plan.region
    (account_id, arn), ec2, subnet_ids = caller_of(region), clients.ec2(region), list(settings.subnet_ids)
    identity = passed(f"account {account_id} as {arn}", check="identity", value=account_id)
    context = Context(
        settings=settings,
        stack=stack,
        account_id=account_id,
        ec2=ec2,
        service_quotas=clients.service_quotas(region),
        subnets=ask(lambda: ec2.describe_subnets(SubnetIds=subnet_ids)["Subnets"] if subnet_ids else []),
        now=at or datetime.now(UTC),
    )
    with ThreadPoolExecutor(max_workers=CHECKS_AT_ONCE) as pool:
        answers = list(pool.map(lambda check: list(check(context)), (*CHECKS, *more)))
    findings = [*offline, identity, *(finding for answer in answers for finding in answer)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def judge(file: StackFile, *, starts_nodes: bool = False) -> tuple[StackSettings | None, str]:
    """Return the settings that the Pulumi program reads of a stack, and why it refuses them; AWS is not asked."""
    stand_in(file.plan, stack=file.stack, config=file.config_texts)
    settings: StackSettings | None = None
    try:
        with chdir(file.path.parent):  # keys name files from Pulumi.yaml's folder
            settings, problems = configuration.read(starts_nodes=starts_nodes)
    except (ConfigError, RunError) as error:  # RunError: a value is no number
        problems = [str(error)]
    return settings, "\n  ".join([f"stack {file.stack} cannot be deployed:", *problems] if problems else [])


def read_settings(file: StackFile) -> StackSettings:
    """Return a stack's settings; InvalidInputError where the Pulumi program refuses them."""
    settings, problem = judge(file)
    if settings is None or problem:
        raise InvalidInputError(problem, next_step=f"--config KEY=VALUE, or change {file.path}")
    return settings


def _read_settings(plan: FleetPlan, stack: str | None, file: StackFile | None) -> tuple[StackSettings, list[Finding]]:
    name = stack or _NO_STACK
    own = file or StackFile(stack=name, path=Path(name), plan=plan, config={})
    settings, problem = judge(replace(own, plan=plan), starts_nodes=file is not None)
    finding = passed("the Pulumi program takes plan and configuration")
    if problem:
        finding = failure(
            problem,
            why="pulumi up refuses it before anything is created",
            next_step=f"change Pulumi.{stack}.yaml, or choose another plan" if file else "choose another --plan N",
        )
    settings = settings or StackSettings(stack=name, plan=plan)
    if file is None or file.plan == plan:
        return settings, [finding]
    other_plan = warning(
        f"stack {stack} has another plan than the one that is checked",
        why="pulumi up carries out the stack's",
        next_step=f"gpufleet stack set PLAN --stack {stack}",
    )
    return settings, [finding, other_plan]


def _check_training_code(settings: StackSettings) -> Finding:
    """Warn of a plan that nothing on the nodes would train, and of a command that does not do what it says."""
    plan, command = settings.plan, settings.train_command
    if plan.beyond_trainer and not command:
        return warning(
            f"the reference trainer does not carry out this plan: {'; '.join(plan.beyond_trainer)}",
            why="without gpufleet:trainCommand the nodes join and wait, and are paid",
            next_step=other_code(plan),
        )
    words = split_command(command) or []
    if loses_sigterm(words):
        return warning(
            "gpufleet:trainCommand starts `conda run`, which ends on SIGTERM and does not pass it on",
            why="a training that does not watch GPUFLEET_DRAIN_FILE hears of no notice, and saves nothing then",
            next_step="name the environment's program, /opt/conda/envs/NAME/bin/python (docs/engines.md)",
        )
    is_program = start_of(words) == "program"
    # A shell's own text may have any variable.
    names = [] if any(map(READS_TEXT.fullmatch, words)) else re.findall(r"\$(?:\{\w+\}|[A-Za-z_]\w*)", command)
    if kept := [name for name in dict.fromkeys(names) if not (is_program and EXPANDED.fullmatch(name))]:
        return warning(
            f"gpufleet:trainCommand has {', '.join(kept)}, which nobody replaces",
            why="no shell reads the command, and of a program's words the nodes replace ${GPUFLEET_...}, "
            "${MASTER_ADDR} and ${MASTER_PORT} alone",
            next_step="write the value, read the variable in the code, or say bash -c '...' (docs/engines.md)",
        )
    how = "a program that runs once on every node and starts its ranks itself (docs/engines.md)"
    how = how if is_program else "once a GPU, under torchrun"
    return passed(f"gpufleet:trainCommand names the code that trains: {how}" if command else describe_demands(plan))


def _row(finding: Finding) -> dict[str, Any]:
    fields = asdict(finding) | ({"why": "", "next_step": ""} if finding.level == "ok" else {})
    return {name: fields[{"found": "text", "next": "next_step"}.get(name, name)] for name in COLUMNS}


def _document(findings: Sequence[Finding], at: datetime, plan: FleetPlan, stack: str | None) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "checked_at": at.isoformat(timespec="seconds"),
        "account": next(finding.value for finding in findings if finding.check == "identity"),
        "region": plan.region,
        "stack": stack,
        "plan": {
            "instance_type": plan.instance_type,
            "node_count": plan.node_count,
            "purchase": plan.purchase.option,
            "model": plan.job.model,
        },
        "counts": count_levels(findings),
        "rows": list(map(_row, findings)),
    }


def write_findings(findings: Sequence[Finding]) -> None:
    """Print findings; all but passed checks with reason and next step."""
    width = max((len(finding.level) for finding in findings), default=0)
    for finding in findings:
        say(f"{finding.level:<{width}}  {finding.check}: {finding.text}", indent=" " * (width + 4))
        if finding.level != "ok":
            for word, text in (("why", finding.why), ("next", finding.next_step)):
                if text:
                    say(f"{'':<{width}}    {word}: {text}")
    click.echo("")
