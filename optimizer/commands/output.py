"""``--format table|json|csv`` of all listing commands, and the writers behind it."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click
from pydantic_core import to_json

from bootstrap.contract.words import counted
from optimizer.catalog import Catalog
from optimizer.catalog.ttl import stale_lines
from optimizer.contract.errors import GpufleetError

# Columns of prose at most, and of everything where there is no terminal.
PAGE_WIDTH = 120
LEAST_WIDTH = 40


format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="How to print the result.",
)


def write_truer(
    catalog: Catalog, *, is_spot_old: bool = False, again: str = "gpufleet recommend REQUEST.yaml --refresh"
) -> None:
    """End an answer with the one command that makes it truer, on standard error; with nothing where none would.

    ``again`` reads today's spot prices, where those of the answer are too old to buy at.
    """
    if is_spot_old:
        say(f"truer: {again} reads today's spot prices", err=True)
    elif old := stale_lines(catalog):
        are = "is" if len(old) == 1 else "are"
        say(f"truer: gpufleet catalog refresh; {counted(len(old), 'kind')} of data {are} old", err=True)


def write_plan_truer(plan: str, plan_number: int) -> None:
    """End an answer on a plan of a file, - for standard input, as ``write_truer`` does."""
    words = ("PLAN" if plan == "-" else shlex.quote(plan)) + f" --plan {plan_number}" * (plan_number > 1)
    say(f"truer: gpufleet preflight {words} asks your account for today's prices and quotas", err=True)


def write_notes(notes: Iterable[object]) -> None:
    """Print ``notes`` on standard error: wrapped on a terminal, else one line each."""
    for note in notes:
        say(f"note: {note}", err=True)


def say(text: object, *, err: bool = False, indent: str = "  ") -> None:
    """Print sentences, each whole; on a terminal wrapped, further lines with the line's own indent and ``indent``."""
    stream = sys.stderr if err else sys.stdout
    if stream is None or not stream.isatty():
        click.echo(text, err=err)
        return
    for line in str(text).split("\n"):
        write_text(line, indent=" " * (len(line) - len(line.lstrip(" "))) + indent, err=err)


def write_error(error: GpufleetError, *, as_json: bool) -> None:
    """Print an error on standard error: as text, or as one line of JSON."""
    if as_json:
        click.echo(json.dumps({"error": describe_error(error)}), err=True)
    else:
        say(f"error: {error}", err=True)


def describe_error(error: GpufleetError) -> dict[str, Any]:
    """Return an error as programs read it: what is unknown of it is None."""
    message = ": ".join(filter(None, (error.got, error.why)))
    document = {"code": error.exit_code, "kind": type(error).__name__, "message": message, "value": error.got}
    return document | {"limit": error.limit or None, "next": error.next_step or None}


def write_json(data: Any) -> None:
    """Print ``data`` as indented JSON; a date prints as ISO 8601. NaN and infinity are errors, not invalid JSON."""
    click.echo(json.dumps(data, indent=2, default=str, allow_nan=False))


def json_text(document: Mapping[str, Any]) -> str:
    """Return a large document as indented JSON. NaN and infinity are errors, as in ``write_json``.

    pydantic indents half a megabyte in a tenth of json's time
    (https://docs.pydantic.dev/latest/api/pydantic_core/#pydantic_core.to_json).
    """
    text = to_json(document, indent=2, ensure_ascii=True).decode()
    if "NaN" in text or "Infinity" in text:  # a number, or part of a name
        json.dumps(document, allow_nan=False)
    return text


def write_file(path: Path, text: str) -> None:
    """Write a text to the user's file or device; a GpufleetError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GpufleetError(f"{path} cannot be written: {error.strerror}", next_step="name another file") from error


def replace_file(path: Path, write: Callable[[IO[str]], object]) -> None:
    """Write the whole file or nothing: a full disk or a kill leaves the old one; errors as of ``write_file``."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            write(file)
        temporary.chmod(path.stat().st_mode if path.exists() else 0o644)
        temporary.replace(path)
    except OSError as error:
        raise GpufleetError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print ``rows`` as CSV with exactly ``columns``; None prints as an empty field."""
    writer = csv.DictWriter(sys.stdout, fieldnames=list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if row.get(name) is None else row[name] for name in columns})


def write_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] | None = None,
    *,
    title: str = "",
    spare: Sequence[str] = (),
) -> None:
    """Print ``rows`` as a table within the terminal's width.

    Numbers align right; None prints as a dash. In a narrow terminal the fields of ``spare`` are left out, the first
    first, then words wrap; where even that is too wide, every row is a block of lines.

    Args:
        rows: field to value.
        columns: field to heading, by default every field to itself.
        title: a line above.
        spare: fields that may be left out; a line below names them.
    """
    from optimizer.commands.layout import choose_columns, print_blocks, print_table  # JSON and CSV need no rich

    width = output_width()
    headings = dict(columns or {field: field for field in rows[0]})
    cells = [{field: _cell(row.get(field)) for field in headings} for row in rows]
    numeric = {field for field in headings if any(_is_number(row.get(field)) for row in rows)}
    widths, left_out = choose_columns(headings, cells, spare, width)
    if title:
        write_text(title)
    shown = {field: heading for field, heading in headings.items() if field not in left_out}
    if widths:
        print_table(shown, cells, numeric, widths)
    else:
        print_blocks(shown, cells, width)
    if left_out:
        names = ", ".join(headings[field] for field in left_out)
        write_text(f"Left out at {width} columns: {names}; a wider terminal and --format json have them.")


def output_width(*, err: bool = False) -> int:
    """Return the columns of the terminal, of COLUMNS, or of a page where there is no terminal."""
    stream = sys.stderr if err else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(int(columns), LEAST_WIDTH)
    try:
        return max(os.get_terminal_size(stream.fileno()).columns, LEAST_WIDTH)
    except (OSError, ValueError):  # no terminal, or no file at all
        return PAGE_WIDTH


def write_text(text: str, *, indent: str = "", err: bool = False) -> None:
    """Print lines, each wrapped within the terminal's width; ``indent`` begins a line's further lines.

    A flag or a name with hyphens stays whole.
    """
    width = min(output_width(err=err), PAGE_WIDTH)
    for line in text.split("\n"):
        lines = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        click.echo("\n".join(lines), err=err)


def write_rows(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    output_format: str,
    *,
    title: str = "",
    spare: Sequence[str] = (),
) -> None:
    """Print ``rows`` in the chosen format with the fields of ``columns``, in their order."""
    if output_format == "json":
        write_json([{field: row.get(field) for field in columns} for row in rows])
    elif output_format == "csv":
        write_csv(rows, list(columns))
    else:
        write_table(rows, columns, title=title, spare=spare)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and bool(re.match(r"~\d|\d.*%$", value)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return format_number(value) if isinstance(value, float) else str(value)


def format_number(value: float) -> str:
    """Return a number as tables have it: four significant digits, or all before the point."""
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
