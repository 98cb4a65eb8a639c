"""The GPU table (data/gpus.csv) and the table of GPU links by family (data/interconnects.csv), both kept by hand.

Neither fact is in any AWS API: a GPU's speed is in its vendor's datasheet, and DescribeInstanceTypes does not say how
the GPUs of an instance are linked.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import cast, get_args

from optimizer.errors import DataMissingError
from optimizer.hardware import Gpu, Interconnect, Precision

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ec2Name:
    """How DescribeInstanceTypes names a GPU; models of two memory sizes share a name."""

    name: str
    memory_mib: int


@cache
def gpu_table() -> dict[str, Gpu]:
    """Every GPU by its key.

    Raises:
        DataMissingError: the table is missing, or a row is not what the header says.
    """
    return {gpu.key: gpu for _, gpu in _rows()}


def find_gpu(name: str, memory_mib: float) -> Gpu | None:
    """The GPU that DescribeInstanceTypes calls ``name`` with ``memory_mib`` of memory, or None.

    Args:
        name: GpuInfo.Gpus[].Name ("A100").
        memory_mib: memory of a whole GPU, MiB.
    """
    for ec2, gpu in _rows():
        if ec2.name == name and ec2.memory_mib == round(memory_mib):
            return gpu
    return None


@cache
def _rows() -> tuple[tuple[_Ec2Name, Gpu], ...]:
    path = DATA / "gpus.csv"
    found = []
    for line, row in _read(path):
        try:
            peaks = {
                precision: float(row[f"{precision}_tflop_per_s"])
                for precision in get_args(Precision)
                if row[f"{precision}_tflop_per_s"]
            }
            ec2 = _Ec2Name(name=row["ec2_name"], memory_mib=int(row["ec2_memory_mib"]))
            gpu = Gpu(
                key=row["key"],
                name=row["name"],
                architecture=row["architecture"],
                memory_gib=ec2.memory_mib / 1024,
                memory_bandwidth_gb_per_s=float(row["memory_bandwidth_gb_per_s"]),
                peak_tflop_per_s=peaks,
                nvlink_gb_per_s=float(row["nvlink_gb_per_s"]),
                source=row["source"],
                as_of=date.fromisoformat(row["as_of"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(path, f"line {line}: {error!r}") from error
        found.append((ec2, gpu))
    return tuple(found)


@cache
def interconnects() -> dict[str, Interconnect]:
    """How GPUs of one instance are linked, by family ("p5"), for types with more than one GPU.

    Raises:
        DataMissingError: the table is missing, or a row is not what the header says.
    """
    path = DATA / "interconnects.csv"
    found: dict[str, Interconnect] = {}
    for line, row in _read(path):
        link = row.get("interconnect")
        if link not in get_args(Interconnect) or not row.get("family") or not row.get("source"):
            raise _broken(path, f"line {line}: {row}")
        found[row["family"]] = cast(Interconnect, link)
    return found


def _read(path: Path) -> list[tuple[int, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            return [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _broken(path, str(error)) from error


def _broken(path: Path, what: str) -> DataMissingError:
    return DataMissingError(
        f"{path} cannot be used: {what}",
        limit="one line a GPU or family, every column of the header filled in",
        why="no estimate is made without these facts",
        next_step="pip install --force-reinstall gpufleet",
    )
