"""A stack's measured runs as a table of measured runs (data/measured_runs.csv)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bootstrap.contract.measured import MeasuredRow
from optimizer.contract.hardware import Gpu, InstanceType

# Columns that may differ between two measurements of one layout.
MEASUREMENTS = frozenset(
    ("row_id", "suite", "source", "tokens_per_second_per_gpu", "peak_memory_gib", "reserved_memory_gib")
)


def newest_by_layout(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Keep the newest row of each model, layout and hardware: repeats share most of their error."""
    newest: dict[tuple[tuple[str, Any], ...], MeasuredRow] = {}
    for row in sorted(rows, key=lambda row: row.at):
        key = tuple((name, value) for name, value in row.columns().items() if name not in MEASUREMENTS)
        newest[*key, ("instance_type", row.instance_type)] = row
    return list(newest.values())


def table_text(rows: Iterable[MeasuredRow], gpus: Mapping[str, Gpu], instance_types: Mapping[str, InstanceType]) -> str:
    """Format rows as CSV, with the catalog's GPU and network of their instance type where it knows the type."""
    lines = [_cells(row, gpus, instance_types.get(row.instance_type)) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _cells(row: MeasuredRow, gpus: Mapping[str, Gpu], instance: InstanceType | None) -> dict[str, Any]:
    same_name = [gpu for gpu in gpus.values() if gpu.name == row.gpu]
    nearest = min(same_name, key=lambda gpu: abs(gpu.memory_gib - row.gpu_memory_gib), default=None)
    gpu = instance.gpu if instance else nearest
    return row.columns() | {
        "gpu": gpu.key if gpu else row.gpu,
        "network_gbit_per_s_per_node": instance.network_gbit_per_s if instance else None,
    }
