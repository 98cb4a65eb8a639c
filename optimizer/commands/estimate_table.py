"""``gpufleet estimate --batch``: read a table of runs, estimate every row, write the table with the estimates."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.words import counted
from optimizer.catalog.gpus import gpu_table
from optimizer.commands.output import say
from optimizer.commands.progress import patience
from optimizer.contract.errors import GpufleetError, InvalidInputError, unreadable
from optimizer.performance.calibration import Calibration
from optimizer.performance.rows import COLUMNS, estimate_rows


def estimate_table(path: Path, out: Path | None, calibration: Calibration, *, as_json: bool) -> None:
    """Estimate the rows of the CSV at ``path`` ("-": standard input), and write them to ``out`` or print them."""
    columns, rows = _read(path)
    with patience(f"estimating {counted(len(rows), 'row')}"):
        results = estimate_rows(rows, gpu_table(), calibration)
    names = [*(name for name in columns if name not in COLUMNS), *COLUMNS]
    text = _json(names, rows, results) if as_json else _csv(names, rows, results)
    if out is None or str(out) == "-":
        click.echo(text, nl=False)
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise GpufleetError(f"{out} cannot be written: {error}", next_step="give another --out") from error
    failed = [result["error"] for result in results if result["error"]]
    say(f"{len(rows) - len(failed)} of {counted(len(rows), 'row')} estimated", err=True)
    if rows and len(failed) == len(rows):
        raise GpufleetError(f"no row of {_name(path)} could be estimated; the first: {failed[0]}")


def _read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    try:
        if str(path) == "-":
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        else:
            text = path.read_bytes().decode("utf-8-sig")
        # Cells beyond the header gather under no name; the row then gets an error.
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey="", restval="")
        columns = list(reader.fieldnames or [])
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(unreadable(Path(_name(path)), error), next_step="gpufleet estimate --help") from error
    if not columns:
        raise InvalidInputError(f"{_name(path)} is empty", limit="a header line with the columns of a run")
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
        raise InvalidInputError(
            f"{_name(path)} has one column, {columns[0][:60]!r}",
            limit="columns are separated by commas",
            next_step="save the table with commas",
        )
    twice = sorted({name for name in columns if name and columns.count(name) > 1})
    if twice:
        raise InvalidInputError(
            f"{_name(path)} has more than one column {', '.join(twice)}",
            limit="one column a name",
            why="which of them counts would be a guess",
        )
    return columns, rows


def _name(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _csv(names: list[str], rows: list[dict[str, Any]], results: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, result in zip(rows, results, strict=True):
        writer.writerow({**row, **{name: _cell(value) for name, value in result.items()}})
    return text.getvalue()


def _json(names: list[str], rows: list[dict[str, Any]], results: list[dict[str, Any]]) -> str:
    """Format as JSON: cells stay text, estimates are a number, true, false or null."""
    table = [
        {name: (row | result).get(name) for name in names if name} for row, result in zip(rows, results, strict=True)
    ]
    return json.dumps(table, indent=2, allow_nan=False) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
