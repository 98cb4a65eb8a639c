"""``gpufleet calibrate``: fit the speed model to a user's measured runs, and report the errors before and after."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from bootstrap.contract.measured import FOLDER
from optimizer.aws import clients, errors
from optimizer.aws.training import read_measured
from optimizer.catalog import load as load_catalog
from optimizer.catalog.gpus import gpu_table
from optimizer.commands.options import OutputFile, directory_option
from optimizer.commands.output import format_option, replace_file, say, write_csv, write_json, write_table, write_text
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import StackFile, read_stack, resolve_names
from optimizer.contract.errors import DataMissingError, InvalidInputError
from optimizer.performance.calibration import load
from optimizer.performance.measured_runs import RUN_COLUMNS, RUNS, cells_of, newest_by_layout, usable_runs
from optimizer.performance.rows import read_table

if TYPE_CHECKING:
    from optimizer.performance.fit import CalibrationReport

# Rows from which a calibration is worth much, from the benchmark in docs/models.md.
FEW = 5

COLUMNS = {
    "group": "GPU",
    "rows": "rows",
    "before": "shipped %",
    "bias_before": "bias",
    "after": "fitted %",
    "left_out": "left out %",
    "bias_left_out": "bias",
}


@click.command(
    epilog="""\b
Examples:
  gpufleet calibrate --template > my_runs.csv
  gpufleet calibrate my_runs.csv --out my_calibration.json
  gpufleet calibrate --from-stack --stack dev --out my_calibration.json
  gpufleet recommend --model llama-3.1-8b --tokens 2B --seq-len 8192 --calibration my_calibration.json
"""
)
@click.argument("runs", metavar="[RUNS.csv]", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--out", type=OutputFile(), help="Write the calibration here.  [default: only show what it is worth]")
@click.option("--from-stack", is_flag=True, help="Read the runs that a stack measured, instead of RUNS.csv.")
@click.option("--stack", metavar="NAME", help="Stack of --from-stack.  [default: the only one of the folder]")
@directory_option
@click.option("--template", is_flag=True, help="Print the columns of RUNS.csv and one published run.")
@format_option
def command(
    runs: Path | None,
    out: Path | None,
    from_stack: bool,
    stack: str | None,
    directory: Path,
    template: bool,
    output_format: str,
) -> None:
    """Fit the speed model to your own measured runs.

    RUNS.csv has one run a row, with the columns of --template; a model (preset or shape), a gpu and the measured
    tokens_per_second_per_gpu suffice, and an empty cell means what docs/estimator.md says. Prints the error of
    predicted throughput with the shipped calibration, with the new one, and with one that never saw the row's model
    (or the row, where there is one model): that last figure is the one to expect of the next run. Rows that cannot be
    used are listed with their lines and left out.

    --from-stack takes the rows that the reference trainer writes to a stack's bucket after its first steps, the newest
    of each layout; it needs s3:ListBucket and s3:GetObject on the bucket and kms:Decrypt on its key.

    recommend and estimate take the file written with --calibration. Peak memory is not fitted; estimate --batch
    RUNS.csv predicts it.
    """
    if template:
        if runs or out or from_stack:
            raise click.UsageError("--template goes alone")
        with RUNS.open(encoding="utf-8") as table:
            write_csv([next(csv.DictReader(table))], RUN_COLUMNS)
        return
    if stack and not from_stack:
        raise click.UsageError("--stack goes with --from-stack")
    if from_stack == (runs is not None):
        raise click.UsageError("give RUNS.csv, or --from-stack, or --template")
    if out is not None and out.exists():
        if runs is not None and runs.exists() and out.samefile(runs):
            raise InvalidInputError(f"--out is {out}, the runs themselves", limit="another file")
        if not out.is_file():  # a device or a pipe would be replaced by a file
            raise InvalidInputError(f"--out is {out}, no regular file", next_step="leave --out away to write nothing")
    from optimizer.performance.fit import calibrate  # help needs no scipy

    with patience("fitting the speed model"):
        if runs:
            lines, origin = read_table(runs)[1], "standard input"
            if str(runs) != "-":
                origin = f"{runs.name}, sha256 {hashlib.sha256(runs.read_bytes()).hexdigest()[:12]}"
        else:
            lines, origin = _read_stack(read_stack(stack, directory))
        rows, refused, unread = usable_runs(lines, gpu_table())
        report = calibrate(rows, refused, load(), origin=origin)
    if out is not None:
        text, target = report.calibration.model_dump_json(indent=2) + "\n", out.resolve()  # a link stays
        replace_file(target, lambda file: file.write(text))
    _print(report, unread, out, output_format)
    _remark(report, unread)
    if out is None:
        say("nothing written: --out FILE keeps the calibration", err=True)
    else:
        say(f"{out} written; gpufleet recommend --calibration {out} uses it", err=True)


def _print(report: CalibrationReport, unread: list[str], out: Path | None, output_format: str) -> None:
    """Print the errors of the runs and of their groups."""
    runs_table, groups = _tabulate_runs(report), _tabulate_groups(report)
    if output_format == "csv":
        write_csv(runs_table, list(runs_table[0]))
    elif output_format == "json":
        write_json(
            {
                "written": out and str(out),
                "left_out_by": report.left_out_by,
                "throughput_error_percent": groups,
                "runs": runs_table,
                "refused": [asdict(each) for each in report.refused],
                "unread_columns": unread,
                "calibration": report.calibration.model_dump(mode="json"),
            }
        )
    else:
        write_text(f"error of predicted throughput, runs: {len(report.rows)} (a bias above 0: predicted too fast)")
        write_table(groups, COLUMNS)
        write_text(f"left out: predicted by a fit that never saw the row's {report.left_out_by}")


def _read_stack(file: StackFile) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """Read the newest row of each layout of a stack as numbered cells, with their origin."""
    names = resolve_names(file)
    place = f"s3://{names.bucket}/{names.checkpoint_prefix}/{FOLDER}"
    hint = f"gpufleet status --stack {file.stack} tells what the credentials may read"
    with errors.explained(f"{place} cannot be read", next_step=hint):
        rows, unread = read_measured(clients.s3(names.region), names.bucket, names.checkpoint_prefix)
    for reason in unread.values():
        say(f"refused: {reason}", err=True)
    if not rows:
        raise DataMissingError(
            f"{place} holds no measured run",
            why="the reference trainer writes one after its first steps; code of your own writes none",
            next_step=f"gpufleet status --stack {file.stack}; for code of your own: gpufleet calibrate --template",
        )
    measured = newest_by_layout(rows)
    instance_types = {instance.name: instance for instance in load_catalog().instance_types}
    cells = [cells_of(row, gpu_table(), instance_types.get(row.instance_type)) for row in measured]
    days = [row.at for row in measured]
    return list(enumerate(cells, start=1)), f"stack {file.stack}, measured {min(days):%Y-%m-%d} to {max(days):%Y-%m-%d}"


def _tabulate_runs(report: CalibrationReport) -> list[dict[str, Any]]:
    """List the usable runs; errors are relative, of throughput, above 0 if predicted too fast."""
    return [
        {
            "line": row.line,
            "row_id": row.row_id,
            "model": row.setup.model.name,
            "gpu": row.setup.hardware.gpu.key,
            "gpus": int(row.setup.gpus),
            "measured_tokens_per_second_per_gpu": row.tokens_per_second_per_gpu,
            **{f"error_{when}": round(float(error[index]), 4) for when, error in report.errors.items()},
        }
        for index, row in enumerate(report.rows)
    ]


def _tabulate_groups(report: CalibrationReport) -> list[dict[str, Any]]:
    """Mean absolute error and mean error (bias), per cent, by GPU and of all rows."""
    gpus = [row.setup.hardware.gpu.key for row in report.rows]
    groups = []
    for name in (*(sorted(set(gpus)) if len(set(gpus)) > 1 else ()), "all"):
        mine = np.array([name in (gpu, "all") for gpu in gpus])
        group: dict[str, Any] = {"group": name, "rows": int(mine.sum())}
        for when, every in report.errors.items():
            group[when] = round(100 * float(np.abs(every[mine]).mean()), 1)
            group[f"bias_{when}"] = round(100 * float(every[mine].mean()), 1)
        groups.append(group)
    return groups


def _remark(report: CalibrationReport, unread: list[str]) -> None:
    """Print the notes on what was read and what the fit is worth."""
    for refused in report.refused:
        say(f"line {refused.line}{refused.row_id and f' ({refused.row_id})'} refused: {refused.reason}", err=True)
    if unread:
        say(f"note: nothing reads the columns {', '.join(unread)}", err=True)
    if len(report.rows) == 1:
        say("note: one run leaves nothing to check the fit with; add runs of another model", err=True)
    elif np.abs(report.errors["left_out"]).sum() > np.abs(report.errors["before"]).sum():
        say("note: left out, the new calibration is worse than the shipped one: keep the shipped one", err=True)
    if len(report.rows) < FEW:
        few = f"{len(report.rows)} of the {FEW} or more rows from which a calibration is worth much (docs/models.md)"
        say(f"note: {few}; with fewer it stays near the shipped one", err=True)
