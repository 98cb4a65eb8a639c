"""GPUs (data/gpus.csv), their links by family (data/interconnects.csv), the types whose EFA reaches GPU memory
(data/gpudirect.csv), and families without a place in the catalog (data/left_out.csv), kept by hand: no AWS API has
these facts.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path
from typing import TypeVar, cast, get_args

from optimizer.contract.hardware import Gpu, Interconnect, Precision

DATA = Path(__file__).parent / "data"

R = TypeVar("R")


@cache
def gpu_table() -> dict[str, Gpu]:
    """GPUs by key."""
    return {gpu.key: gpu for _, gpu in _rows()}


def find_gpu(name: str, memory_mib: float) -> Gpu | None:
    """Find the GPU that DescribeInstanceTypes calls ``name`` ("A100") and that has ``memory_mib`` of memory, MiB."""
    return next((gpu for ec2_gpu, gpu in _rows() if ec2_gpu == (name, round(memory_mib))), None)


@cache
def _rows() -> list[tuple[tuple[str, int], Gpu]]:
    return read_table("gpus.csv", _parse_gpu)


def _parse_gpu(row: dict[str, str]) -> tuple[tuple[str, int], Gpu]:
    """Parse a GPU, and its name (empty off EC2; models of two memory sizes share it) and memory, MiB, on EC2."""
    peaks = {precision: row[f"{precision}_tflop_per_s"] for precision in get_args(Precision)}
    memory_mib = int(row["ec2_memory_mib"])
    gpu = Gpu(
        key=row["key"],
        name=row["name"],
        architecture=row["architecture"],
        memory_gib=memory_mib / 1024,
        memory_bandwidth_gb_per_s=float(row["memory_bandwidth_gb_per_s"]),
        peak_tflop_per_s={precision: float(peak) for precision, peak in peaks.items() if peak},
        nvlink_gb_per_s=float(row["nvlink_gb_per_s"]),
        pcie_gb_per_s=float(row["pcie_gb_per_s"]),
        visible_memory_share=float(row["visible_mib"] or memory_mib) / memory_mib,
        die=row["die"] or row["name"],
        network_gbit_per_s=float(row["network_gbit_per_s"]),
        source=row["source"],
        as_of=date.fromisoformat(row["as_of"]),
    )
    return (row["ec2_name"], memory_mib), gpu


@cache
def interconnects() -> dict[str, Interconnect]:
    """Links between the GPUs of an instance by family ("p5"), for types with several GPUs."""
    return dict(read_table("interconnects.csv", lambda row: (row["family"], cast(Interconnect, row["interconnect"]))))


def has_gpudirect(instance_type: str) -> bool | None:
    """Return whether EFA of a type reads and writes GPU memory; None for a type that no line names."""
    return next((direct for types, direct in _gpudirect() if types.fullmatch(instance_type)), None)


@cache
def _gpudirect() -> list[tuple[re.Pattern[str], bool]]:
    return read_table("gpudirect.csv", lambda row: (re.compile(row["types"]), row["gpudirect"] == "yes"))


def why_left_out(instance_type: str) -> str:
    """Return why the catalog leaves out the family of a type or pattern ("trn1.*"); empty for any other."""
    family = instance_type.partition(".")[0]
    return next((row["reason"] for row in left_out() if re.fullmatch(row["families"], family)), "")


@cache
def left_out() -> list[dict[str, str]]:
    """Rows of data/left_out.csv."""
    return read_table("left_out.csv", dict)


def read_table(name: str | Path, parse: Callable[[dict[str, str]], R]) -> list[R]:
    """Parse a table that is kept by hand, in data/ or at a path; tests read all tables."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(map(parse, csv.DictReader(file)))
