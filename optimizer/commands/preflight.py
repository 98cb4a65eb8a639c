"""``gpufleet preflight``: whether the account can carry out a plan, asked before anything is created or paid."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.output import format_option, write_csv, write_json
from optimizer.commands.stack import read_plan_argument
from optimizer.errors import GpufleetError, InvalidInputError
from optimizer.plan import INTERFACE_ENDPOINTS, SCHEMA_VERSION, FleetPlan

if TYPE_CHECKING:
    from optimizer.aws.preflight import Report, Row, Stack, StackNames, Target
    from optimizer.commands.stack_file import StackFile

COLUMNS = ("level", "check", "found", "value", "limit", "why", "next")
# The program needs a stack's name to look at a plan; where none is given, nothing that is named after it is looked for.
_NO_STACK = "preflight"


@click.command(
    epilog="""\b
Example:
  gpufleet preflight plans.json
  gpufleet preflight plans.json --plan 2 --stack dev
  gpufleet preflight plans.json --stack dev --format json > preflight.json
"""
)
@click.argument("plan")
@click.option(
    "--plan", "plan_number", type=click.IntRange(min=1), default=1, show_default=True, help="Which plan of PLAN."
)
@click.option("--stack", metavar="NAME", help="Pulumi stack the plan is for: its configuration, bucket and key.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder of Pulumi.yaml.  [default: the current one]",
)
@format_option
def command(plan: str, plan_number: int, stack: str | None, directory: Path, output_format: str) -> None:
    """Check whether this AWS account can carry out PLAN now; every failure is listed, and nothing is changed.

    Asks with the credentials of the environment, which need read permissions only (docs/preflight.md has the policy):
    quotas less what is in use, zones, spot placement score, reservations and Capacity Blocks, image, key, bucket,
    network, EFA, prices, budgets. What cannot be asked is "unknown", with the permission that is missing. PLAN is one
    plan or the output of recommend; - reads standard input. With --stack, its configuration in Pulumi.NAME.yaml counts.

    Exit status: 0 no error (warnings and unknowns may be there), 1 at least one error, or AWS cannot be asked.
    """
    chosen = read_plan_argument(plan, plan_number)
    file = _stack_file(stack, directory)

    from optimizer.aws.preflight import LEVELS, preflight

    target, refused = _target(chosen, stack, file)
    report = preflight(target)
    rows = sorted((*refused, *report.rows), key=lambda row: LEVELS.index(row.level))
    counts: dict[str, int] = {level: sum(row.level == level for row in rows) for level in LEVELS}
    if output_format == "json":
        write_json(_document(report, rows, counts, chosen, stack))
    elif output_format == "csv":
        write_csv([_fields(row) for row in rows], COLUMNS)
    else:
        _write_text(rows)
    click.echo(", ".join(f"{count} {level}" for level, count in counts.items()), err=output_format != "table")
    if counts["error"]:
        sys.exit(GpufleetError.exit_code)


def _stack_file(stack: str | None, directory: Path) -> StackFile | None:
    """What Pulumi.NAME.yaml says; None where there is none yet.

    Raises:
        InvalidInputError: no stack name, or a file that is no stack's configuration.
    """
    if stack is None:
        return None
    from infra.naming import slug
    from optimizer.commands.stack_file import read_stack

    try:
        slug(stack)
    except ValueError as error:
        raise InvalidInputError(str(error), next_step="choose another --stack NAME") from error
    path = directory / f"Pulumi.{stack}.yaml"
    if path.exists():
        return read_stack(stack, directory)
    click.echo(f"note: {path} is not there: the stack is looked at with the default configuration", err=True)
    return None


def _target(plan: FleetPlan, stack: str | None, file: StackFile | None) -> tuple[Target, list[Row]]:
    """What to look at, and a row for each way in which the Pulumi program would refuse it.

    A refused configuration is looked at all the same, as far as it can be read: its other failures count too.
    """
    from infra.config import DEFAULT_VPC_CIDR, ConfigError
    from infra.eks import SYSTEM_INSTANCE_TYPE
    from infra.images import pinned_name
    from infra.network import KUBERNETES_ENDPOINTS, SYSTEM_NODES
    from optimizer.aws.preflight import Row, Target

    config = file.config if file else {}
    rows = [_accepted(plan, stack, config)]
    if file and file.plan != plan:
        rows.append(
            Row(
                check="configuration",
                level="warning",
                found=f"stack {stack} has another plan than the one that is checked",
                why="pulumi up carries out the stack's",
                next_step=f"gpufleet stack set PLAN --stack {stack}",
            )
        )

    def text(key: str, default: str = "") -> str:
        return str(config.get(f"gpufleet:{key}") or default)

    eks = text("platform") == "eks"
    ami_id, ami_name, ami_problem = text("amiId"), text("amiName"), ""
    if not (ami_id or ami_name):
        try:
            ami_name = pinned_name(plan, "eks" if eks else "ec2")
        except ConfigError as error:
            ami_problem = str(error)
    subnets = config.get("gpufleet:subnetIds") or []
    ceiling_usd = plan.job.budget_usd
    with suppress(ValueError):  # of the configuration's own row
        # 0 means the plan's budget.
        ceiling_usd = float(text("ceilingUsd")) or ceiling_usd
    target = Target(
        plan=plan,
        stack=_stack(plan, stack) if stack else None,
        gang=plan.node_count > 1 and text("mode", "training") == "training",
        zone_id=text("zoneId"),
        vpc_id=text("vpcId"),
        subnet_ids=tuple(map(str, subnets)) if isinstance(subnets, list) else (),
        vpc_cidr=text("vpcCidr", DEFAULT_VPC_CIDR),
        nat=text("nat").lower() == "true",
        endpoints=INTERFACE_ENDPOINTS + (KUBERNETES_ENDPOINTS if eks else ()),
        beside={SYSTEM_INSTANCE_TYPE: SYSTEM_NODES} if eks else {},
        ami_id=ami_id,
        ami_name=ami_name,
        ami_problem=ami_problem,
        ceiling_usd=ceiling_usd,
    )
    return target, rows


def _accepted(plan: FleetPlan, stack: str | None, config: Mapping[str, Any]) -> Row:
    """Whether the Pulumi program takes plan and configuration: asked of the program itself."""
    from pulumi import RunError

    from infra.config import ConfigError, load
    from infra.preview import stand_in
    from optimizer.aws.preflight import Row
    from optimizer.commands.stack_file import PLAN_KEY, REGION_KEY

    # Plan and region are PLAN's: `stack set` writes both.
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in config.items()
        if key not in (PLAN_KEY, REGION_KEY)
    }
    stand_in(plan, stack=stack or _NO_STACK, config=values)
    try:
        load(starts_nodes=bool(config))
    except (ConfigError, RunError) as error:  # RunError: Pulumi's own, of a value that is no number
        return Row(
            check="configuration",
            level="error",
            found=str(error),
            why="pulumi up refuses it before anything is created",
            next_step=f"change Pulumi.{stack}.yaml, or choose another plan" if config else "choose another --plan N",
        )
    return Row(check="configuration", level="ok", found="the Pulumi program takes plan and configuration")


def _stack(plan: FleetPlan, name: str) -> Stack:
    from infra.naming import PROJECT, Names
    from optimizer.aws.preflight import Stack, StackNames

    def names(account_id: str, partition: str) -> StackNames:
        own = Names(stack=name, account_id=account_id, region=plan.region, partition=partition)
        role = f"AWSServiceRoleForAutoScaling_{own.service_role_suffix}"
        return StackNames(
            bucket=own.bucket,
            key_alias=own.key_alias,
            service_role_arn=f"arn:{partition}:iam::{account_id}:role/aws-service-role/autoscaling.amazonaws.com/{role}",
        )

    return Stack(name=name, tag=f"{PROJECT}:stack", names=names)


def _fields(row: Row) -> dict[str, Any]:
    fields = asdict(row)
    fields["next"] = fields.pop("next_step")
    return {name: fields[name] for name in COLUMNS}


def _document(
    report: Report, rows: list[Row], counts: Mapping[str, int], plan: FleetPlan, stack: str | None
) -> dict[str, Any]:
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
        "counts": counts,
        "rows": [_fields(row) for row in rows],
    }


def _write_text(rows: list[Row]) -> None:
    """A block a row, the worst first; a sentence is not cut, as its end is what to do."""
    width = max(len(row.level) for row in rows)
    for row in rows:
        click.echo(f"{row.level:<{width}}  {row.check}: {row.found}")
        if row.level != "ok":
            for word, text in (("why", row.why), ("next", row.next_step)):
                if text:
                    click.echo(f"{'':<{width}}    {word}: {text}")
    click.echo("")
