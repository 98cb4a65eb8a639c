"""Tables: frozen dataclasses whose fields are arrays of one length, a row an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Table = TypeVar("Table", bound="DataclassInstance")


def take_rows(table: Table, index: Any) -> Table:
    """The rows of ``table`` at an index, a slice, an array of indices or a mask."""
    return replace(table, **{field.name: getattr(table, field.name)[index] for field in fields(table)})


def join_rows(tables: Sequence[Table]) -> Table:
    """The rows of several tables, one table after the other."""
    names = [field.name for field in fields(tables[0])]
    return replace(tables[0], **{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})
