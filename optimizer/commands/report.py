"""``gpufleet report``: a plan and its rivals, or a run, as one HTML page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from bootstrap.contract.ledger import LedgerError
from optimizer.aws import clients
from optimizer.aws.training import read_ledger_lines
from optimizer.commands.options import OutputFile, directory_option, parse_plan_argument, plan_number_option, stack_path
from optimizer.commands.output import say, write_file, write_plan_truer
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import follow_policy, read_stack, resolve_names
from optimizer.commands.status import as_json
from optimizer.commands.status.measures import headline
from optimizer.commands.status.reading import read
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.report.answer import read_answer
from optimizer.report.page import render
from optimizer.report.run import Run, read_run


@click.command(
    epilog="""\b
Example:
  gpufleet recommend request.yaml --save plans.json
  gpufleet report plans.json --out report.html
  gpufleet report plans.json --plan 2 --out second.html
  gpufleet report dev --out dev.html
"""
)
@click.argument("plan", metavar="PLAN|STACK")
@plan_number_option
@click.option(
    "--out", metavar="FILE.html", type=OutputFile(), required=True, help="File to write; an older one is replaced."
)
@directory_option
def command(plan: str, plan_number: int, out: Path, directory: Path) -> None:
    """Write PLAN, or the run of STACK, as one HTML page to look at, print or send.

    PLAN is one plan or the output of recommend, whose other plans, Pareto front and rejected types the page shows
    too; - reads standard input. STACK is the name
    of a Pulumi.STACK.yaml: the page adds predicted against actual, loss and interruptions, and each
    second and dollar of the ledger, read from AWS as gpufleet status does. The page loads nothing from anywhere, and
    works light or dark, on a phone, on paper and with a keyboard (docs/plans.md).
    """
    now, run = datetime.now(UTC), None
    its_stack = None if plan == "-" or Path(plan).exists() else stack_path(directory, plan)
    if its_stack and its_stack.is_file():
        with patience("reading the stack and its ledger"):
            chosen, run = _read_stack(plan, directory, now)
        # An earlier version's digest is no fault of a deployed plan.
        answer = read_answer(chosen.model_copy(update={"digest": ""}).to_json())
    elif its_stack and not Path(plan).suffix:
        raise InvalidInputError(
            f"{plan} is no file, and {its_stack} is missing",
            limit="a plan's file, or a stack's name",
            next_step="gpufleet recommend REQUEST.yaml --save plans.json, or --directory FOLDER of the stack",
        )
    else:
        answer = parse_plan_argument(
            plan, lambda text, origin: read_answer(text, plan_number=plan_number, origin=origin)
        )
    with patience("drawing the page"):
        page = render(answer, now=now, run=run)
    write_file(out, page)
    say(f"wrote {out}", err=True)
    if run is None:
        write_plan_truer(plan, plan_number)


def _read_stack(stack: str, directory: Path, now: datetime) -> tuple[FleetPlan, Run]:
    """Read a deployed stack's plan and run, as ``gpufleet status`` does."""
    file = read_stack(stack, directory)
    names = resolve_names(file)
    reading, plan = read(names, now), follow_policy(file.plan, file.config)
    s3, lines = clients.s3(names.region), list[str]()
    lines = reading.attempt("ledger", lambda: read_ledger_lines(s3, names.bucket, names.checkpoint_prefix), lines)
    document = as_json(names, plan, reading)
    words = [*headline(plan, reading), *document["notices"]]
    words += [f"{part} cannot be read: {reason}" for part, reason in reading.unread.items()]
    try:
        run = read_run(lines, words=words, measures=document["measures"])
    except LedgerError as error:
        words.append(f"the ledger cannot be used: {error}")
        run = read_run([], words=words, measures=document["measures"])
    return file.plan, run
