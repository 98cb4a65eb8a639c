"""``gpufleet preflight``: check that the account can carry out a plan, before anything is created or paid."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from pulumi import RunError

from bootstrap.contract.launcher import Start, loses_sigterm, split_command, start_of
from infra import configuration
from infra.images import dlami_of
from infra.naming import Names
from infra.offline.preview import stand_in
from infra.s3_uri import read_s3_prefix
from infra.settings import ConfigError, interface_endpoints
from optimizer.audit import audit
from optimizer.catalog import load
from optimizer.commands.options import directory_option, plan_arguments, read_plan_argument, stack_path
from optimizer.commands.output import format_option, say, write_csv, write_json
from optimizer.commands.progress import steps
from optimizer.commands.stack_file import StackFile, check_name, read_stack
from optimizer.contract.errors import GpufleetError
from optimizer.contract.plan import SCHEMA_VERSION, FleetPlan
from optimizer.preflight.dry_run import DRY_RUNS
from optimizer.preflight.model import (
    Check,
    Deployment,
    Finding,
    failure,
    named,
    passed,
    warning,
)
from optimizer.preflight.run import CHECKS, PreflightReport, preflight
from optimizer.training_code import describe_demands, other_code

COLUMNS = ("level", "check", "found", "value", "limit", "why", "next")
# The Pulumi program needs a stack's name; without --stack nothing that is named after the stack is checked.
_NO_STACK = "preflight"
_STARTED: dict[Start, str] = {
    "torchrun": "once a GPU, under torchrun",
    "program": "a program that runs once on every node and starts its ranks itself (docs/engines.md)",
}


@click.command(
    epilog="""\b
Example:
  gpufleet preflight plans.json
  gpufleet preflight plans.json --plan 2 --stack dev
  gpufleet preflight plans.json --stack dev --format json > preflight.json
"""
)
@plan_arguments
@click.option("--stack", metavar="NAME", help="Pulumi stack of the plan: its configuration and key count.")
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
    quotas less their use, zones, spot placement score, reservations and Capacity Blocks, image, key, network, prices.
    An unanswered check is "unknown", with the missing permission. PLAN is one plan or the output
    of recommend; - reads standard input. With --stack, its configuration in Pulumi.NAME.yaml counts.

    Exit status: 0 no error (warnings and unknowns may be there), 1 at least one error, or AWS cannot be asked.
    """
    chosen = read_plan_argument(plan, plan_number)
    report = check(chosen, stack, directory, more=DRY_RUNS if dry_run_calls else ())
    if output_format == "json":
        write_json(_document(report, chosen, stack))
    elif output_format == "csv":
        write_csv([_row(finding) for finding in report.findings], COLUMNS)
    else:
        write_findings(report.findings)
    counts = report.counts()
    say(", ".join(f"{count} {level}" for level, count in counts.items()), err=output_format != "table")
    if counts["error"]:
        sys.exit(GpufleetError.exit_code)


def check(plan: FleetPlan, stack: str | None, directory: Path, *, more: Sequence[Check] = ()) -> PreflightReport:
    """Check a plan with the configuration of its stack; raises as ``optimizer.preflight.run.preflight``."""
    file = _read_stack_file(stack, directory)

    with steps("checks of the account", len(CHECKS) + len(more)) as told:
        offline = _check_offline(plan, stack, file)
        return preflight(_target(plan, stack, file), more=more, offline=offline, told=told)


def _read_stack_file(stack: str | None, directory: Path) -> StackFile | None:
    if stack is None:
        return None
    check_name(stack)
    path = stack_path(directory, stack)
    if path.exists():
        return read_stack(stack, directory)
    say(f"note: {path} is not there: the stack is looked at with the default configuration", err=True)
    return None


def _target(plan: FleetPlan, stack: str | None, file: StackFile | None) -> Deployment:
    config = file.config if file else {}

    def text(key: str, default: str = "") -> str:
        return str(config.get(f"gpufleet:{key}") or default)

    ami_id, ami_name, ami_parameter, ami_problem = text("amiId"), text("amiName"), "", ""
    pinned = config.get("gpufleet:dlami")
    if not (ami_id or ami_name):
        try:
            ami_parameter = dlami_of(plan).parameter
        except ConfigError as error:
            ami_problem = str(error)
        if isinstance(pinned, Mapping):
            ami_id = str(pinned.get("id") or "")
    subnets = config.get("gpufleet:subnetIds") or []
    ceiling_usd = plan.job.budget_usd
    with suppress(ValueError):  # reported by _check_configuration
        # 0 means the plan's budget.
        ceiling_usd = float(text("ceilingUsd")) or ceiling_usd
    # The alias holds neither account nor region.
    names = Names(stack=stack or "", account_id="", region=plan.region, partition="")
    return Deployment(
        plan=plan,
        stack=stack or "",
        key_alias=names.key_alias if stack else "",
        gang=plan.node_count > 1 and text("mode", "training") == "training",
        zone_id=text("zoneId"),
        vpc_id=text("vpcId"),
        subnet_ids=tuple(map(str, subnets)) if isinstance(subnets, list) else (),
        endpoints=interface_endpoints(image=text("image")),
        container_image=text("image"),
        data_bucket=(read_s3_prefix(text("data")) or ("",))[0],
        ami_id=ami_id,
        ami_name=ami_name,
        ami_parameter=ami_parameter,
        ami_problem=ami_problem,
        ceiling_usd=ceiling_usd,
    )


def _check_offline(plan: FleetPlan, stack: str | None, file: StackFile | None) -> list[Finding]:
    return [
        *named("plan", _check_numbers(plan)),
        *named("configuration", _check_configuration(plan, stack, file)),
        *named("training code", [_check_training_code(plan, file)]),
    ]


def _check_numbers(plan: FleetPlan) -> list[Finding]:
    """See that the plan is as recommend wrote it, and that its prices hold."""
    faults = [
        failure(fault.got, limit=fault.limit, why=fault.why, next_step=fault.next_step) for fault in audit(plan, load())
    ]
    return faults or [passed("it is as recommend wrote it, and its prices hold")]


def _check_training_code(plan: FleetPlan, file: StackFile | None) -> Finding:
    """Warn of a plan that nothing on the nodes would train."""
    command = str(file.config.get("gpufleet:trainCommand") or "") if file else ""
    if not plan.beyond_trainer or command:
        words = split_command(command) or []
        how = _STARTED[start_of(words)]
        if loses_sigterm(words):
            return warning(
                "gpufleet:trainCommand starts `conda run`, which ends on SIGTERM and does not pass it on",
                why="a training that does not watch GPUFLEET_DRAIN_FILE hears of no notice, and saves nothing then",
                next_step="name the environment's program, /opt/conda/envs/NAME/bin/python (docs/engines.md)",
            )
        text = f"gpufleet:trainCommand names the code that trains: {how}" if command else describe_demands(plan)
        return passed(text)
    return warning(
        f"the reference trainer does not carry out this plan: {'; '.join(plan.beyond_trainer)}",
        why="without gpufleet:trainCommand the nodes join and wait, and are paid",
        next_step=other_code(plan),
    )


def _check_configuration(plan: FleetPlan, stack: str | None, file: StackFile | None) -> list[Finding]:
    """Let the Pulumi program itself judge plan and configuration."""
    stand_in(plan, stack=stack or _NO_STACK, config=file.config_texts if file else {})
    finding = passed("the Pulumi program takes plan and configuration")
    try:
        # Files that keys name are searched from Pulumi.yaml's folder.
        with chdir(file.path.parent if file else Path()):
            configuration.load(starts_nodes=file is not None)
    except (ConfigError, RunError) as error:  # RunError: a value is no number
        finding = failure(
            str(error),
            why="pulumi up refuses it before anything is created",
            next_step=f"change Pulumi.{stack}.yaml, or choose another plan" if file else "choose another --plan N",
        )
    if file is None or file.plan == plan:
        return [finding]
    other_plan = warning(
        f"stack {stack} has another plan than the one that is checked",
        why="pulumi up carries out the stack's",
        next_step=f"gpufleet stack set PLAN --stack {stack}",
    )
    return [finding, other_plan]


def _row(finding: Finding) -> dict[str, Any]:
    fields = asdict(finding) | ({"why": "", "next_step": ""} if finding.level == "ok" else {})
    return {name: fields[{"found": "text", "next": "next_step"}.get(name, name)] for name in COLUMNS}


def _document(report: PreflightReport, plan: FleetPlan, stack: str | None) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "checked_at": report.at.isoformat(timespec="seconds"),
        "account": report.account.id if report.account else None,
        "region": plan.region,
        "stack": stack,
        "plan": {
            "instance_type": plan.instance_type,
            "node_count": plan.node_count,
            "purchase": plan.purchase.option,
            "model": plan.job.model,
        },
        "counts": report.counts(),
        "rows": [_row(finding) for finding in report.findings],
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
