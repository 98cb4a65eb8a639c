"""The cheapest candidate of each type, node count and purchase option, feasible or not: a picture of all candidates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from optimizer.contract.request import Constraints
from optimizer.search.candidates import CandidateTable, none_broken

COLUMNS = (
    "instance_type",
    "node_count",
    "purchase_option",
    "region",
    "hours_expected",
    "hours_p95",
    "cost_usd_expected",
    "cost_usd_p95",
    "excluded_by",
)


def list_cheapest(tables: Iterable[CandidateTable], limits: Constraints) -> dict[str, list[Any]]:
    """List one candidate a type, node count and purchase option as ``COLUMNS``, each a list.

    It is the cheapest that keeps the limits, else the cheapest. ``excluded_by`` names the limits that it breaks, with
    commas; hours and dollars are None where spot nodes are lost faster than the job recovers.
    """
    rows = [row for table in tables for row in _rows(table, limits)]
    return dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}


def _rows(table: CandidateTable, limits: Constraints) -> Iterable[tuple[Any, ...]]:
    masks = table.excluded_by(limits)
    excluded = ~none_broken(masks)
    nodes, options = table.nodes, table.options
    order = np.lexsort((table.cost.expected, excluded, options, nodes))
    begins = (np.diff(nodes[order], prepend=0) > 0) | (options[order] != np.roll(options[order], 1))
    numbers = (table.outcome.hours_expected, table.outcome.hours_p95, table.cost.expected, table.cost.p95)
    for row in order[begins].tolist():
        yield (
            table.fastest.instance.name,
            int(nodes[row]),
            str(options[row]),
            table.purchases[int(table.purchase[row])].offer.region,
            *(float(f"{column[row]:.4g}") if np.isfinite(column[row]) else None for column in numbers),
            ",".join(name for name, mask in masks.items() if mask[row]),
        )
