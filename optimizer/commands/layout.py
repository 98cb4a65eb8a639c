"""Layout of tables in a terminal: widths of columns, a table, and blocks of lines where a table is too wide."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence

import click
from rich.console import Console
from rich.table import Table

# Between columns.
GAP = 2
# A longer cell is a sentence, which wraps.
SENTENCE = 32
# Least width of a column of sentences while fields can be left out: about three words a line.
LEAST_SENTENCE = 18
# A longer word is broken: most URLs are shorter; in a narrow terminal, most names.
LONGEST_WORD, LONGEST_NAME = 48, 24

Cells = Sequence[Mapping[str, str]]


def choose_columns(
    headings: Mapping[str, str], cells: Cells, spare: Sequence[str], width: int
) -> tuple[dict[str, int], list[str]]:
    """Choose columns that fit ``width``.

    Returns:
        Field to width, empty where no table fits; and the fields of ``spare`` that are left out.
    """
    shown, left_out = dict(headings), []
    for field in (None, *(field for field in spare if field in headings)):
        if field is not None:
            left_out.append(field)
            del shown[field]
        if widths := _fit(shown, cells, width, least_sentence=LEAST_SENTENCE):
            return widths, left_out
    return _fit(shown, cells, width) or _fit(shown, cells, width, words_wrap=True), left_out


def _fit(
    headings: Mapping[str, str], cells: Cells, width: int, *, words_wrap: bool = False, least_sentence: int = 0
) -> dict[str, int]:
    """Give each column its width; headings and sentences wrap, other cells only if ``words_wrap``."""
    widths, floors = {}, {}
    for field, heading in headings.items():
        texts = [row[field] for row in cells]
        longest = max(map(len, texts), default=0)
        widths[field] = max(longest, len(heading))
        if words_wrap or longest > SENTENCE:
            texts = [word for text in texts for word in text.split()]
        longest_word = max(map(len, [*texts, *heading.split()]), default=0)
        floors[field] = min(longest_word, LONGEST_NAME if words_wrap else LONGEST_WORD)
        if longest > SENTENCE:
            floors[field] = max(floors[field], least_sentence)
    excess = sum(widths.values()) + GAP * (len(widths) - 1) - width
    for _ in range(excess):
        field = max(widths, key=lambda name: (widths[name] > floors[name], widths[name]))
        if widths[field] <= floors[field]:
            return {}
        widths[field] -= 1
    return widths


def print_table(headings: Mapping[str, str], cells: Cells, numeric: Collection[str], widths: Mapping[str, int]) -> None:
    """Print a table with columns of ``widths``."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for field, heading in headings.items():
        justify = "right" if field in numeric else "left"
        table.add_column(heading, justify=justify, width=widths[field], overflow="fold")  # type: ignore[arg-type]
    for row in cells:
        table.add_row(*(row[field] for field in headings))
    total = sum(widths.values()) + GAP * len(widths)
    # A name in brackets is no markup.
    # On a dumb terminal rich takes a width only with a height (rich.console.Console.size).
    Console(width=total, height=25, highlight=False, markup=False, emoji=False).print(table)


def print_blocks(headings: Mapping[str, str], cells: Cells, width: int) -> None:
    """Print every row as lines of heading and value, with an empty line between two rows."""
    indent = " " * (max(map(len, headings.values())) + GAP)
    for number, row in enumerate(cells):
        if number:
            click.echo()
        for field, heading in headings.items():
            if not row[field]:
                continue
            first = f"{heading:<{len(indent)}}"
            click.echo(textwrap.fill(row[field], width, initial_indent=first, subsequent_indent=indent))
