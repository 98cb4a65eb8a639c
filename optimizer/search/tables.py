"""Tables: frozen dataclasses whose fields are arrays of one length, a row an index."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Table = TypeVar("Table", bound="DataclassInstance")


def take_rows(table: Table, index: Any) -> Table:
    """The rows of ``table`` at an index, a slice, an array of indices or a mask."""
    return replace(table, **{field.name: getattr(table, field.name)[index] for field in fields(table)})
