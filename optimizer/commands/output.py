"""``--format table|json|csv`` of all listing commands, and the writers behind it."""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from optimizer.catalog import Catalog

F = TypeVar("F", bound=Callable[..., Any])

MAX_TABLE_WIDTH = 1000  # characters


def format_option(function: F) -> F:
    """Add ``--format``, passed to the command as ``output_format``."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(["table", "json", "csv"]),
        default="table",
        show_default=True,
        help="How to print the result.",
    )(function)


def write_catalog_notes(catalog: Catalog) -> None:
    """Warn on standard error of old prices and of a snapshot that was passed over."""
    from optimizer.catalog.ttl import stale_lines

    write_notes((*catalog.notes, *stale_lines(catalog)))


def write_notes(notes: Iterable[object]) -> None:
    """Print ``notes`` on standard error."""
    for note in notes:
        click.echo(f"note: {note}", err=True)


def write_json(data: Any) -> None:
    """Print ``data`` as indented JSON; a date prints as ISO 8601. NaN and infinity are errors, not invalid JSON."""
    click.echo(json.dumps(data, indent=2, default=str, allow_nan=False))


def json_text(document: Mapping[str, Any]) -> str:
    """Return a large document as indented JSON. NaN and infinity are errors, as in ``write_json``.

    pydantic indents half a megabyte in a tenth of json's time
    (https://docs.pydantic.dev/latest/api/pydantic_core/#pydantic_core.to_json).
    """
    from pydantic_core import to_json

    text = to_json(document, indent=2, ensure_ascii=True).decode()
    if "NaN" in text or "Infinity" in text:  # a number, or part of a name
        json.dumps(document, allow_nan=False)
    return text


def replace_file(path: Path, write: Callable[[IO[str]], object]) -> None:
    """Write the whole file or nothing: a full disk or a kill leaves the old one."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            write(file)
        temporary.chmod(path.stat().st_mode if path.exists() else 0o644)
        temporary.replace(path)
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
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None, *, title: str = ""
) -> None:
    """Print ``rows`` as a table; ``columns`` maps field to heading, by default every field to itself.

    Numbers align right; None prints as a dash. No row is cut to the terminal's width.
    """
    from rich.console import Console
    from rich.table import Table

    columns = columns or {field: field for field in rows[0]}
    table = Table(title=title or None, box=None, pad_edge=False, header_style="bold")
    for field, heading in columns.items():
        numeric = any(isinstance(row.get(field), int | float) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(field)) for field in columns))
    # A narrow terminal wraps lines, where rich would cut "p5.48xlarge" to "p5.4…". A name in brackets is no markup.
    Console(width=MAX_TABLE_WIDTH, highlight=False, markup=False, emoji=False).print(table)


def write_rows(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], output_format: str, *, title: str = ""
) -> None:
    """Print ``rows`` in the chosen format with the fields of ``columns``, in their order."""
    if output_format == "json":
        write_json([{field: row.get(field) for field in columns} for row in rows])
    elif output_format == "csv":
        write_csv(rows, list(columns))
    else:
        write_table(rows, columns, title=title)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
