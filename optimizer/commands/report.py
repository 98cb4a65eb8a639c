"""``gpufleet report``: a plan and its rivals as one HTML page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from optimizer.commands.options import parse_plan_argument, plan_arguments
from optimizer.commands.output import replace_file
from optimizer.errors import GpufleetError


@click.command(
    epilog="""\b
Example:
  gpufleet recommend request.yaml --save plans.json
  gpufleet report plans.json --out report.html
  gpufleet report plans.json --plan 2 --out second.html
"""
)
@plan_arguments
@click.option(
    "--out",
    metavar="FILE.html",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File to write; an older one is replaced.",
)
def command(plan: str, plan_number: int, out: Path) -> None:
    """Write PLAN as one HTML page to look at, print or send: cost against time, memory, step, dollars, sources.

    PLAN is one plan or the output of recommend, whose other plans, Pareto front and rejected types the page shows too;
    - reads standard input. The page loads nothing from anywhere, is light or dark as the reader's system is, and works
    on a phone, on paper and with a keyboard (docs/report.md). Needs the extra: pip install 'gpufleet[report]'.
    """
    try:
        from optimizer.report.answer import read_answer
        from optimizer.report.page import render
    except ImportError as error:
        raise GpufleetError(
            f"report needs {error.name}, which is not installed",
            why="only the page needs it, so it is an extra",
            next_step="pip install 'gpufleet[report]'",
        ) from error
    answer = parse_plan_argument(plan, lambda text, origin: read_answer(text, plan_number=plan_number, origin=origin))
    page = render(answer, origin=plan, now=datetime.now(UTC))
    try:
        replace_file(out, lambda file: file.write(page))
    except OSError as error:
        raise GpufleetError(f"--out {out} cannot be written: {error}", next_step="name another file") from error
    click.echo(f"wrote {out}", err=True)
