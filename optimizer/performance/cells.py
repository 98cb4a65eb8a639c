"""Cells of one CSV row, read as words and numbers; errors name column, value and limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optimizer.contract.errors import InvalidInputError

MOST = 1e15  # a larger number in a cell or flag is a mistake


class Row:
    """Cells by column; empty, NaN and None mean "not given". ``read`` notes the columns asked for."""

    def __init__(self, cells: Mapping[str, Any]) -> None:
        extra = cells.get("")  # a list where the row is longer than the header; trailing commas are harmless
        if isinstance(extra, list) and any(cell.strip() for cell in extra):
            raise InvalidInputError(
                f"the row has {len(extra)} more cells than the header",
                limit="one cell a column",
                why="a comma within a cell that is not quoted shifts the others into wrong columns",
            )
        self._cells = cells
        self.read: set[str] = set()

    def given(self, column: str) -> bool:
        """Tell if the column has a value."""
        return self.text(column) != ""

    def text(self, column: str) -> str:
        """Read the cell's text; "none" is a value of two columns, and empty in the others."""
        self.read.add(column)
        value = self._cells.get(column)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        text = str(value).strip()
        empty = ("nan", "null") if column in ("activation_checkpointing", "sharding") else ("nan", "null", "none")
        return "" if text.lower() in empty else text

    def number(self, column: str, *, default: float | None = None, least: float = 0) -> float:
        """Read a finite number; true is 1 and false 0."""
        text, limit = self.text(column), f"a number of at least {least:g}"
        if not text:
            if default is None:
                raise InvalidInputError(f"{column} is empty", limit=limit, why="there is no estimate without it")
            return default
        try:
            value = {"true": 1.0, "false": 0.0}.get(text.lower())
            value = float(text) if value is None else value
        except ValueError as error:
            raise InvalidInputError(f"{column} is {text!r}", limit=limit) from error
        if not math.isfinite(value) or value < least:
            raise InvalidInputError(f"{column} is {text}", limit=limit)
        return value

    def count(self, column: str, *, default: int | None = None, least: int = 1) -> int:
        """Read a whole number from ``least`` to MOST."""
        value = self.number(column, default=default, least=least)
        if value != round(value) or value > MOST:
            raise InvalidInputError(f"{column} is {value:g}", limit=f"a whole number from {least} to {MOST:g}")
        return round(value)

    def flag(self, column: str, *, default: bool = False) -> bool:
        """Read a number and tell if it is above 0."""
        return self.number(column, default=float(default)) > 0

    def word(self, column: str, known: Mapping[str, str], *, default: str) -> str:
        """Read a word: the value of ``known`` under the cell's text."""
        text = self.text(column).lower()
        if not text:
            return default
        if text not in known:
            raise InvalidInputError(f"{column} is {text!r}", limit=f"one of {', '.join(key for key in known if key)}")
        return known[text]
