"""``gpufleet stack``: hand a plan to a Pulumi stack."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from optimizer.errors import GpufleetError, InvalidInputError
from optimizer.plan import FleetPlan, PlanError, read_plan, read_plan_file


def read_plan_argument(plan: str, plan_number: int) -> FleetPlan:
    """The plan a command was given: a file, or ``-`` for standard input.

    Raises:
        InvalidInputError: it cannot be read, or is not a plan that agrees with itself.
    """
    try:
        if plan == "-":
            return read_plan(sys.stdin.read(), plan_number=plan_number, origin="standard input")
        return read_plan_file(Path(plan), plan_number=plan_number)
    except PlanError as error:
        raise InvalidInputError(
            str(error), next_step="write a plan with: gpufleet recommend REQUEST.yaml --format json > plans.json"
        ) from error


@click.group()
def command() -> None:
    """Hand plans to Pulumi stacks."""


@command.command(
    "set",
    epilog="""\b
Example:
  gpufleet recommend request.yaml --format json > plans.json
  gpufleet stack set plans.json --stack dev
  gpufleet recommend request.yaml --format json | gpufleet stack set - --stack dev --plan 2
""",
)
@click.argument("plan")
@click.option("--stack", required=True, metavar="NAME", help="Pulumi stack whose configuration to write.")
@click.option(
    "--plan", "plan_number", type=click.IntRange(min=1), default=1, show_default=True, help="Which plan of PLAN."
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder of Pulumi.yaml.  [default: the current one]",
)
def set_plan(plan: str, stack: str, plan_number: int, directory: Path) -> None:
    """Write PLAN into a stack's configuration, Pulumi.NAME.yaml.

    PLAN is one plan or the output of recommend; - reads standard input. Only gpufleet:plan and aws:region change; other
    keys and comments stay. Nothing is written when the plan is wrong. Needs no Pulumi CLI.
    """
    from infra.config import plan_refusals
    from infra.naming import slug

    try:
        slug(stack)
    except ValueError as error:
        raise InvalidInputError(str(error), next_step="choose another --stack NAME") from error
    chosen = read_plan_argument(plan, plan_number)
    refusals = plan_refusals(chosen)
    if refusals:
        raise InvalidInputError("this plan cannot be deployed:\n  " + "\n  ".join(refusals))
    if not (directory / "Pulumi.yaml").is_file():
        raise InvalidInputError(
            f"{directory}/Pulumi.yaml is missing",
            why="the stack's configuration belongs next to the project it configures",
            next_step="run in gpufleet's checkout, or give it with --directory",
        )
    path = directory / f"Pulumi.{stack}.yaml"
    before = write_stack_config(path, chosen)
    click.echo(
        f"{path}: gpufleet:plan is {chosen.node_count} x {chosen.instance_type} ({chosen.purchase.option}) training "
        f"{chosen.job.model}, expected {chosen.hours.expected:,.1f} h and {chosen.cost_usd.expected:,.2f} USD; "
        f"aws:region is {chosen.region}"
    )
    if before.get("aws:region", chosen.region) != chosen.region:
        click.echo(
            f"aws:region was {before['aws:region']}: resources do not move between regions, so where this stack is "
            "deployed already, destroy it first or set this plan in another --stack",
            err=True,
        )
    torch_comes = any(before.get(f"gpufleet:{key}") for key in ("wheels", "amiName", "amiId", "vpcId"))
    reaches_an_index = str(before.get("gpufleet:nat")).lower() == "true"
    if not (torch_comes or reaches_an_index or before.get("gpufleet:platform") == "eks"):
        click.echo("once: pulumi config set gpufleet:wheels wheels.tar (docs/infrastructure.md, 'Before the first up')")
    reservation = chosen.purchase.capacity_reservation_id
    if reservation and len(chosen.zone_ids) != 1 and not before.get("gpufleet:zoneId"):
        click.echo(f"once: pulumi config set gpufleet:zoneId ZONE, the zone {reservation} is in")
    if not before.get("gpufleet:trainCommand"):
        click.echo("once: pulumi config set gpufleet:trainCommand COMMAND; without one the nodes are paid and idle")
    click.echo(f"next: pulumi stack select --create {stack} && pulumi up")


def write_stack_config(path: Path, plan: FleetPlan) -> dict[str, Any]:
    """Set ``gpufleet:plan`` and ``aws:region`` in a Pulumi stack file; everything else, comments too, stays.

    Returns the configuration that was there before.

    The file is replaced in one step, so that a full disk or a kill leaves the old one.

    Raises:
        InvalidInputError: the file there is not YAML, or not a stack's configuration.
        GpufleetError: it cannot be written.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 120
    try:
        data: Any = yaml.load(path) if path.exists() else None
    except (YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is not YAML: {error}", next_step="repair or delete it") from error
    data = {} if data is None else data
    config = data.setdefault("config", {}) if isinstance(data, dict) else None
    if not isinstance(config, dict):
        raise InvalidInputError(
            f"{path} is not a stack's configuration",
            limit="a mapping with a mapping named config",
            next_step="repair it",
        )
    before = dict(config)
    config["aws:region"] = plan.region
    # A field that is absent means the same as null, and Pulumi's configuration knows no null.
    config["gpufleet:plan"] = plan.model_dump(mode="json", exclude_none=True)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            yaml.dump(data, file)
        temporary.chmod(path.stat().st_mode if path.exists() else 0o644)
        temporary.replace(path)
    except OSError as error:
        raise GpufleetError(f"{path} cannot be written: {error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return before
