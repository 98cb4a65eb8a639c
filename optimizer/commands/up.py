"""``gpufleet up``: from a request or a plan to a fleet that trains, in one command."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import click

from optimizer.catalog import load
from optimizer.commands import options, stack_file
from optimizer.commands.asking import choose_folder, confirm, consent_options
from optimizer.commands.deploying import deploy, follow_run, read_place, run_recommend
from optimizer.commands.long_help import LongCommand
from optimizer.commands.move.regions import Walk
from optimizer.commands.output import say
from optimizer.commands.pulumi_engine import require_pulumi
from optimizer.commands.resume import command as resume
from optimizer.contract.errors import InvalidInputError

FIRST_STACK = "dev"


@click.command(
    cls=LongCommand,
    epilog="""\b
Example:
  gpufleet up request.yaml
  gpufleet up plans.json --plan 2 --stack dev
  gpufleet up request.yaml --stack dev --yes --no-follow
  gpufleet up request.yaml --regions us-east-1,us-west-2,eu-west-1
""",
)
@click.argument("source", metavar="REQUEST|PLAN")
@options.plan_number_option
@click.option(
    "--stack", metavar="NAME", help="Pulumi stack.  [default: the folder's only one; dev where there is none yet]"
)
@click.option("--regions", metavar="R,R", help="Begin in the cheapest region and go on where capacity comes.")
@options.directory_option
@options.config_option
@consent_options
@options.stale_option
@options.follow_option
def command(
    source: str,
    plan_number: int,
    stack: str | None,
    regions: str | None,
    directory: Path,
    config_given: dict[str, str],
    yes: bool,
    accept_stale_prices: bool,
    follow: bool,
) -> None:
    """Stand up a fleet for a request or a plan, and follow its run.

    The steps are those of the single commands: recommend (of a REQUEST, at today's spot prices; its answer is kept
    as plans.NAME.json, and --plan picks from it), a question, stack set, wheels (where the stack names none),
    preflight, pulumi up (needs the Pulumi CLI), and status --watch until the run has ended. A step that fails ends
    the command with its own error and exit status. Ctrl-C leaves the fleet as it is and says how to go on. A
    REQUEST is YAML, a PLAN is JSON; - reads a PLAN from standard input.

    With --regions a REQUEST is planned for all of them, and the run begins in the best as stack NAME-REGION. Once AWS
    has refused all nodes for ten minutes, the run goes on in the next region, as with gpufleet move: its newest
    checkpoint, one meter and one ceiling for all. It moves only while this command follows it; the same command takes
    it up again. gpufleet down --everywhere ends all of them.

    Exit status of a run that was followed to its end: 0 for a run that is done or stopped, else 1.
    """
    require_pulumi()
    if regions is not None:
        if _is_plan(source) or plan_number > 1:
            raise InvalidInputError(
                f"{source} is a plan" if _is_plan(source) else f"--plan is {plan_number}",
                limit="a REQUEST with --regions, and the best plan of each region",
                why="a plan is for one region",
                next_step="gpufleet up REQUEST --regions R,R, or gpufleet up PLAN",
            )
        given = list(dict.fromkeys(region.strip() for region in regions.split(",")))
        base, again = stack or FIRST_STACK, options.repeat_command({})
        for region in given:
            load().check_region(region)
            stack_file.check_name(f"{base}-{region}")
        walk = Walk(
            base=base, request=source, regions=given, directory=directory, config=config_given, again=again,
            accept_stale_prices=accept_stale_prices,
        )  # fmt: skip
        file = walk.begin(lambda place, ceiling_usd: None if yes else _ask(place, ceiling_usd, again))
        if follow:
            walk.follow(file)
        else:
            say(f"the run is stack {file.stack}'s; {again} follows it, and moves it where it must")
        return
    name = stack or (stack_file.only_stack(directory) if options.list_stacks(directory) else FIRST_STACK)
    stack_file.check_name(name)
    plans = source if _is_plan(source) else run_recommend(source, choose_folder(directory) / f"plans.{name}.json")
    plan = options.read_plan_argument(plans, plan_number)
    again = options.repeat_command({"source": [plans], "stack": ["--stack", name]})
    place = stack_file.plan_stack(name, directory, plan, config_given)
    ceiling_usd = read_place(place, accept_stale_prices=accept_stale_prices).ceiling_usd
    if not yes:
        _ask(place, ceiling_usd, again)
    deploy(plan, name, directory, again, config=config_given, accept_stale_prices=accept_stale_prices)
    _resume_stopped(name, directory)
    follow_run(name, directory, follow=follow)


def _is_plan(source: str) -> bool:
    """Tell a plan, or the answer of recommend, from a request."""
    if source == "-":
        return True
    with suppress(OSError, ValueError):
        document = json.loads(Path(source).read_text(encoding="utf-8"))
        return isinstance(document, dict) and "schema_version" in document
    return False


def _ask(place: stack_file.StackFile, ceiling_usd: float | None, again: str) -> None:
    plan = stack_file.follow_policy(place.plan, place.config)
    limit = f", at most {ceiling_usd:,.2f}" if ceiling_usd else ""
    planned = plan.spot_policy or plan
    say(
        f"\nstack {place.stack}: {plan.fleet} in {plan.region} for {plan.job.model}, expected "
        f"{planned.hours.expected:,.1f} h and {planned.cost_usd.expected:,.2f} USD "
        f"(95th percentile {planned.hours.p95:,.1f} h, {planned.cost_usd.p95:,.2f} USD){limit}"
    )
    why, takes = "nodes cost money from their first minute", f"{again} takes the same plan"
    confirm("Stand it up?", why=why, again=again, nothing_was="created", next_step=takes)


def _resume_stopped(stack: str, directory: Path) -> None:
    """Lift a request to stop, which outlives ``gpufleet down``, or gpufleet:waits: otherwise no node would start."""
    file = stack_file.read_stack(stack, directory)
    request = stack_file.read_asked(stack_file.resolve_names(file))
    if request.want == "stop" if request else file.config.get("gpufleet:waits"):
        click.get_current_context().invoke(resume, stack=stack, directory=directory)
